"""Outer optimizers: fp32, each multiplication and addition rounded by itself, in the order that is written.

    sgd        x = x - lr*d
    nesterov   m = mu*m + d;  x = x - lr*(d + mu*m)

with d the average pseudo-gradient (DiLoCo, arXiv 2311.08105, section 3). Vectors in docs/protocol.md, "Outer update".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atoll.node.dataplane import kernels
from atoll.protocol.messages import Commit
from atoll.protocol.outer import outer_at
from atoll.protocol.plans import weights
from atoll.protocol.recompute import slots_of
from atoll.protocol.settings import OuterSettings

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class OuterUpdate:
    """The update of a chunk by one commit."""

    commit: int
    optimizer: str
    learning_rate: np.float32
    momentum: np.float32
    tokens: tuple[int, ...] = ()
    """Of its contributors: how a bundle is averaged."""

    def apply(
        self, values: Floats, slots: Sequence[Floats], avg: Floats, out_values: Floats, out_slots: Sequence[Floats]
    ) -> None:
        """From `values`, `slots` and the average pseudo-gradient; the outputs may be the inputs (in place).

        All arrays are 1-D fp32 of one size; slots are in the order of `OuterOptimizer.slots`.
        """
        if self.optimizer == "sgd":
            kernels.sgd(values, avg, self.learning_rate, out_values)
        else:
            kernels.nesterov(values, slots[0], avg, self.learning_rate, self.momentum, out_values, out_slots[0])


@dataclass(eq=False)
class OuterOptimizer:
    """Of a run."""

    settings: OuterSettings
    steps: int = 0
    tokens: int = 0
    """Its length, in one of them; schedules need it."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The arrays kept beside the values, in their order in a chunk's record."""
        return slots_of(self.settings)

    def at(self, record: Commit) -> OuterUpdate:
        """Bound to a commit: whatever changes in the course of a run is a function of its record."""
        outer = outer_at(self.settings, self.steps, self.tokens, record)
        return OuterUpdate(
            record.commit,
            outer.optimizer,
            np.float32(outer.learning_rate),
            np.float32(outer.momentum),
            weights(record),
        )
