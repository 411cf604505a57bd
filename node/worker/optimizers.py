"""Optimizers of gradient exchange: torch's interface to a script, and the step itself at the node, which has the
gradients of all sites and keeps the moments.

Under a node `step` hands in the gradients, and `site.step` takes the new values back. Alone the same step is done here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.node.worker.local_steps import LocalWindow, WindowStart, local_of
from atoll.protocol.errors import ConfigError
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.sync_settings import SyncSettings

OF_OTHERS = ("maximize", "amsgrad", "nesterov", "dampening", "momentum", "betas", "eps")
"""Keys of parameter groups that change the steps of torch's optimizers."""


class NodeOptimizer(torch.optim.Optimizer):
    """The learning rate and weight decay of `param_groups` count at each `step`. All sites need the same: set them from
    `site.inner_step`, for a scheduler counts the steps of its own process. Clipping changes the gradient of this site,
    before it is averaged."""

    strategy = "gradient"
    """Of the runs that it is for."""
    fixed: tuple[str, ...] = ()
    """Keys of parameter groups that have to stay as they are: the nodes do not know of others."""
    _gradients: dict[nn.Parameter, Tensor] | None = None
    _rates: tuple[float, ...] = ()
    _num_commits: int | None = None
    """None: alone."""
    _has_left = False
    _is_finite = True
    """Of the gradients of the last step."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float, **rest: Any) -> None:
        given = {key: value for key, value in rest.items() if value is not None}  # schedulers look at what there is
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **given})

    def differs(self, outer: OuterSettings) -> str:
        """From the run's outer optimizer, in words; empty if it is that."""
        raise NotImplementedError

    def _move(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        """The step alone."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the gradients: they are None after it. Raises ConfigError for a sparse one, for settings of a parameter
        group that the nodes do not know of, and for a second step before `site.step`."""
        self.check_groups()
        if self._gradients is not None:
            raise ConfigError(f"{self._name} did two steps before one site.step: call site.step after each")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        for parameter, gradient in gradients.items():
            if gradient.layout is not torch.strided:
                raise ConfigError(f"a gradient of shape {list(gradient.shape)} is {gradient.layout}; make it dense")
            parameter.grad = None
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):  # here, where all ranks are
                gradients[parameter] = gradient.redistribute(placements=parameter.placements)
        if self._num_commits is not None and not self._has_left:
            self._is_finite = are_finite(gradients.values())
            self._hand_in(gradients)
            return loss
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in gradients:
                    self._move(parameter, gradients[parameter], group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Under a node the state is the run's: only the commit that it is of is named here."""
        found = super().state_dict()
        return found if self._num_commits is None else {**found, "state": {}, "commit": self._num_commits}

    # --- under a node

    def check_groups(self) -> None:
        """Raises ConfigError for what a parameter group sets and the nodes do not know of, and for rates below 0."""
        for number, group in enumerate(self.param_groups):
            for key in ("betas", "eps", *self.fixed):
                if group.get(key) != self.defaults.get(key):
                    raise ConfigError(
                        f"{self._name} has {key} = {group[key]} in parameter group {number}: it is the same for all, "
                        f"{self.defaults.get(key, 'as the run has it')}, as the nodes do the steps"
                    )
            for key in OF_OTHERS:
                if group.get(key) and key not in self.defaults:
                    raise ConfigError(
                        f"{self._name} has {key} = {group[key]} in parameter group {number}, and its steps know "
                        "nothing of it: leave it out"
                    )
            for key in ("lr", "weight_decay"):
                if not 0 <= float(group[key]) < math.inf:
                    raise ConfigError(
                        f"{self._name} has {key} = {group[key]} in parameter group {number}; choose 0 or more"
                    )

    @property
    def _name(self) -> str:
        return f"atoll.{type(self).__name__}"

    def at_commit(self, commit: int, start: WindowStart | None = None) -> None:
        """The parameters have the values of that commit: a gradient that is here is late. `start`: of steps that the
        site does by itself until the next one; None: the nodes do its step."""
        if self._num_commits is None and self.state:
            self.state.clear()
            sys.stderr.write(
                f"atoll: the moments that {self._name} has are not used: the nodes have those of the run\n"
            )
        self._num_commits, self._gradients, self._has_left = commit, None, False

    def leave(self) -> None:
        """The script is in the run no more: its steps are its own, as without a node."""
        self._gradients, self._has_left = None, True

    def _hand_in(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        if self._gradients is None:
            self._rates = tuple(float(group[key]) for group in self.param_groups for key in ("lr", "weight_decay"))
        self._gradients = gradients

    @property
    def has_stepped(self) -> bool:
        """Since the last `site.step`."""
        return self._gradients is not None

    @property
    def no_step(self) -> str:
        return f"{self._name} did no step"

    @property
    def left_out(self) -> str:
        """Why nothing of the last step is averaged; empty if it is."""
        if not self.has_stepped:
            return self.no_step
        return "" if self._is_finite else "a gradient is not finite"

    def leave_out(self) -> None:
        """Hands in nothing in place of the last step's gradients, or of those that are here and that no step took."""
        if self._gradients is None:
            left = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            if not are_finite(p.grad for p in left if p.grad is not None):  # else those of the next ones are added
                for parameter in left:
                    parameter.grad = None
        self._hand_in({})
        self._is_finite = True

    def take_step(self) -> None:
        """With what was handed in, which is no more left out."""

    @property
    def rates(self) -> tuple[float, ...]:
        """At the last step: learning rate and weight decay of each group."""
        return self._rates

    def contribution(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's slice of what travels; None if the step had no gradient of it."""
        gradient = (self._gradients or {}).get(parameter)
        return None if gradient is None else local_of(gradient)

    def handed_in(self) -> None:
        """They are in SNAPSHOT, or in a mean, or of no use."""
        self._gradients = None


class SGD(NodeOptimizer):
    """`p = p - lr * g`, or with momentum Nesterov's: `m = mu * m + g; p = p - lr * (g + mu * m)`."""

    fixed = ("momentum", "weight_decay")

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.0) -> None:
        super().__init__(params, lr, 0.0, momentum=momentum)

    def differs(self, outer: OuterSettings) -> str:
        momentum = self.defaults["momentum"]
        if outer.optimizer in ("sgd", "nesterov") and outer.momentum == momentum:
            return ""
        return f"atoll.SGD(momentum={momentum:g})"

    def _move(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        if mu := group["momentum"]:
            state = self.state[parameter]
            buffer = state.setdefault("momentum", torch.zeros_like(parameter))
            buffer.mul_(mu).add_(gradient)
            gradient = gradient + mu * buffer
        parameter.sub_(group["lr"] * gradient)


class SignSGD(NodeOptimizer):
    """signSGD (arXiv 1802.04434): `p = p - lr * (sign(g) + weight_decay * p)`, g being the average over all sites. With
    codec dct1 and error feedback it is DeMo (arXiv 2411.19870)."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)

    def differs(self, outer: OuterSettings) -> str:
        return "" if outer.optimizer == "signsgd" else "atoll.SignSGD()"

    def _move(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(group["lr"] * (gradient.sign() + group["weight_decay"] * parameter))


class AdamW(NodeOptimizer):
    """AdamW (arXiv 1711.05101) over all sites. `betas` and `eps` are the run's; given here they have to be equal."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, weight_decay, betas=betas, eps=eps)

    @property
    def _given(self) -> tuple[float | None, float | None, float | None]:
        beta1, beta2 = self.defaults.get("betas", (None, None))
        return beta1, beta2, self.defaults.get("eps")

    def differs(self, outer: OuterSettings) -> str:
        wanted = outer.momentum, outer.beta2, outer.epsilon
        pairs = zip(self._given, wanted, strict=True)
        if outer.optimizer == "adamw" and all(given in (None, found) for given, found in pairs):
            return ""
        beta1, beta2, eps = self._given
        return "atoll.AdamW()" if beta1 is eps is None else f"atoll.AdamW(betas=({beta1}, {beta2}), eps={eps})"

    def _move(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        alone = OuterSettings(momentum=0.9)
        wanted = alone.momentum, alone.beta2, alone.epsilon
        beta1, beta2, eps = (b if a is None else a for a, b in zip(self._given, wanted, strict=True))
        state = self.state[parameter]
        step = state["step"] = state.get("step", 0) + 1
        m, v = (state.setdefault(key, torch.zeros_like(parameter)) for key in ("momentum", "variance"))
        m.mul_(beta1).add_(gradient, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        moved = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
        parameter.sub_(group["lr"] * (moved + group["weight_decay"] * parameter))


class OneBitAdam(AdamW):
    """1-bit Adam (arXiv 2102.02888): AdamW in the run's warm-up; then the variance stays as it is, and the sites
    average their momenta, with as little as 1 bit a parameter. Alone it is AdamW."""

    strategy = "momentum"


class ZeroOneAdam(OneBitAdam):
    """0/1 Adam (arXiv 2202.06009): in the warm-up the variance moves more and more rarely, and after it sites do more
    and more steps by themselves between two commits (`local_doubling` of the run). Alone it is AdamW."""

    _window: LocalWindow | None = None

    def at_commit(self, commit: int, start: WindowStart | None = None) -> None:
        super().at_commit(commit, start)
        self._window = None  # its memory is free before that of the next one is taken
        if start is not None:
            self._window = LocalWindow(self.param_groups, start)

    def take_step(self) -> None:
        if self._window is not None:
            self._window.step(self.param_groups, self._gradients or {}, self._rates)
            self._rates = self._window.rates

    def contribution(self, parameter: nn.Parameter) -> Tensor | None:
        return super().contribution(parameter) if self._window is None else self._window.contribution(parameter)


def are_finite(gradients: Iterable[Tensor]) -> bool:
    """One pass over them, and one wait for their device."""
    found = [local for gradient in gradients if (local := local_of(gradient)).numel()]
    return bool(nn.utils.get_total_norm(found, math.inf).isfinite())


def rated_groups(optimizers: Iterable[torch.optim.Optimizer]) -> list[tuple[NodeOptimizer, int]]:
    """The parameter groups whose rates travel, in their order: those with a parameter that is trained."""
    return [
        (optimizer, number)
        for optimizer in optimizers
        if isinstance(optimizer, NodeOptimizer)
        for number, group in enumerate(optimizer.param_groups)
        if any(p.requires_grad for p in group["params"])
    ]


def check(optimizers: Iterable[torch.optim.Optimizer], sync: SyncSettings, outer: OuterSettings) -> None:
    """Raises ConfigError unless these are the ones that the run exchanges for, as the nodes can do their steps."""
    strategy = sync.strategy
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, NodeOptimizer):
            if strategy != "diloco":
                raise ConfigError(
                    f'{kind} does its steps alone, and the run has sync.strategy = "{strategy}", in which the nodes do '
                    f"them: use atoll.{kind_of(sync, outer).__name__}(params, lr=...)"
                )
        elif strategy != optimizer.strategy:
            what = "one of torch.optim" if strategy == "diloco" else f"atoll.{kind_of(sync, outer).__name__}"
            raise ConfigError(
                f'atoll.{kind} is for sync.strategy = "{optimizer.strategy}", and the run has "{strategy}": use {what}'
            )
        elif sync.local_doubling and not isinstance(optimizer, ZeroOneAdam):
            raise ConfigError(
                f"atoll.{kind} does no steps by itself, and the run has sync.local_doubling = {sync.local_doubling}: "
                f"use atoll.{kind_of(sync, outer).__name__}(params, lr=...)"
            )
        elif found := optimizer.differs(outer):
            raise ConfigError(
                f"the script has {found}, and the run outer.optimizer = {outer.optimizer!r} with momentum "
                f"{outer.momentum:g} (beta1), beta2 {outer.beta2:g} and epsilon {outer.epsilon:g}: make them equal"
            )
        else:
            optimizer.check_groups()


def kind_of(sync: SyncSettings, outer: OuterSettings) -> type[Any]:
    """The optimizer of atoll that the script of such a run has. Not of strategy diloco."""
    if sync.strategy == "momentum":
        return ZeroOneAdam if sync.has_phases else OneBitAdam
    return {"adamw": AdamW, "signsgd": SignSGD}.get(outer.optimizer, SGD)
