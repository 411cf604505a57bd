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
from atoll.protocol.settings import OUTER_OPTIMIZERS, OuterSettings

Floats = npt.NDArray[np.float32]


class OuterOptimizer(Protocol):
    """One update of a chunk. `slots` names the arrays kept beside the values, in their order in a chunk's record."""

    @property
    def slots(self) -> tuple[str, ...]: ...

    def apply(
        self, values: Floats, slots: Sequence[Floats], avg: Floats, out_values: Floats, out_slots: Sequence[Floats]
    ) -> None:
        """From `values`, `slots` and the average pseudo-gradient; the outputs may be the inputs (in place).

        All arrays are 1-D fp32 of one size.
        """


@dataclass(frozen=True, slots=True)
class Sgd:
    learning_rate: np.float32

    @property
    def slots(self) -> tuple[str, ...]:
        return ()

    def apply(
        self, values: Floats, slots: Sequence[Floats], avg: Floats, out_values: Floats, out_slots: Sequence[Floats]
    ) -> None:
        kernels.sgd(values, avg, self.learning_rate, out_values)


@dataclass(frozen=True, slots=True)
class Nesterov:
    learning_rate: np.float32
    momentum: np.float32

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",)

    def apply(
        self, values: Floats, slots: Sequence[Floats], avg: Floats, out_values: Floats, out_slots: Sequence[Floats]
    ) -> None:
        kernels.nesterov(values, slots[0], avg, self.learning_rate, self.momentum, out_values, out_slots[0])


def outer_optimizer(settings: OuterSettings) -> OuterOptimizer:
    """The outer optimizer of a run. Raises ConfigError for an unknown name or a value out of range."""
    if not 0 < settings.learning_rate < 1e3:
        raise ConfigError(f"outer.learning_rate = {settings.learning_rate}: choose a number above 0, usually 0.5 to 1")
    if not 0 <= settings.momentum < 1:
        raise ConfigError(f"outer.momentum = {settings.momentum}: choose 0 or more, below 1")
    if settings.optimizer == "sgd":
        return Sgd(np.float32(settings.learning_rate))
    if settings.optimizer == "nesterov":
        return Nesterov(np.float32(settings.learning_rate), np.float32(settings.momentum))
    raise ConfigError(f"outer.optimizer = {settings.optimizer!r}: choose one of {', '.join(OUTER_OPTIMIZERS)}")
