"""Tensor parallelism of the built-in model (Megatron-LM, 1909.08053, section 3): of each pair of matrices the first is
shared by columns, the second by rows, and one sum over the ranks gives the block's output to all of them."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

BLOCK = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
    "feed_forward.gate": ColwiseParallel(),
    "feed_forward.up": ColwiseParallel(),
    "feed_forward.down": RowwiseParallel(),
}


def share_matrices(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh) -> None:
    """In place: heads of attention and columns of the feed-forward are divided. Embedding and norms stay whole."""
    for block in blocks:
        parallelize_module(block, mesh, dict(BLOCK))
    if isinstance(getattr(model, "head", None), nn.Linear):
        parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
