"""An optimizer that takes back what came from the other sites, known by what it does.

It has values of its own, which no search has found: masters that it rounds at random, slow weights of a look-ahead. A
few elements of each tensor are looked at before an update is taken, after it, and after each of some steps. With `d`
the update and `c` what one step changed, the step took back the share `f = -(c . d) / (d . d)`; it was this and no
training if `c` points where `-d` does, is not made of gradients and momentum, and is larger than other steps are: an
average undoes a part of what this site has trained, and momentum goes on with that in steps of the usual size. Seen
after two updates, of the same tensor, this ends the site with the tensor's name; one may be chance. Each fragment has
updates of its own, after which its own tensors are looked at. Where several updates came in few steps, a look-ahead
takes back their sum, so `d` is also the sum of the last ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.optim import LBFGS
from torch.utils.hooks import RemovableHandle

from atoll.node.worker.local_steps import local_of
from atoll.node.worker.optimizer_copies import NUM_SAMPLES, sample_places
from atoll.node.worker.step_count import stepping
from atoll.node.worker.tensors import ModelTensors
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Role

NUM_UPDATES = 3
"""So many are watched of each fragment, from the first step on: an optimizer is what it is."""
NUM_STEPS = 12
"""After an update: a look-ahead comes at each fifth or sixth step. Twice as many in all, where updates come sooner."""
MIN_ELEMENTS = NUM_SAMPLES // 2
"""That an update changed, of the samples of a tensor; fewer show nothing."""
MIN_SHARE = 0.3
SAME_DIRECTION = 0.9
"""Of the square of the cosine."""
MIN_TIMES = 3.0
"""A step that takes back is so many times as large as the median of those that are watched. Of one alone nothing is
known."""
MIN_MOVES = 2
SIGNS_TAKEN, SIGNS_TRAINED = 0.5, 0.8
"""Elements with the same sign less those with the other one, as a share: a few large elements are no direction. A
gradient that is scaled for each element, as by Adam, keeps its signs."""


@dataclass(slots=True)
class _Fragment:
    """The update that is watched, if any, and what was watched before."""

    before: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)
    changes: list[list[Tensor]] = field(default_factory=list)  # of each step since
    gradients: list[list[Tensor]] = field(default_factory=list)
    lately: list[tuple[int, Tensor]] = field(default_factory=list)  # steps after an update, and the update
    num_updates: int = 0
    num_steps: int = 0
    has_strikes: bool = False

    @property
    def is_done(self) -> bool:
        """Windows of one step show nothing, however many there are."""
        factor = 2 if self.has_strikes else 1
        shows = self.num_steps >= MIN_MOVES * self.num_updates
        is_enough = self.num_steps >= 2 * NUM_STEPS * factor or not shows
        return self.num_updates >= NUM_UPDATES * factor and is_enough


class TakenBack:
    """Of one rank; costs nothing but while it watches. Parameters of LBFGS are not watched: one step of it may solve
    the own problem of the site, wherever it begins."""

    def __init__(
        self, tensors: ModelTensors, optimizers: Sequence[torch.optim.Optimizer], num_fragments: int = 1
    ) -> None:
        owners = {id(p): o for o in reversed(optimizers) for group in o.param_groups for p in group["params"]}
        found = [(h, owners.get(id(h.parameter), optimizers[0])) for h in tensors.held if h.spec.role is Role.TRAINABLE]
        found = [(h, o) for h, o in found if h.local().numel() >= MIN_ELEMENTS and not isinstance(o, LBFGS)]
        found.sort(key=lambda of: str(of[0].local().device))  # as `_sample` has them
        self._held, self._owners = [held for held, _ in found], [owner for _, owner in found]
        self._optimizers = optimizers
        self._owned: dict[int, list[int]] = {}  # by id of an optimizer: places in `_held`
        for index, owner in enumerate(self._owners):
            self._owned.setdefault(id(owner), []).append(index)
        self._places = [sample_places(held.local()) for held in self._held]
        self._fragments = [_Fragment() for _ in range(num_fragments)] if self._held else []
        self._has_stepped = False
        self._now: list[Tensor] = []  # values after the last update or step
        self._gradients: dict[int, Tensor | None] = {}  # of the step that is being done, by place in `_held`
        self._num_strikes = torch.zeros(len(self._held), dtype=torch.int64)
        self._most_steps = 0  # that were watched after an update
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def update(self, fragment: int = 0, *, has_old_state: bool = False) -> Iterator[None]:
        """Within it an update of the fragment is taken. `has_old_state`: the optimizers have a checkpoint's state,
        though they have done no step here. Raises ConfigError for the one before it."""
        of = self._fragments[fragment] if self._fragments else None
        if of is not None and of.changes:
            self._close(of)
        if of is None or of.is_done or not (self._has_stepped or has_old_state):
            yield
            return
        before = of.before or self._sample()  # two at one step are one
        yield
        self._now = self._sample()
        of.before, of.after = before, self._now
        if not self._handles:
            self._handles = [
                stepping(optimizer).register_step_post_hook(partial(self._after_step, optimizer))
                for optimizer in self._optimizers
            ]

    def stepped(self) -> None:
        """After each step. Raises ConfigError, naming the tensor."""
        self._has_stepped = True
        watched = [of for of in self._fragments if of.before]
        if not watched:
            return
        then, self._now = self._now, self._sample()
        change = [now - before for now, before in zip(self._now, then, strict=True)]
        gradient = self._stacked([self._gradients.get(index) for index in range(len(self._held))])
        self._gradients.clear()
        for of in watched:
            of.changes.append(change)
            of.gradients.append(gradient)
            if len(of.changes) >= NUM_STEPS:
                self._close(of)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_of_step: object) -> None:
        """After it the gradients are those of this step, also where a closure within it has made them."""
        if any(of.before for of in self._fragments):
            for index in self._owned.get(id(optimizer), ()):
                parameter = self._held[index].parameter
                if parameter is not None and parameter.grad is not None:
                    self._gradients[index] = self._row(index, parameter.grad)

    def _sample(self) -> list[Tensor]:
        """Of the parameters."""
        return self._stacked([self._row(index, held.local()) for index, held in enumerate(self._held)])

    @torch.no_grad()
    def _row(self, index: int, value: Tensor) -> Tensor | None:
        """None for a value that is not like the parameter."""
        mine = self._held[index].local()
        fits = value.layout is torch.strided and local_of(value).shape == mine.shape
        return local_of(value)[self._places[index]].detach().to(torch.float32) if fits else None

    def _stacked(self, sampled: Sequence[Tensor | None]) -> list[Tensor]:
        """(tensors, NUM_SAMPLES) of fp32 on each device: nothing waits for a GPU. None is zeros."""
        rows: dict[torch.device, list[Tensor]] = {}
        for held, row in zip(self._held, sampled, strict=True):
            device = held.local().device
            rows.setdefault(device, []).append(torch.zeros(NUM_SAMPLES, device=device) if row is None else row)
        return [torch.stack(of_device) for of_device in rows.values()]

    def _close(self, of: _Fragment) -> None:
        """The last update has been watched to its end."""
        update = _on_host(of.after) - _on_host(of.before)
        # (steps, tensors, NUM_SAMPLES)
        changes, gradients = (torch.stack([_on_host(v) for v in each]) for each in (of.changes, of.gradients))
        of.before, of.after, of.changes, of.gradients = [], [], [], []
        of.num_updates += 1
        of.num_steps += len(changes)
        self._most_steps = max(self._most_steps, len(changes))
        squares = changes.square().sum(-1)
        moved = squares > 0  # an expert without a token, a layer that rests, moves in few steps
        usual = torch.where(moved, squares, torch.nan).nanmedian(dim=0).values
        trained = _signs(changes, gradients).abs() >= SIGNS_TRAINED * (changes != 0).sum(-1)
        trained |= (squares < MIN_TIMES**2 * usual) | (moved.sum(0) < MIN_MOVES)
        of.lately = [*of.lately[-NUM_STEPS:], (len(changes), update)]
        found, together, num_steps = torch.zeros(len(update), dtype=torch.float64), torch.zeros_like(update), 0
        for since, one in reversed(of.lately):
            together, num_steps = together + one, num_steps + since
            if num_steps > NUM_STEPS:
                break
            shares = torch.where(trained, 0.0, _share_taken(changes, together))
            for step, tensor in shares.nonzero().tolist():  # hardly ever any
                if _is_of_gradients(changes[:, tensor], gradients[:, tensor], step):
                    shares[step, tensor] = 0.0
            found = torch.maximum(found, shares.amax(0))
        struck = found > 0
        of.has_strikes |= bool(struck.any())
        self._num_strikes += struck
        again = (struck & (self._num_strikes >= 2)).nonzero().flatten().tolist()
        if again:
            first = again[0]
            raise ConfigError(
                f"{self._held[first].spec.name!r}: {type(self._owners[first]).__name__} took back "
                f"{min(1.0, float(found[first])):.0%} of what came from the other sites in a step after it, twice, as "
                f"it did with {len(again)} of {len(self._held)} tensors. It has weights of its own (fp32 masters, slow "
                "weights of a look-ahead), which no update reaches: join with an optimizer that changes the model's "
                "parameters in place, as those of torch.optim do on parameters in float32"
            )
        if all(each.is_done for each in self._fragments):
            self.close()
            if self._most_steps < MIN_MOVES:
                sys.stderr.write(
                    "atoll: an update comes after each step, so that an optimizer with weights of its own which take "
                    "it back cannot be told from one that trains; with sync.every of 2 or more it would be named\n"
                )


def _on_host(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([of_device.to("cpu", torch.float64) for of_device in values])


def _share_taken(changes: Tensor, update: Tensor) -> Tensor:
    """Of each tensor in each step: which share of the update is gone; 0 where something else changed as well."""
    share = -(changes * update).sum(-1) / (update * update).sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    num_updated = (update != 0).sum(-1)
    is_shown = (num_updated >= MIN_ELEMENTS) & (share >= MIN_SHARE) & _is_along(changes, update)
    is_shown &= -_signs(changes, update) >= SIGNS_TAKEN * num_updated
    return torch.where(is_shown, share, 0.0)


def _is_of_gradients(changes: Tensor, gradients: Tensor, step: int) -> bool:
    """Whether the change is a sum of multiples of the gradient, of its signs, and of what is the momentum: changes and
    gradients of the steps beside this one."""
    beside = [each[n] for n in (step - 1, step + 1) if 0 <= n < len(changes) for each in (changes, gradients)]
    by = torch.stack([gradients[step], gradients[step].sign(), *beside], dim=1)
    if not bool(by.isfinite().all()):
        return True  # nothing is known
    rest = changes[step] - by @ torch.linalg.lstsq(by, changes[step, :, None]).solution[:, 0]
    return bool(rest.square().sum() < (1 - SAME_DIRECTION) * changes[step].square().sum())


def _is_along(one: Tensor, other: Tensor) -> Tensor:
    """In the same direction, or the opposite one."""
    both = (one * other).sum(-1).square()
    return both > SAME_DIRECTION * one.square().sum(-1) * other.square().sum(-1)


def _signs(one: Tensor, other: Tensor) -> Tensor:
    """Elements of the same sign less those of the opposite one."""
    return (one * other).sign().sum(-1)
