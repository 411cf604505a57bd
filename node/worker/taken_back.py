"""An optimizer that takes back what came from the other sites, known by what it does.

It has values of its own, which no search has found: masters that it rounds at random, slow weights of a look-ahead. A
few elements of each tensor are looked at before an update is taken, after it, and after each of some steps. With `d`
the update and `c` what one step changed, the step took back the share `f = -(c . d) / (d . d)`; it was this and no
training if `c` points where `-d` does, and not where the gradient or its sign does, and is larger than other steps are:
an average undoes a part of what this site has trained, and momentum goes on with that in steps of the usual size. Seen
at two updates, of the same tensor, this ends the site with the tensor's name; one may be chance.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from atoll.node.worker.local_steps import local_of
from atoll.node.worker.optimizer_copies import NUM_SAMPLES, sample_places
from atoll.node.worker.tensors import Held, ModelTensors
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Role

NUM_UPDATES = 3
"""So many are watched from the first step on: an optimizer is what it is."""
NUM_STEPS = 12
"""After an update: a look-ahead comes at each fifth or sixth step."""
MIN_ELEMENTS = NUM_SAMPLES // 2
"""That an update changed, of the samples of a tensor; fewer show nothing."""
MIN_SHARE = 0.3
SAME_DIRECTION = 0.9
"""Of the square of the cosine."""
MIN_TIMES = 3.0
"""A step that takes back is so many times as large as the median of those that are watched. Of one alone nothing is
known."""
MIN_MOVES = 2


class TakenBack:
    """Of one rank; costs nothing but while it watches."""

    def __init__(self, tensors: ModelTensors, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._held = [h for h in tensors.held if h.spec.role is Role.TRAINABLE and h.local().numel() >= MIN_ELEMENTS]
        self._places = [sample_places(held.local()) for held in self._held]
        self._left = NUM_UPDATES if self._held else 0
        self._num_steps = 0
        self._before: list[Tensor] = []
        self._trail: list[list[Tensor]] = []  # after the update, and after each step
        self._gradients: list[list[Tensor]] = []  # of each of these steps
        self._strikes: set[int] = set()
        self._most_steps = 0  # that were watched after an update
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def update(self, *, has_old_state: bool = False) -> Iterator[None]:
        """Within it an update is taken, for one fragment or another at the same step. `has_old_state`: the optimizers
        have a checkpoint's state, though they have done no step here. Raises ConfigError for the one before it."""
        if len(self._trail) > 1:
            self._close()
        if self._left == 0 or not (self._num_steps or has_old_state or self._trail):
            yield
            return
        before = self._before if self._trail else self._sample()
        yield
        self._before, self._trail, self._gradients = before, [self._sample()], []
        if not self._handles:
            self._handles = [o.register_step_pre_hook(self._before_step) for o in self._optimizers]

    def stepped(self) -> None:
        """After each step. Raises ConfigError, naming the tensor."""
        self._num_steps += 1
        if not self._trail:
            return
        self._trail.append(self._sample())
        if len(self._gradients) < len(self._trail) - 1:  # a step without the hook of torch's
            self._gradients.append([torch.zeros_like(values) for values in self._trail[-1]])
        if len(self._trail) > NUM_STEPS:
            self._close()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_step(self, *_of_step: object) -> None:
        if self._trail and len(self._gradients) < len(self._trail):
            grads = [held.parameter.grad if held.parameter is not None else None for held in self._held]
            self._gradients.append(self._sample(grads))

    @torch.no_grad()
    def _sample(self, values: Sequence[Tensor | None] | None = None) -> list[Tensor]:
        """(tensors, NUM_SAMPLES) of fp32 on each device: nothing waits for a GPU. By default of the parameters."""
        rows: dict[torch.device, list[Tensor]] = {}
        for index, (held, places) in enumerate(zip(self._held, self._places, strict=True)):
            mine = held.local()
            value = mine if values is None else values[index]
            fits = value is not None and value.layout is torch.strided and local_of(value).shape == mine.shape
            row = local_of(value)[places] if fits and value is not None else mine.new_zeros(NUM_SAMPLES)
            rows.setdefault(mine.device, []).append(row.detach().to(torch.float32))
        return [torch.stack(of_device) for of_device in rows.values()]

    def _close(self) -> None:
        """The last update has been watched to its end."""
        before, *trail = (_on_host(values) for values in (self._before, *self._trail))
        gradients = [_on_host(values) for values in self._gradients]
        self._before, self._trail, self._gradients = [], [], []
        self._left -= 1
        self._most_steps = max(self._most_steps, len(trail) - 1)
        update, changes = trail[0] - before, [later - earlier for earlier, later in pairwise(trail)]
        squares = torch.stack([change.square().sum(1) for change in changes])
        moved = squares > 0  # an expert without a token, a layer that rests, moves in few steps
        usual = torch.where(moved, squares, torch.nan).nanmedian(dim=0).values
        found = torch.zeros(len(update), dtype=torch.float64)
        for change, gradient in zip(changes, gradients, strict=False):
            trained = _is_along(change, gradient) | _is_along(change, gradient.sign())
            trained |= (change.square().sum(1) < MIN_TIMES**2 * usual) | (moved.sum(0) < MIN_MOVES)
            found = torch.maximum(found, torch.where(trained, 0.0, _share_taken(change, update)))
        struck = {int(index) for index in found.nonzero()}
        again = sorted(self._strikes & struck)
        self._strikes = struck
        self._left = max(self._left, 1 if struck else 0)
        if again:
            held = self._ordered()[again[0]]
            raise ConfigError(
                f"{held.spec.name!r}: {self._kind_of(held)} took back {min(1.0, float(found[again[0]])):.0%} of what "
                f"came from the other sites in a step after it, twice, as it did with {len(again)} of "
                f"{len(self._held)} tensors. It has weights of its own (fp32 masters, slow weights of a look-ahead), "
                "which no update reaches: join with an optimizer that changes the model's parameters in place, as "
                "those of torch.optim do on parameters in float32"
            )
        if self._left == 0:
            self.close()
            if self._most_steps < MIN_MOVES:
                sys.stderr.write(
                    "atoll: an update comes after each step, so that an optimizer with weights of its own which take "
                    "it back cannot be told from one that trains; with sync.every of 2 or more it would be named\n"
                )

    def _ordered(self) -> list[Held]:
        """As `_sample` has them: by device."""
        by_device: dict[torch.device, list[Held]] = {}
        for held in self._held:
            by_device.setdefault(held.local().device, []).append(held)
        return [held for of_device in by_device.values() for held in of_device]

    def _kind_of(self, held: Held) -> str:
        of = (
            o for o in self._optimizers for group in o.param_groups if any(p is held.parameter for p in group["params"])
        )
        return type(next(of, self._optimizers[0])).__name__


def _on_host(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([of_device.to("cpu", torch.float64) for of_device in values])


def _share_taken(change: Tensor, update: Tensor) -> Tensor:
    """Of each tensor: which share of the update is gone; 0 where something else changed as well."""
    share = -(change * update).sum(1) / (update * update).sum(1).clamp_min(torch.finfo(torch.float64).tiny)
    is_shown = ((update != 0).sum(1) >= MIN_ELEMENTS) & (share >= MIN_SHARE) & _is_along(change, update)
    return torch.where(is_shown, share, 0.0)


def _is_along(one: Tensor, other: Tensor) -> Tensor:
    """In the same direction, or the opposite one."""
    both = (one * other).sum(1).square()
    return both > SAME_DIRECTION * one.square().sum(1) * other.square().sum(1)
