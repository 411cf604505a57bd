"""Gradients of one rank that shares a model with others: their norm over all ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from atoll.node.parallel.mesh import Mesh

SMALLEST = 1e-6
"""Added to the norm, as `torch.nn.utils.clip_grad_norm_` does."""


@torch.no_grad()
def clip(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    mesh: Mesh | None = None,
    elsewhere: Collection[nn.Parameter] = (),
) -> Tensor:
    """Scale all gradients so that the norm over the whole model is at most `max_norm`. The norm before that.

    A collective: every rank of the site calls it. Each element counts once, in whatever meshes the tensors are shared.
    `mesh`: None where a rank is alone. `elsewhere`: parameters that another stage counts.
    """
    by_groups: dict[tuple[DeviceMesh | None, tuple[int, ...], bool], list[Tensor]] = {}
    uncounted = {id(parameter) for parameter in elsewhere}
    for parameter in parameters:
        if (gradient := parameter.grad) is None:
            continue
        shared_by: DeviceMesh | None = None
        shards: tuple[int, ...] = ()
        if isinstance(gradient, DTensor):
            if any(placed.is_partial() for placed in gradient.placements):  # a norm's, each rank of its positions
                assert isinstance(parameter, DTensor)
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
            # Not `is_shard`: a slice of a slice (FSDP2 over tensor parallelism) is none to torch.
            shards = tuple(dim for dim, placed in enumerate(gradient.placements) if not placed.is_replicate())
            shared_by, gradient = gradient.device_mesh, gradient.to_local()
        by_groups.setdefault((shared_by, shards, id(parameter) not in uncounted), []).append(gradient)
    squares = []
    for (shared_by, shards, is_counted), gradients in by_groups.items():
        if not is_counted:
            continue
        square = nn.utils.get_total_norm(gradients).float().square()
        for dim in shards:
            assert shared_by is not None
            dist.all_reduce(square, group=shared_by.get_group(dim))
        squares.append(square)
    total = torch.stack(squares).sum()
    if mesh is not None and mesh.of("pp") is not None:
        dist.all_reduce(total, group=mesh.whole.get_group("pp"))
    norm = total.sqrt()
    scale = (max_norm / (norm + SMALLEST)).clamp(max=1.0)
    for gradients in by_groups.values():
        torch._foreach_mul_(gradients, scale)
    return norm
