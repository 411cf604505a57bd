"""A fresh inner optimizer knows nothing of the gradients it meets: its first steps are made smaller.

The learning rate is scaled only while `optimizer.step()` runs, so schedulers never see it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class LearningRateRamp:
    """Scales the learning rates of `optimizers` by (k + 1) / (num_steps + 1) in the step after k calls of `advance`."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], num_steps: int) -> None:
        self._num_steps = num_steps
        self._num_done = 0
        self._saved: dict[int, list[float | Tensor]] = {}
        self._handles: list[RemovableHandle] = []
        self._optimizers = optimizers
        for optimizer in optimizers:
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
