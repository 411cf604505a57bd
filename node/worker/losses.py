"""Losses of the steps between two snapshots: their mean, and the steps whose loss is not finite.

A loss stays on its device until a snapshot. A step whose loss is not finite is left out of the mean and is counted; the
site ends where too many follow each other, or where such a step has reached the parameters.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from atoll.node.worker.tensors import Held
from atoll.protocol.errors import ConfigError, NonFiniteError, ScriptNonFinite
from atoll.protocol.layout import Role

DEFAULT_MAX_SKIPPED = 32
"""Steps in a row. A GradScaler that begins with 2**16 leaves out 16 at most until its scale is 1."""
FOLD_EVERY = 256
"""Losses on a device become one tensor: each alone takes 512 bytes there."""


NUM_AS_BEFORE = 3
"""Finite losses since a commit was taken, none higher than those of the window before: what comes then looks like the
script's own. A commit that spoils a weight of a rare token looks so too: what most sites say decides."""


class SpoiledError(NonFiniteError):
    """A step whose loss was not finite has reached the parameters, and maybe the optimizer's state before them."""


class SpoiledByScriptError(SpoiledError, ScriptNonFinite):
    """The same, and it looks like no commit's doing."""


class Losses:
    """Of one rank, over all windows. `max_skipped`: the limit for steps in a row."""

    def __init__(self, rank: int, max_skipped: int) -> None:
        if max_skipped < 1:
            raise ConfigError(
                f"atoll.join got max_skipped = {max_skipped}; it is the number of steps in a row whose loss may not be "
                "finite, at least 1"
            )
        self._rank, self._max_skipped = rank, max_skipped
        self._steps: list[int] = []  # of the run, of each loss of this window
        self._folded: list[Tensor] = []
        self._rest: list[Tensor | float] = []
        self._in_a_row = 0  # at the last loss of the windows before
        self._num_before_commit = 0  # losses of this window, of steps before a commit was taken
        self._usual: tuple[float, float] | None = None  # least and highest finite loss of the last window with one
        self.num_skipped = 0

    def add(self, loss: Tensor | float, step: int) -> None:
        """Of that step of the run. Raises ConfigError if it is no scalar."""
        if isinstance(loss, Tensor):
            if loss.numel() != 1 or isinstance(loss, DTensor):
                raise ConfigError(
                    f"site.step got a loss of {type(loss).__name__} and shape {list(loss.shape)}; "
                    "give a plain scalar: the mean over this rank's batch"
                )
            # A tensor of its own: the script may change the one that it gave. No graph is kept.
            loss = loss.detach().reshape(()).to(torch.float32, copy=True)
        self._steps.append(step)
        self._rest.append(loss)
        if len(self._rest) >= FOLD_EVERY:
            self._fold()

    def _fold(self) -> None:
        """What is on a device is one tensor there; numbers stay as they are."""
        on_device = [loss for loss in self._rest if isinstance(loss, Tensor)]
        if len(on_device) == len(self._rest):
            self._folded.append(torch.stack(on_device))
        else:
            self._folded.append(torch.tensor([float(loss) for loss in self._rest]))
        self._rest = []

    def took_commit(self) -> None:
        """Steps from here on are based on another commit than those before."""
        self._num_before_commit = len(self._steps)

    def forget(self) -> None:
        """The steps of this window are undone."""
        self._steps, self._folded, self._rest, self._num_before_commit = [], [], [], 0

    def take(self, held: Sequence[Held]) -> float | None:
        """The mean of this window's finite losses, None without one; the next window begins.

        Raises NonFiniteError where the limit is reached, SpoiledError where one of `held` is not finite after such a
        step.
        """
        if self._rest:
            self._fold()
        losses = [float(loss) for folded in self._folded for loss in folded.tolist()]
        steps, num_before = self._steps, self._num_before_commit
        self.forget()
        bad = [step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)]
        if bad:
            self._judge(steps, losses, bad, held, num_as_before=self._num_as_before(losses[num_before:]))
        elif losses:
            self._in_a_row = 0
        finite = [loss for loss in losses if math.isfinite(loss)]
        if finite:
            self._usual = min(finite), max(finite)
        return sum(finite) / len(finite) if finite else None

    def _num_as_before(self, losses: Sequence[float]) -> int:
        """Of those since a commit was taken, until one is not finite; 0 if one of them was higher than usual, as by as
        much as losses usually differ: a bad commit shows so, even if it takes some steps to infinity."""
        finite = list(takewhile(math.isfinite, losses))
        if self._usual is None:
            return 0
        least, highest = self._usual
        return len(finite) if max(finite, default=0.0) <= 2 * highest - least else 0

    def _judge(
        self,
        steps: Sequence[int],
        losses: Sequence[float],
        bad: Sequence[int],
        held: Sequence[Held],
        *,
        num_as_before: int,
    ) -> None:
        longest, begins, row = self._in_a_row, [], self._in_a_row
        for step, loss in zip(steps, losses, strict=True):
            if math.isfinite(loss):
                row = 0
                continue
            row += 1
            longest = max(longest, row)
            if row == 1:
                begins.append(step)
        self._in_a_row = row
        self.num_skipped += len(bad)
        where = f"the loss on rank {self._rank} is not finite at {len(bad)} of the steps {steps[0]} to {steps[-1]}"
        is_own = num_as_before >= NUM_AS_BEFORE
        if is_own:
            as_before = f"after {num_as_before} steps whose losses were as before the last commit"
            where += f" ({as_before}: the script may be at fault)"
        if (name := _not_finite(held)) is not None:
            raise (SpoiledByScriptError if is_own else SpoiledError)(
                f"{where}, and {name!r} is not finite since: the optimizer has taken such a step. Call optimizer.step "
                "only where the loss, or what clip_grad_norm_ returns, is finite; lower the learning rate, clip "
                "gradients, or look at the data of these steps"
            )
        if longest >= self._max_skipped:
            raise (ScriptNonFinite if is_own else NonFiniteError)(
                f"{where}, {longest} in a row (atoll.join(..., max_skipped={self._max_skipped}) ends the site); lower "
                "the learning rate, clip gradients, or look at the data of these steps"
            )
        if begins:
            sys.stderr.write(
                f"atoll: {where}, first at {begins[0]}, at most {longest} in a row; they are left out of the mean, the "
                f"parameters are finite, and training goes on; {self._max_skipped} in a row are an error\n"
            )


def _not_finite(held: Sequence[Held]) -> str | None:
    """The first trained tensor of this rank that is not finite."""
    trained = (item for item in held if item.spec.role is Role.TRAINABLE)
    return next((item.spec.name for item in trained if not bool(item.local().isfinite().all())), None)
