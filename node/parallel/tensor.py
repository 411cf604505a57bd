"""Tensor parallelism of the built-in model (Megatron-LM, 1909.08053, section 3): of each pair of matrices the first is
shared by columns, the second by rows, and one sum over the ranks gives the block's output to all of them.

With sequence parallelism (2205.05198, section 4.2) each rank keeps its share of the positions between the pairs: the
first matrices gather all of them, and the sum gives each rank its own."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

Plan = dict[str, ParallelStyle]
BLOCK: Plan = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
}
FEED_FORWARD: Plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
"""Of a block, or the one that its experts have beside them."""


HEAD: Plan = {"head": ColwiseParallel(output_layouts=Replicate())}
"""Divided by tokens of the vocabulary, as the embedding is where they are one matrix."""
EMBEDDING: Plan = {"embedding": RowwiseParallel(input_layouts=Replicate())}

POSITIONS = Shard(1)
BLOCK_OF_POSITIONS: Plan = BLOCK | {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(POSITIONS, None, None), desired_input_layouts=(Replicate(), None, None)
    ),
    "attention.wo": RowwiseParallel(output_layouts=POSITIONS),
    "feed_forward_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(input_layouts=(POSITIONS,), desired_input_layouts=(Replicate(),)),
}
FEED_FORWARD_OF_POSITIONS: Plan = FEED_FORWARD | {"down": RowwiseParallel(output_layouts=POSITIONS)}
HEAD_OF_POSITIONS: Plan = {
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=POSITIONS, output_layouts=Replicate()),
}
EMBEDDING_OF_POSITIONS: Plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=POSITIONS)}
"""Divided by vocabulary: a whole one would have the gradients of this rank's positions alone."""


def share_matrices(
    model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, *, is_tied: bool, by_positions: bool
) -> None:
    """In place: heads of attention, columns of the feed-forward and the vocabulary of the output are divided. Norms
    stay whole, and the embedding too, unless it is the output's matrix (`is_tied`), here or in another stage.

    `by_positions`: sequence parallelism. Norms and what is between blocks, or stages, are of this rank's positions.
    """
    of_block, of_feed_forward, of_head, of_embedding = BLOCK, FEED_FORWARD, HEAD, EMBEDDING
    if by_positions:
        of_block, of_feed_forward = BLOCK_OF_POSITIONS, FEED_FORWARD_OF_POSITIONS
        of_head, of_embedding = HEAD_OF_POSITIONS, EMBEDDING_OF_POSITIONS
    for block in blocks:
        parallelize_module(block, mesh, dict(of_block))
        feed_forward: nn.Module = block.feed_forward  # type: ignore[assignment]
        if (dense := getattr(feed_forward, "shared", feed_forward)) is not None:
            parallelize_module(dense, mesh, dict(of_feed_forward))
    embedding, head = (getattr(model, name, None) for name in ("embedding", "head"))
    if embedding is not None and (is_tied or by_positions):
        parallelize_module(model, mesh, dict(of_embedding))
    if head is not None:
        parallelize_module(model, mesh, dict(of_head))
    if embedding is not None and head is not None and is_tied:
        head.weight = embedding.weight
