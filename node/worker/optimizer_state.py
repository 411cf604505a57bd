"""What inner optimizers have learned, as this rank's tensors and plain values, and back into them to the bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from atoll.node.worker import group_values
from atoll.node.worker.local_steps import local_of
from atoll.node.worker.stored_state import Needed, Slice, StoredState, Wanted
from atoll.node.worker.tensors import DTYPE_NAMES, TORCH_DTYPES, Held, ModelTensors, identity
from atoll.protocol.errors import ConfigError

OF_THE_SCRIPT = frozenset({"params", "param_names", "lr", "initial_lr"})
"""Keys of parameter groups that a start of the script decides: a fresh scheduler begins with its own learning rate."""
SELECT_NO_STATE = frozenset({"weight_decay", "dampening", "nesterov", "foreach"})
"""Hyperparameters that may be turned on or off without another state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor that an optimizer keeps for one parameter."""

    optimizer: int
    parameter: str
    key: str
    is_slice: bool
    """Of the same slice as the parameter here, and a DTensor if that is one; `values` is the local shard. Else it is
    the parameter's as a whole (a count of steps), or belongs to this very slice (sums of its rows)."""
    on_cpu: bool
    """Kept in CPU memory wherever the parameter is, as counts of steps are."""
    values: Tensor

    @property
    def name(self) -> str:
        return f"{self.optimizer}/{self.parameter}/{self.key}"

    def described(self) -> dict[str, Any]:
        """All of it but the values."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "values"}


def keeps_no_state(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Names the optimizer whose state cannot be kept in a checkpoint, and why; empty if there is none."""
    if any(_is_zero(optimizer) and not hasattr(optimizer, "optim") for optimizer in optimizers):
        return "ZeroRedundancyOptimizer(overlap_with_ddp=True), which has its state only after some steps"
    return ""


def _keeper(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Whose `state` this rank has: of a ZeroRedundancyOptimizer, the one over this rank's part of the parameters. Its
    hyperparameters come from the outer one at each step."""
    if _is_zero(optimizer):
        inner: torch.optim.Optimizer = optimizer.optim  # type: ignore[attr-defined]
        return inner
    return optimizer


def _is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """torch's; importing its module takes seconds, and a script that uses it has done so."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


class OptimizerState:
    """The state of all optimizers of one rank, which `keeps_no_state` has nothing against. Made when the script has not
    trained yet."""

    def __init__(
        self,
        tensors: ModelTensors,
        optimizers: Sequence[torch.optim.Optimizer],
        copy_keys: Sequence[set[str]] | None = None,
    ) -> None:
        """`copy_keys`: of each optimizer's state, what is known to be copies of parameters; see `OptimizerCopies`."""
        self.optimizers = self._optimizers = optimizers
        self._copy_keys = copy_keys if copy_keys is not None else [set() for _ in optimizers]
        self._keepers = [_keeper(optimizer) for optimizer in optimizers]
        # A frozen parameter that every site has by itself is none of these, and has no state.
        names = {identity(held.parameter): held.spec.name for held in tensors.held if held.parameter is not None}
        self._parameters: list[dict[str, Tensor]] = [
            {names[identity(p)]: p for group in keeper.param_groups for p in group["params"] if identity(p) in names}
            for keeper in self._keepers
        ]
        self._names: list[list[list[str]]] = [
            [[names[identity(p)] for p in group["params"] if identity(p) in names] for group in optimizer.param_groups]
            for optimizer in optimizers
        ]
        self._held = {held.spec.name: held for held in tensors.held}
        self._first_groups = self._groups()
        self._written: Collection[str] | None = None

    def write_only(self, names: Collection[str] | None) -> None:
        """Of tensors that several ranks have alike, those that this one is to write; None: all. It is of torch's own
        optimizers, whose state follows from parameters and gradients: any other may keep something else on each rank,
        which writes what it has, as do ranks of a ZeroRedundancyOptimizer."""
        self._written = names

    def about(self) -> dict[str, Any]:
        """What the state belongs to, as JSON gives it back: `StoredState` reads it."""
        return {
            "slices": {
                held.spec.name: {"offsets": list(held.piece.offsets), "sizes": list(held.piece.sizes)} | _nature(held)
                for parameters in self._parameters
                for held in map(self._held.__getitem__, parameters)
            },
            "optimizers": [
                {
                    "kind": type(keeper).__name__,
                    "written": self._names_written(index),
                    "copies": sorted(self._copy_keys[index]),
                    "groups": [
                        {"names": of, "switches": _switches(at_start), "first": at_start, "now": now}
                        for of, at_start, now in zip(*lists, strict=True)
                    ],
                }
                for index, (keeper, *lists) in enumerate(
                    zip(self._keepers, self._names, self._first_groups, self._groups(), strict=True)
                )
            ],
        }

    def tensors(self) -> list[StateTensor]:
        """That this rank writes, sharing the storage of the optimizers' own. Raises ConfigError, naming what cannot be
        kept in a file."""
        for optimizer in self._optimizers:
            group_values.check(optimizer)
        return [
            _state_tensor(index, name, key, value, parameter)
            for index, name, parameter, state in self._states()
            for key, value in state.items()
            if isinstance(value, Tensor)
        ]

    def plain_values(self) -> list[list[Any]]:
        """All that is no tensor, for JSON. Raises ConfigError."""
        plain: list[list[Any]] = []
        for index, name, _, state in self._states():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    continue
                if not isinstance(key, str) or not (value is None or isinstance(value, bool | int | float | str)):
                    raise ConfigError(
                        f"{type(self._optimizers[index]).__name__} keeps {key!r} of {name!r} "
                        f"as {type(value).__name__}; only tensors and plain values can be kept in a checkpoint"
                    )
                plain.append([index, name, key, value])
        return plain

    def needed(self) -> list[Needed]:
        """Whose state is this rank's, and what it fits."""
        found = self.about()
        kinds = {
            (index, name): {"optimizer": of["kind"], "switches": group["switches"]}
            for index, of in enumerate(found["optimizers"])
            for group in of["groups"]
            for name in group["names"]
        }
        return [
            Needed(
                optimizer=index,
                parameter=name,
                slice=Slice(self._held[name].piece.offsets, self._held[name].piece.sizes),
                fits=kinds[index, name] | _nature(self._held[name]),
            )
            for index, parameters in enumerate(self._parameters)
            for name in parameters
        ]

    def empty(self, wanted: Wanted) -> StateTensor:
        """Room for it: where the optimizer would have made it, in the order of the parameter's own values in memory."""
        of, part = wanted.needed, wanted.parts[0]
        like = local_of(self._parameters[of.optimizer][of.parameter])
        device = torch.device("cpu") if part.on_cpu else like.device
        dtype = TORCH_DTYPES[part.dtype]
        if part.is_slice:
            values = torch.empty_like(like, dtype=dtype, device=device, requires_grad=False)
        else:
            values = torch.empty(part.shape, dtype=dtype, device=device)
        return StateTensor(
            optimizer=of.optimizer,
            parameter=of.parameter,
            key=wanted.key,
            is_slice=part.is_slice,
            on_cpu=part.on_cpu,
            values=values,
        )

    def restore(self, tensors: Sequence[StateTensor], stored: StoredState) -> bool:
        """Put back `tensors` and the plain values of `stored`, in place of all state. Returns whether there is any."""
        states: list[dict[str, dict[str, Any]]] = [{name: {} for name in names} for names in self._parameters]
        for needed in self.needed():
            states[needed.optimizer][needed.parameter] = stored.plain(needed)
        for item in tensors:
            parameter, values = self._parameters[item.optimizer][item.parameter], item.values
            if item.is_slice and isinstance(parameter, DTensor):
                values = DTensor.from_local(
                    values,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            states[item.optimizer][item.parameter][item.key] = values
        if not any(state for by_name in states for state in by_name.values()):
            return False
        for keeper, by_name, parameters in zip(self._keepers, states, self._parameters, strict=True):
            keeper.state.clear()
            keeper.state.update({parameters[name]: state for name, state in by_name.items() if state})
        for index, keys in enumerate(self._copy_keys):
            keys.update(stored.copies(index))
        self._restore_groups(stored)
        return True

    def _states(self) -> list[tuple[int, str, Tensor, dict[Any, Any]]]:
        found = []
        for index, (keeper, parameters) in enumerate(zip(self._keepers, self._parameters, strict=True)):
            kept = [(name, p, keeper.state[p]) for name, p in parameters.items() if p in keeper.state]
            if len(kept) != len(keeper.state):
                raise ConfigError(
                    f"{type(keeper).__name__} keeps state for something that is not a parameter, or twice for tied "
                    "ones; it cannot be kept in a checkpoint"
                )
            written = set(self._names_written(index))
            found += [(index, name, p, state) for name, p, state in kept if name in written]
        return found

    def _names_written(self, index: int) -> list[str]:
        keeper, names = self._keepers[index], list(self._parameters[index])
        is_alike = keeper is self._optimizers[index] and type(keeper).__module__.startswith("torch.optim.")
        return [name for name in names if self._written is None or not is_alike or name in self._written]

    def _groups(self) -> list[list[dict[str, Any]]]:
        """Plain hyperparameters and small tensors, as JSON gives them back."""
        groups = [
            [
                {k: group_values.encode(v) for k, v in g.items() if k not in OF_THE_SCRIPT and group_values.is_kept(v)}
                for g in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]
        result: list[list[dict[str, Any]]] = json.loads(json.dumps(groups))
        return result

    def _restore_groups(self, stored: StoredState) -> None:
        """What changed in training goes on from there, unless the script now starts with another value, or parameters
        are in one group now whose values differed."""
        for index, (optimizer, now) in enumerate(zip(self._optimizers, self._first_groups, strict=True)):
            for group, at_start, names in zip(optimizer.param_groups, now, self._names[index], strict=True):
                then = [stored.group(index, name) for name in names]
                for key, value in then[0]["now"].items() if then else ():
                    started = {json.dumps([of["first"].get(key), of["now"].get(key)]) for of in then}
                    is_as_then = at_start.get(key) == then[0]["first"].get(key)
                    if len(started) == 1 and is_as_then and at_start.get(key) != value:
                        group[key] = group_values.decode(value, group.get(key), group["params"])


def _nature(held: Held) -> dict[str, Any]:
    """Of the parameter that an optimizer's state is for; another one has another state."""
    return {"shape": list(held.spec.shape), "dtype": held.piece.dtype, "device": held.local().device.type}


def _switches(group: Mapping[str, Any]) -> dict[str, Any]:
    """What is on (not None, False or 0), because what an optimizer keeps may depend on it: amsgrad, centered, momentum,
    fused (which counts steps on the GPU)."""

    def on(value: Any) -> Any:
        return [on(item) for item in value] if isinstance(value, list) else bool(value)

    return {key: on(value) for key, value in group.items() if value and key not in SELECT_NO_STATE}


def _state_tensor(index: int, name: str, key: object, value: Tensor, parameter: Tensor) -> StateTensor:
    where = f"the optimizer's {key!r} of {name!r}"
    is_sharded = isinstance(value, DTensor)
    if isinstance(value, DTensor):
        if not isinstance(parameter, DTensor) or (value.device_mesh, value.placements, value.shape) != (
            parameter.device_mesh,
            parameter.placements,
            parameter.shape,
        ):
            raise ConfigError(f"{where} is sharded otherwise than its parameter; it cannot be kept in a checkpoint")
        value = value.to_local()
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise ConfigError(
            f"{where} is a {type(value).__name__}, a tensor of a kind of its own (of 8 or 4 bits, say), which a file "
            "would have as plain numbers; it cannot be kept in a checkpoint"
        )
    if not isinstance(key, str) or value.dtype not in DTYPE_NAMES or value.layout is not torch.strided:
        raise ConfigError(f"{where} is of {value.dtype} and {value.layout}; it cannot be kept in a checkpoint")
    return StateTensor(
        optimizer=index,
        parameter=name,
        key=key,
        is_slice=value.shape == local_of(parameter).shape and is_sharded == isinstance(parameter, DTensor),
        on_cpu=value.device.type == "cpu",
        values=value.detach(),
    )
