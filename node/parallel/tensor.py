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
}
FEED_FORWARD = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
"""Of a block, or the one that its experts have beside them."""


HEAD = {"head": ColwiseParallel(output_layouts=Replicate())}
"""Divided by tokens of the vocabulary, as the embedding is where they are one matrix."""
EMBEDDING = {"embedding": RowwiseParallel(input_layouts=Replicate())}


def share_matrices(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, *, is_tied: bool) -> None:
    """In place: heads of attention, columns of the feed-forward and the vocabulary of the output are divided. Norms
    stay whole, and the embedding too, unless it is the output's matrix (`is_tied`), here or in another stage."""
    for block in blocks:
        parallelize_module(block, mesh, dict(BLOCK))
        feed_forward: nn.Module = block.feed_forward  # type: ignore[assignment]
        if (dense := getattr(feed_forward, "shared", feed_forward)) is not None:
            parallelize_module(dense, mesh, dict(FEED_FORWARD))
    embedding, head = (getattr(model, name, None) for name in ("embedding", "head"))
    if embedding is not None and is_tied:
        parallelize_module(model, mesh, dict(EMBEDDING))
    if head is not None:
        parallelize_module(model, mesh, dict(HEAD))
    if embedding is not None and head is not None and is_tied:
        head.weight = embedding.weight
