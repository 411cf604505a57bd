"""A fresh inner optimizer knows nothing of the gradients it meets: its first steps are made smaller.

The learning rate is scaled only while `optimizer.step()` runs, so schedulers never see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from atoll.node.worker.optimizers import NodeOptimizer
from atoll.node.worker.step_count import all_stepping
from atoll.protocol.errors import ConfigError

RampSteps = int | Literal["beta2"]


def num_ramp_steps(asked: RampSteps, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """`"beta2"`: 2 / (1 - beta2), of the largest one of their parameter groups, which is how long Adam's second moment
    takes to be of use (Ma and Yarats, arXiv 1910.04209, section 5). Raises ConfigError."""
    if asked != "beta2":
        if not isinstance(asked, int) or asked < 0:
            raise ConfigError(f'ramp_steps is {asked!r}; choose 0 (off), more, or "beta2"')
        return asked
    betas = [group["betas"][1] for optimizer in optimizers for group in optimizer.param_groups if "betas" in group]
    if not betas:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ConfigError(f'ramp_steps is "beta2", and {kinds} has none; give the number of steps')
    return math.ceil(2 / (1 - float(max(betas))) - 1e-6)  # 1 - 0.95 is a little more than 0.05


def steps_of_ramp(asked: RampSteps | None, usual: int, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """`asked` by the script; None: `usual`, those of the run. Raises ConfigError."""
    if not any(isinstance(optimizer, NodeOptimizer) for optimizer in optimizers):
        return num_ramp_steps(usual if asked is None else asked, optimizers)
    if asked:
        raise ConfigError(
            f"ramp_steps is {asked}, and the nodes do the steps: their moments are never fresh, and all sites need the "
            "same learning rate; leave it out"
        )
    return 0


class LearningRateRamp:
    """Scales the learning rates of `optimizers` by (k + 1) / (num_steps + 1) in the step after k calls of `advance`."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], num_steps: int) -> None:
        self._num_steps = num_steps
        self._num_done = 0
        self._saved: dict[int, list[float | Tensor]] = {}
        self._handles: list[RemovableHandle] = []
        self._optimizers = [within for optimizer in optimizers for within in all_stepping(optimizer)]
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._restore))

    def advance(self) -> bool:
        """Returns whether the ramp goes on; at its end nothing of it is left in the optimizers."""
        self._num_done += 1
        if self._num_done < self._num_steps:
            return True
        self.remove()
        return False

    def remove(self) -> None:
        for optimizer in self._optimizers:
            self._restore(optimizer)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, optimizer: torch.optim.Optimizer, *_of_step: object) -> None:
        self._restore(optimizer)  # if its last step raised, nobody came after it
        saved: list[float | Tensor] = []
        scale = (self._num_done + 1) / (self._num_steps + 1)
        for group in optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, Tensor):  # captured graphs read it where it lies
                saved.append(rate.clone())
                rate.mul_(scale)
            else:
                saved.append(rate)
                group["lr"] = rate * scale
        self._saved[id(optimizer)] = saved

    def _restore(self, optimizer: torch.optim.Optimizer, *_of_step: object) -> None:
        # Groups may have been added since a step that raised.
        for group, rate in zip(optimizer.param_groups, self._saved.pop(id(optimizer), ()), strict=False):
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
