"""fp32 masters: an optimizer trains a copy of its own, of which the parameter is a cast, and writes the parameter anew
at each step. What comes from the other sites has to reach the copy, or the next step takes it back.

A copy is known by its values, and not by a name: it has the parameter's shape, and its cast is the parameter to the
bit. One of a single value, or of equal ones, shows nothing by itself; it counts where others under the same key of the
optimizer's state are copies. An optimizer whose copies are not found so is for `taken_back.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from atoll.node.worker.copies import pieces
from atoll.node.worker.local_steps import local_of
from atoll.node.worker.tensors import Held, ModelTensors
from atoll.protocol.layout import Role

NUM_SEARCHES = 3
"""Of updates, each after steps of the optimizer. Where nothing was found by then, there is nothing to find."""
MAX_DEPTH = 5
"""Of lists and dictionaries within an optimizer."""
NUM_SAMPLES = 32
NEAR = 2.0**-5
"""Of a parameter's norm: merges round it, and a copy of more bits, apart until the optimizer's next step of it."""

Copies = Mapping[nn.Parameter, list[Tensor]]


class OptimizerCopies:
    """Of one rank. `keys`: of each optimizer's state, what is known to be a copy already, as a checkpoint tells."""

    def __init__(self, tensors: ModelTensors, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._held = {
            held.parameter: held
            for held in tensors.held
            if held.spec.role is Role.TRAINABLE and held.parameter is not None and held.local().numel()
        }  # an empty shard shows nothing, and needs no update
        self._optimizers = optimizers
        self.keys: list[set[str]] = [set() for _ in optimizers]
        self._num_searches = 0
        self._found_any = False

    def find(self, *, is_restored: bool = False) -> Copies:
        """Before an update is taken. `is_restored`: the optimizers have the state of a checkpoint, and the parameters
        are not of that moment: there keys tell of copies, and values do not. Those elsewhere are the script's, as the
        parameters are."""
        found: dict[nn.Parameter, list[Tensor]] = {}
        searches = self._found_any or self._num_searches < NUM_SEARCHES
        for optimizer, keys in zip(self._optimizers, self.keys, strict=True):
            if searches and not is_restored:
                self._learn(optimizer, keys)
            for parameter, state in optimizer.state.items():
                if not isinstance(parameter, nn.Parameter) or parameter not in self._held:
                    continue
                for key in keys & state.keys():
                    found.setdefault(parameter, []).append(local_of(state[key]))
            if searches:
                for parameter, other in self._elsewhere(optimizer):
                    found.setdefault(parameter, []).append(other)
        if any(optimizer.state for optimizer in self._optimizers):
            self._num_searches += 1
        self._found_any |= bool(found)
        return found

    def _learn(self, optimizer: torch.optim.Optimizer, keys: set[str]) -> None:
        """Which keys of its state hold copies: all values that are there are, and some of them show it. A key whose
        values are no copies any more is forgotten."""
        known, shown = frozenset(keys), dict[str, list[bool]]()
        for parameter, state in optimizer.state.items():
            held = self._held.get(parameter) if isinstance(parameter, nn.Parameter) else None
            if held is None or not isinstance(state, dict):
                continue
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and not _is_single(shown, key):
                    is_copy = _is_copy(value, held) or (key in known and _is_near(value, held))
                    shown.setdefault(key, []).append(is_copy)
        keys.clear()
        keys.update(key for key, alike in shown.items() if all(alike) and self._shows(optimizer, key))

    def _shows(self, optimizer: torch.optim.Optimizer, key: str) -> bool:
        """Whether some value under the key is not of equal elements, as zeros of a momentum and of a bias are."""
        return any(
            _differs_within(state[key])
            for parameter, state in optimizer.state.items()
            if parameter in self._held and isinstance(state, dict) and isinstance(state.get(key), Tensor)
        )

    def _elsewhere(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """In attributes and parameter groups: lists of masters, an optimizer within, whose parameters they are."""
        places = {name: value for name, value in vars(optimizer).items() if name != "state"}
        seen = {id(parameter) for parameter in self._held}
        of_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in self._held:
            of_shape.setdefault(local_of(parameter).shape, []).append(parameter)
        for tensor in _tensors(places, seen, MAX_DEPTH):
            local = local_of(tensor.detach())
            for parameter in of_shape.get(local.shape, ()):
                if _is_copy(tensor, self._held[parameter]) and _differs_within(tensor):
                    yield parameter, local


def _is_single(shown: Mapping[str, list[bool]], key: str) -> bool:
    """One value that is no copy tells of all under its key: the others need not be looked at."""
    return False in shown.get(key, ())


@torch.no_grad()
def _is_copy(value: Tensor, held: Held) -> bool:
    """The cast of it is the parameter, in memory of its own. A few values are compared first."""
    mine, other = held.local(), local_of(value.detach())
    if other.shape != mine.shape or not other.is_floating_point() or other.layout is not torch.strided:
        return False
    if type(other) not in (Tensor, nn.Parameter) or other.is_meta or other.device != mine.device:
        return False
    if other.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr():
        return False
    some = sample_places(mine)
    return bool((other[some].to(mine.dtype) == mine[some]).all()) and torch.equal(other.to(mine.dtype), mine)


@torch.no_grad()
def _is_near(value: Tensor, held: Held) -> bool:
    """Whether it differs from the parameter, of which it was a copy of more bits, by what is rounded alone."""
    mine, other = held.local(), local_of(value.detach())
    if not other.is_floating_point() or other.itemsize <= mine.itemsize or other.device != mine.device:
        return False
    apart = whole = torch.zeros((), device=mine.device)
    for part, of in pieces(other, mine):
        apart, whole = apart + (part - of).square().sum(), whole + part.square().sum()
    return bool(apart <= NEAR**2 * whole)


def _differs_within(value: Tensor) -> bool:
    local = local_of(value.detach())
    return local.numel() > 1 and bool((local != local.flatten()[0]).any())


def sample_places(local: Tensor) -> tuple[Tensor, ...]:
    """Of NUM_SAMPLES elements, evenly through the tensor, to index it with."""
    flat = torch.linspace(0, max(0, local.numel() - 1), NUM_SAMPLES, dtype=torch.float64).long()
    places: tuple[Tensor, ...] = torch.unravel_index(flat.to(local.device), local.shape)
    return places


def _tensors(value: object, seen: set[int], depth: int) -> Iterator[Tensor]:
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in list(value.values()):
            yield from _tensors(item, seen, depth - 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, seen, depth - 1)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors([value.param_groups, vars(value)], seen, depth - 1)
