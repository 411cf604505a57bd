"""Steps that are left out where the nodes do them: the script did none, or loss or gradients are not finite. Nothing of
such a step is averaged, and training goes on; so many in a row end the site."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from torch import Tensor

from atoll.node.worker.optimizers import NodeOptimizer
from atoll.protocol.errors import ConfigError, NonFiniteError


class LeftOut:
    """Of one rank."""

    def __init__(self, optimizers: Sequence[NodeOptimizer], rank: int, max_in_a_row: int) -> None:
        self._optimizers, self._rank, self._max_in_a_row = optimizers, rank, max_in_a_row
        self._in_a_row = 0
        self.num = 0
        """Of all, those whose loss was finite: `Losses` counts the others."""
        self._num_in_window = 0

    def take_window(self) -> int:
        """How many were left out since the last call."""
        found, self._num_in_window = self._num_in_window, 0
        return found

    def is_left_out(self, loss: Tensor | float | None, step: int) -> bool:
        """At each call of `site.step`, after that step of the run; then the optimizers hand in nothing. Raises
        ConfigError or NonFiniteError for so many in a row."""
        has_loss = loss is None or math.isfinite(float(loss.detach() if isinstance(loss, Tensor) else loss))
        why = "" if has_loss else "its loss is not finite"
        for optimizer in self._optimizers:
            why = optimizer.left_out or why
        if not why:
            self._in_a_row = 0
            return False
        for optimizer in self._optimizers:
            optimizer.leave_out()
        self._in_a_row += 1
        self._num_in_window += 1
        self.num += has_loss
        if self._in_a_row >= self._max_in_a_row:
            is_missing = any(why == optimizer.no_step for optimizer in self._optimizers)
            raise (ConfigError if is_missing else NonFiniteError)(
                f"rank {self._rank} left out {self._in_a_row} steps in a row, the last one as {why} "
                f"(atoll.join(..., max_skipped={self._max_in_a_row}) ends the site): call the optimizer's step before "
                "each site.step; lower the learning rate, clip gradients, or look at the data of these steps"
            )
        if self._in_a_row == 1:
            sys.stderr.write(
                f"atoll: step {step} is left out on rank {self._rank}, as {why}: nothing of it is averaged, and "
                f"training goes on; {self._max_in_a_row} in a row are an error\n"
            )
        return True
