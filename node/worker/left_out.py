"""Steps that are left out where the nodes do them: the script did none, or loss or gradients are not finite. Nothing of
such a step is averaged, and training goes on; so many in a row end the site."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from torch import Tensor

from atoll.node.worker.optimizers import NodeOptimizer
from atoll.node.worker.step_count import MAX_IDLE
from atoll.protocol.errors import ConfigError, NonFiniteError


class LeftOut:
    """Of one rank."""

    def __init__(self, optimizers: Sequence[NodeOptimizer], rank: int, max_in_a_row: int) -> None:
        self._optimizers, self._rank, self._max_in_a_row = optimizers, rank, max_in_a_row
        self._num_calls = self._num_missing = self._in_a_row = 0
        self.num = 0
        """Of all, those whose loss was finite: `Losses` counts the others."""
        self.steps: tuple[int, ...] = ()
        """Those since the base, as this rank counts them: the ranks of a site compare them."""

    def forget(self) -> None:
        """The parameters have the values of another base."""
        self.steps = ()

    def do_or_leave_out(self, loss: Tensor | float | None, step: int) -> bool:
        """At each call of `site.step`. The optimizers do the step, or hand in nothing. Returns whether it was left out.

        `loss`: a scalar. `step`: the number of this step, as the rank counts. Raises ConfigError or NonFiniteError for
        so many steps left out in a row, ConfigError where calls without a step of the optimizer go on.
        """
        self._num_calls += 1
        is_finite = loss is None or math.isfinite(float(loss.detach() if isinstance(loss, Tensor) else loss))
        missing = next((o.no_step for o in self._optimizers if not o.has_stepped), "")
        why = missing or next((o.left_out for o in self._optimizers if o.left_out), "")
        why = why or ("" if is_finite else "its loss is not finite")
        for optimizer in self._optimizers:
            if why:
                optimizer.leave_out()
            optimizer.take_step()
        if not why:
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        self._num_missing += bool(missing)
        self.steps = (*self.steps, step)
        self.num += is_finite
        self._check(why, is_missing=bool(missing))
        if self._in_a_row == 1:
            sys.stderr.write(
                f"atoll: a step is left out on rank {self._rank}, as {why}: nothing of it is averaged, and training "
                f"goes on; {self._max_in_a_row} in a row are an error\n"
            )
        return True

    def _check(self, why: str, *, is_missing: bool) -> None:
        if self._in_a_row >= self._max_in_a_row:
            raise (ConfigError if is_missing else NonFiniteError)(
                f"rank {self._rank} left out {self._in_a_row} steps in a row, the last one as {why} "
                f"(atoll.join(..., max_skipped={self._max_in_a_row}) ends the site): call the optimizer's step before "
                "each site.step; lower the learning rate, clip gradients, or look at the data of these steps"
            )
        if self._num_missing > MAX_IDLE and 3 * self._num_missing >= self._num_calls:
            raise ConfigError(
                f"site.step was called {self._num_calls} times, and in {self._num_missing} of them an optimizer had "
                f"done no step, the last one as {why}: call site.step once after a step of each optimizer, with the "
                "tokens of all microbatches"
            )
