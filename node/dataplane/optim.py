"""Outer optimizers: fp32, each multiplication and addition rounded by itself, in the order that is written.

    sgd        x = x - lr*d
    nesterov   m = mu*m + d;  x = x - lr*(d + mu*m)
    signsgd    x = x - lr*(sign(d) + wd*x)
    adamw      m = b1*m + (1-b1)*d;  v = b2*v + (1-b2)*(d*d);  x = x - lr*((m/c1)/(sqrt(v/c2) + eps) + wd*x)
    1-bit Adam m = d;  x = x - lr*(clamp((m/c1)/(sqrt(v/c2) + eps)) + wd*x)

with d the average pseudo-gradient (DiLoCo, arXiv 2311.08105, section 3), gradient (signSGD, arXiv 1802.04434; AdamW,
arXiv 1711.05101, algorithm 2) or momentum (1-bit Adam, arXiv 2102.02888, algorithm 1, with v of the warm-up); c1 is 1 -
b1^t and c2 is 1 - b2^t at step t of the run, and clamp is to [-1, 1]. Vectors in docs/protocol.md, "Outer update".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from atoll.node.dataplane import kernels
from atoll.protocol.messages import Commit
from atoll.protocol.outer import OuterStep, outer_at
from atoll.protocol.plans import weights
from atoll.protocol.recompute import slots_of
from atoll.protocol.settings import RunSettings

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class OuterUpdate:
    """The update of a chunk by one commit."""

    commit: int
    of_group: Callable[[int], OuterStep]
    """What is done to the tensors of a parameter group."""
    tokens: tuple[int, ...] = ()
    """Of its contributors: how a bundle is averaged."""

    def apply(  # noqa: PLR0917
        self,
        values: Floats,
        slots: Sequence[Floats],
        avg: Floats,
        out_values: Floats,
        out_slots: Sequence[Floats],
        group: int = 0,
    ) -> None:
        """From `values`, `slots` and the average pseudo-gradient; the outputs may be the inputs (in place).

        All arrays are 1-D fp32 of one size; slots are in the order of `OuterOptimizer.slots`.
        """
        step = self.of_group(group)
        rate = np.float32(step.learning_rate)
        match step.optimizer:
            case "sgd":
                kernels.sgd(values, avg, rate, out_values)
            case "nesterov":
                kernels.nesterov(values, slots[0], avg, rate, np.float32(step.momentum), out_values, out_slots[0])
            case "signsgd":
                kernels.signsgd(values, avg, rate, np.float32(step.weight_decay), out_values)
            case _ if step.is_frozen:
                kernels.onebit_adam(values, slots[1], avg, _numbers(step), out_values, *out_slots)
            case _:
                kernels.adamw(values, *slots, avg, _numbers(step), out_values, *out_slots)


def _numbers(step: OuterStep) -> Floats:
    """As the kernel takes them."""
    beta1, beta2 = step.momentum, step.beta2
    return np.array(
        [
            step.learning_rate, step.weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, *step.bias, step.epsilon
        ],
        np.float32,
    )  # fmt: skip


@dataclass(eq=False)
class OuterOptimizer:
    """Of a run."""

    settings: RunSettings

    @property
    def slots(self) -> tuple[str, ...]:
        """The arrays kept beside the values, in their order in a chunk's record."""
        return slots_of(self.settings.outer)

    def at(self, record: Commit) -> OuterUpdate:
        """Bound to a commit: whatever changes in the course of a run is a function of its record."""
        of_group = partial(outer_at, self.settings, record)
        return OuterUpdate(record.commit, of_group, weights(record))
