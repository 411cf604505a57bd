"""Optimizers that keep weights of their own, as libraries have them, each under names of its own."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class InState(torch.optim.Optimizer):
    """fp32 masters beside its momenta, made at the first step."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["steps"], state["moved"] = 0, torch.zeros_like(parameter, dtype=torch.float32)
                    state["w32"] = self._first(parameter)
                state["steps"] += 1
                state["moved"].mul_(0.9).add_(parameter.grad.float(), alpha=0.1)
                self._move(state["w32"], state["moved"], group["lr"])
                parameter.copy_(self._cast(state["w32"], parameter))

    def _first(self, parameter: Tensor) -> Tensor:
        return parameter.detach().clone().float()

    def _move(self, master: Tensor, moved: Tensor, lr: float) -> None:
        master.sub_(moved, alpha=lr)

    def _cast(self, master: Tensor, parameter: Tensor) -> Tensor:
        return master.to(parameter.dtype)


class Beside(torch.optim.Optimizer):
    """fp32 masters in an attribute, made before the first step; its momenta are in the state."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self._mine = [p for group in self.param_groups for p in group["params"]]
        self.masters = [p.detach().clone().float() for p in self._mine]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for parameter, master in zip(self._mine, self.masters, strict=True):
            moved = self.state[parameter].setdefault("moved", torch.zeros_like(master))
            moved.mul_(0.9).add_(parameter.grad.float(), alpha=0.1)
            master.sub_(moved, alpha=self.param_groups[0]["lr"])
            parameter.copy_(master)


class Unfindable(InState):
    """Its masters are scaled, so that no value is the parameter's."""

    def _first(self, parameter: Tensor) -> Tensor:
        return super()._first(parameter) * 3

    def _move(self, master: Tensor, moved: Tensor, lr: float) -> None:
        master.sub_(moved, alpha=3 * lr)

    def _cast(self, master: Tensor, parameter: Tensor) -> Tensor:
        return (master / 3).to(parameter.dtype)


class Within(torch.optim.Optimizer):
    """Its masters are the parameters of an optimizer within."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self._mine = [p for group in self.param_groups for p in group["params"]]
        self._twins: list[Tensor] = []
        self._worker: torch.optim.Optimizer | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if self._worker is None:
            self._twins = [p.detach().clone().float() for p in self._mine]
            self._worker = torch.optim.SGD(self._twins, lr=self.defaults["lr"], momentum=0.9)
        for twin, parameter in zip(self._twins, self._mine, strict=True):
            twin.grad = None if parameter.grad is None else parameter.grad.float()
        self._worker.step()
        for twin, parameter in zip(self._twins, self._mine, strict=True):
            parameter.copy_(twin)


class DualAveraging(torch.optim.Optimizer):
    """As MADGRAD: each step goes a tenth of the way to a point that is made of the first values and all gradients."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["x0"], state["s"] = parameter.detach().clone(), torch.zeros_like(parameter)
                state["s"].add_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(state["x0"] - state["s"], 1 - group["momentum"])


class Wrapper(torch.optim.Optimizer):
    """It passes on to the one within, without `Optimizer.__init__`: it has no hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Lookahead(torch.optim.Optimizer):
    """As timm has it: without `Optimizer.__init__`, so no hook of it is ever called, and with slow weights in the state
    of the optimizer within."""

    def __init__(self, base: torch.optim.Optimizer, alpha: float = 0.5, k: int = 6) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._base_optimizer = base
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, defaultdict(dict)
        self._alpha, self._k, self._num_steps = alpha, k, 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self._base_optimizer.step()
        self._num_steps += 1
        if self._num_steps % self._k:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self._base_optimizer.state[parameter]
                slow = state.setdefault("lookahead_slow_buff", parameter.detach().clone())
                slow.add_(parameter - slow, alpha=self._alpha)
                parameter.copy_(slow)
