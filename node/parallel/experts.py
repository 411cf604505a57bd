"""Expert parallelism (GShard, 2006.16668, section 3): ranks share the experts of each block, and each token goes to the
ranks that have the experts it chose, and back.

The ranks are those that share the batch and the parameters (`dp_shard` x `cp`): neighbours have different experts, and
FSDP2 shards each rank's experts over the ranks that have the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from atoll.node.parallel.context import Context
from atoll.node.parallel.mesh import Mesh

COLUMNS = {"gate": 1, "up": 1, "down": 2}
"""Of the stacked tensors of experts, the dimension of the feed-forward's width."""


def share_experts(blocks: Iterable[nn.Module], mesh: Mesh, context: Context | None) -> list[nn.Module]:
    """In place, where blocks have a mixture, as `node/worker/experts.py` has: `ep` shares the experts as whole ones,
    `tp` their columns. Returns the modules that FSDP2 shards over `mesh.of_experts`."""
    modules = [module for block in blocks for module in block.modules()]
    mixtures: list[Any] = [module for module in modules if hasattr(module, "experts") and hasattr(module, "compute")]
    for mixture in mixtures:
        _share(mixture.experts, mesh)
        if mesh.ep is not None:
            mixture.compute = Dispatch(mesh.ep)
        if (tp := mesh.of("tp")) is not None:
            mixture.enter, mixture.leave = partial(_enter, tp), partial(_leave, tp)
        if context is not None:
            mixture.router.num_real = context.num_real
    return [mixture.experts for mixture in mixtures] if mesh.ep is not None else []


def _share(experts: nn.Module, mesh: Mesh) -> None:
    ep, tp = mesh.ep, mesh.of("tp")
    meshes = [one for one in (ep, tp) if one is not None]
    if not meshes:
        return
    shared_by = meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)
    for name, columns in COLUMNS.items():
        placements = [*([Shard(0)] if ep is not None else []), *([Shard(columns)] if tp is not None else [])]
        parameter = getattr(experts, name)
        setattr(experts, name, nn.Parameter(distribute_tensor(parameter, shared_by, placements)))


def sharded_dimension(parameter: nn.Parameter, num_shards: int) -> Shard | None:
    """Of a parameter, for FSDP2: None is the first one. Where the experts of a rank are fewer than its shards, most
    would be empty: it is the second one, if they divide it."""
    here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    by_rows = here.dim() == 3 and here.shape[0] < num_shards and here.shape[1] % num_shards == 0
    return Shard(1) if by_rows else None


class Dispatch:
    """Of one rank. No token is dropped: a rank gets as many as chose its experts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """`mesh`: one dimension, of the ranks that share the experts."""
        self._group, self._ranks = mesh.get_group(), mesh.size()

    def __call__(self, experts: nn.Module, x: Tensor, counts: Tensor) -> Tensor:
        """What `experts` of all ranks give for x: (tokens, dim), those of the first expert of all first, as many as
        `counts` says: (experts,). A collective, as is its backward."""
        asked = counts.view(self._ranks, -1)  # (to rank, expert there)
        given = torch.empty_like(asked)  # (from rank, expert here)
        dist.all_to_all_single(given, asked, group=self._group)
        sent, received = asked.sum(1).tolist(), given.sum(1).tolist()
        # FSDP2 takes the mean over fewer ranks than the batch has: gradients of experts are divided by `ep` here, and
        # those of tokens are not.
        there = _Way(sent, received, self._group, float(self._ranks))
        here = _Exchange.apply(x, there)  # type: ignore[no-untyped-call]
        # Each rank sent those of the first expert first; an expert takes its tokens of all ranks together.
        numbers = torch.arange(asked.shape[1], device=x.device).repeat(self._ranks)
        order = numbers.repeat_interleave(given.flatten()).argsort(stable=True)
        out = experts(here[order], given.sum(0))[order.argsort()]
        back = _Way(received, sent, self._group, 1 / self._ranks)
        return _Exchange.apply(out, back)  # type: ignore[no-untyped-call,no-any-return]


@dataclass(frozen=True, slots=True)
class _Way:
    """Rows to and from each rank of a group, the first rows to the first rank."""

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup
    scale: float
    """Of the gradient that comes back."""


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return _exchanged(x, way.sent, way.received, way.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        way = ctx.way
        return _exchanged(gradient, way.received, way.sent, way.group).mul_(way.scale), None


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    given = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(given, x.contiguous(), received, sent, group=group)
    return given


def _enter(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Where ranks of tensor parallelism begin to compute different parts: gradients of what goes in are summed."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _leave(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Where their parts are summed."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).full_tensor()
