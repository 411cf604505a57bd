"""Outer optimizers: fp32, each multiplication and addition rounded by itself, in the order that is written.

    sgd        x = x - lr*d
    nesterov   m = mu*m + d;  x = x - lr*(d + mu*m)

with d the average pseudo-gradient (DiLoCo, arXiv 2311.08105, section 3). Vectors in docs/protocol.md, "Outer update".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from atoll.node.dataplane import kernels
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Commit
from atoll.protocol.recompute import slots_of
from atoll.protocol.settings import OUTER_OPTIMIZERS, OuterSettings

Floats = npt.NDArray[np.float32]


class OuterUpdate(Protocol):
    """The update of a chunk by one commit."""

    @property
    def commit(self) -> int: ...

    def apply(
        self, values: Floats, slots: Sequence[Floats], avg: Floats, out_values: Floats, out_slots: Sequence[Floats]
    ) -> None:
        """From `values`, `slots` and the average pseudo-gradient; the outputs may be the inputs (in place).

        All arrays are 1-D fp32 of one size; slots are in the order of `OuterOptimizer.slots`.
        """


@dataclass(frozen=True, slots=True)
class Sgd:
    commit: int
    learning_rate: np.float32

    def apply(
        self, values: Floats, slots: Sequence[Floats], avg: Floats, out_values: Floats, out_slots: Sequence[Floats]
    ) -> None:
        kernels.sgd(values, avg, self.learning_rate, out_values)


@dataclass(frozen=True, slots=True)
class Nesterov:
    commit: int
    learning_rate: np.float32
    momentum: np.float32

    def apply(
        self, values: Floats, slots: Sequence[Floats], avg: Floats, out_values: Floats, out_slots: Sequence[Floats]
    ) -> None:
        kernels.nesterov(values, slots[0], avg, self.learning_rate, self.momentum, out_values, out_slots[0])


class OuterOptimizer:
    """Of a run. `slots` names the arrays kept beside the values, in their order in a chunk's record."""

    def __init__(self, settings: OuterSettings) -> None:
        """Raises ConfigError for an unknown name or a value out of range."""
        if not 0 < settings.learning_rate < 1e3:
            raise ConfigError(
                f"outer.learning_rate = {settings.learning_rate}: choose a number above 0, usually 0.5 to 1"
            )
        if not 0 <= settings.momentum < 1:
            raise ConfigError(f"outer.momentum = {settings.momentum}: choose 0 or more, below 1")
        if settings.optimizer not in OUTER_OPTIMIZERS:
            raise ConfigError(f"outer.optimizer = {settings.optimizer!r}: choose one of {', '.join(OUTER_OPTIMIZERS)}")
        self.slots = slots_of(settings)
        self._settings = settings

    def at(self, record: Commit) -> OuterUpdate:
        """Bound to a commit: whatever changes in the course of a run is a function of its record."""
        learning_rate, momentum = np.float32(self._settings.learning_rate), np.float32(self._settings.momentum)
        if self._settings.optimizer == "sgd":
            return Sgd(record.commit, learning_rate)
        return Nesterov(record.commit, learning_rate, momentum)
