"""Steps that a site does by itself between two commits, with the moments of the commit before: 0/1 Adam.

    m = b1*m + (1-b1)*g        x = x - lr*(clamp((m/c1)/(sqrt(v/c2) + eps)) + wd*x)

The variance v stays. What the site contributes is the mean of its momenta, weighted by the learning rates. But for the
clamp, which is of each step here and of their mean at the nodes (node/dataplane/kernels.py), and weight decay, the
nodes' step with the sum of the rates is what the site's steps were together. (arXiv 2202.06009, algorithm 1, whose u is
the product of that mean and that sum.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.protocol.outer import bias_at
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings

Moments = Mapping[nn.Parameter, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStart:
    """Where the steps of a window start."""

    outer: OuterSettings
    bias: tuple[float, float]
    """c1 and c2: those of the commit that the window leads to."""
    moments: Moments
    """This rank's slices of momentum and variance, fp32 in CPU memory, in which nothing is written."""

    @classmethod
    def on(cls, settings: RunSettings, base_commit: int, base_run_step: int, moments: Moments) -> WindowStart:
        """Of a whole window on that base."""
        at_end = base_run_step + settings.sync.phases.steps(base_commit + 1)
        return cls(outer=settings.outer, bias=bias_at(settings, base_commit + 1, at_end), moments=moments)


@dataclass(slots=True, kw_only=True)
class _State:
    """Of a parameter, fp32 on its device, of its local shape."""

    momentum: Tensor
    divisor: Tensor
    """sqrt(v/c2) + eps."""
    weighted: Tensor
    """Sum of the momenta, each times its learning rate."""
    group: int


class LocalWindow:
    """Of the parameters of one optimizer."""

    def __init__(self, groups: Sequence[dict[str, Any]], start: WindowStart) -> None:
        self._beta1, self._bias1 = start.outer.momentum, start.bias[0]
        self._sums: dict[int, tuple[float, float]] = {}  # of each group: rates, and weight decays times these
        self._last_decay: dict[int, float] = {}
        self._states: dict[nn.Parameter, _State] = {}
        for number, group in enumerate(groups):
            for parameter in (p for p in group["params"] if p in start.moments):
                device = local_of(parameter).device
                momentum, variance = (moment.to(device, copy=True) for moment in start.moments[parameter])
                divisor = variance.div_(start.bias[1]).sqrt_().add_(start.outer.epsilon)
                state = _State(momentum=momentum, divisor=divisor, weighted=torch.zeros_like(momentum), group=number)
                self._states[parameter] = state

    @torch.no_grad()
    def step(
        self, groups: Sequence[dict[str, Any]], gradients: Mapping[nn.Parameter, Tensor], given: Sequence[float]
    ) -> None:
        """Moves the parameters, in place. One without a gradient has one of 0. `given`: learning rate and weight decay
        of each group."""
        # A group that was added since is refused at the snapshot.
        for number, group in enumerate(groups[: len(given) // 2]):
            rate, decay = given[2 * number : 2 * number + 2]
            rates, decays = self._sums.get(number, (0.0, 0.0))
            self._sums[number], self._last_decay[number] = (rates + rate, decays + rate * decay), decay
            for parameter in (p for p in group["params"] if p in self._states):
                self._move(parameter, gradients.get(parameter), rate, decay)

    def _move(self, parameter: nn.Parameter, gradient: Tensor | None, rate: float, decay: float) -> None:
        state, local = self._states[parameter], local_of(parameter)
        state.momentum.mul_(self._beta1)
        if gradient is not None:
            state.momentum.add_(local_of(gradient).to(torch.float32), alpha=1 - self._beta1)
        state.weighted.add_(state.momentum, alpha=rate)
        values = local.to(torch.float32)
        moved = (state.momentum / self._bias1).div_(state.divisor).clamp_(-1.0, 1.0).add_(values, alpha=decay)
        local.copy_(values.sub(moved, alpha=rate))

    def contribution(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's slice of the mean of its momenta; None if the window has none of the parameter. Where all rates
        were 0, and nothing moved, it is the last one."""
        state = self._states.get(parameter)
        if state is None:
            return None
        rates, _ = self._sums[state.group]
        return state.weighted / rates if rates else state.momentum

    @property
    def rates(self) -> tuple[float, ...]:
        """Of each group: the sum of the learning rates, and the weight decay, the mean by these."""
        return tuple(
            number
            for group, (rates, decays) in sorted(self._sums.items())
            for number in (rates, decays / rates if rates else self._last_decay[group])
        )


def local_of(tensor: Tensor) -> Tensor:
    """This rank's slice, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
