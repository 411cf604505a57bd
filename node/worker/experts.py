"""A feed-forward of which each token uses a part: a router chooses a few of many experts (2101.03961), beside shared
experts that all tokens go through (2401.06066). No token is dropped, however uneven the loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from atoll.node.parallel.mesh import Mesh
from atoll.protocol.model_settings import ModelSettings

SMALLEST = 1e-20
"""Added to the sum of a token's scores."""
BUFFERS = "*.router.bias"
"""Names of the only persistent buffers of the built-in model."""


class Router(nn.Module):
    """Scores experts by a sigmoid, in fp32, and chooses those with the largest sum of score and bias (2412.19437,
    section 2.1.2). The bias has no gradient: `balance` moves it."""

    bias: Tensor

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(settings.num_experts, settings.dim))
        self.register_buffer("bias", torch.zeros(settings.num_experts))
        self.experts_per_token, self.bias_rate = settings.experts_per_token, settings.router_bias_rate
        self.num_real: int | None = None
        """Of a sequence's positions here, those that count; what fills it up is behind them. None: all."""
        self.loads: list[Tensor] = []
        """Choices of each expert, in each forward pass since the last step. No buffer: DDP would replace it by that of
        its first rank."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: (batch, seq, dim). Weights, whose sum is 1, and numbers of the chosen experts: (batch, seq,
        experts_per_token) each."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores.detach() + self.bias).topk(self.experts_per_token).indices
        # Not what a backward pass computes again.
        if self.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.loads.append(chosen[:, : self.num_real].flatten().bincount(minlength=len(self.bias)))
        weights = scores.gather(-1, chosen)
        return weights / (weights.sum(-1, keepdim=True) + SMALLEST), chosen


class Experts(nn.Module):
    """SwiGLU feed-forwards as stacked tensors, so that an expert is a part of the first dimension of each."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        number, dim, width = settings.num_experts, settings.dim, settings.ffn_dim
        self.gate = nn.Parameter(torch.empty(number, width, dim))
        self.up = nn.Parameter(torch.empty(number, width, dim))
        self.down = nn.Parameter(torch.empty(number, dim, width))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x: (tokens, dim), those of the first expert here first, as many as `counts` says: (experts here,)."""
        # An expert without a token takes part: its gradient is zero, where others of its tensor have one.
        here = (w.to_local() if isinstance(w, DTensor) else w for w in (self.gate, self.up, self.down))
        parts = [
            F.linear(F.silu(F.linear(tokens, gate)) * F.linear(tokens, up), down)
            for tokens, gate, up, down in zip(torch.split(x, counts.tolist()), *here, strict=True)
        ]
        return torch.cat(parts)


Compute = Callable[[Experts, Tensor, Tensor], Tensor]
"""Experts, tokens in the order of all experts and counts of each to what the experts give, in the same order."""


class MixtureOfExperts(nn.Module):
    def __init__(self, settings: ModelSettings, shared: nn.Module | None) -> None:
        super().__init__()
        self.router = Router(settings)
        self.experts = Experts(settings)
        self.shared = shared
        self.compute: Compute = Experts.__call__
        self.enter: Callable[[Tensor], Tensor] = _as_it_is
        self.leave: Callable[[Tensor], Tensor] = _as_it_is
        """Around what ranks of tensor parallelism compute parts of."""

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, dim)
        weights, chosen = self.router(x)
        numbers = chosen.flatten()
        order = numbers.argsort(stable=True)
        given = self.enter(x).flatten(0, 1)[order // chosen.shape[-1]]
        out = self.compute(self.experts, given, numbers.bincount(minlength=len(self.router.bias)))
        out = out[order.argsort()].view(*chosen.shape, -1)  # (batch, seq, experts_per_token, dim)
        mixed = self.leave((out * self.enter(weights).unsqueeze(-1)).sum(2).type_as(out))
        if self.shared is not None:
            mixed = mixed + self.shared(x)
        return mixed


def _as_it_is(x: Tensor) -> Tensor:
    return x


@torch.no_grad()
def balance(parts: Iterable[nn.Module], mesh: Mesh | None) -> None:
    """At the end of a step, a collective of the site: biases of experts with more than their share of the step's tokens
    fall by the rate, those of the others rise (2408.15664, algorithm 1). Loads are whole numbers, summed over all ranks
    that see different tokens, so that the biases of all ranks are the same to the bit, in any layout.

    `mesh`: None where a rank is alone.
    """
    routers = [module for part in parts for module in part.modules() if isinstance(module, Router)]
    if not routers:
        return
    # Before its first step, and the first after an evaluation, torch's pipeline has a forward pass more, for shapes.
    num_parts = mesh.settings.num_microbatches if mesh is not None and mesh.of("pp") is not None else 0
    loads = torch.stack([torch.stack(router.loads[-num_parts:]).sum(0) for router in routers])  # (routers, experts)
    for name in ("dp_replicate", "dp_shard", "cp"):
        if mesh is not None and (ranks := mesh.of(name)) is not None:
            dist.all_reduce(loads, group=ranks.get_group())
    above = loads * loads.shape[1] - loads.sum(1, keepdim=True)
    for router, signs in zip(routers, above.sign(), strict=True):
        router.bias -= router.bias_rate * signs
        router.loads = []
