"""The formulas of a rank's memory, against what a step of the built-in trainer has on the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch

from atoll.node.parallel.blocks import Block
from atoll.node.parallel.parallelize import parallelize
from atoll.node.parallel.passes import computing
from atoll.node.parallel.settings import ParallelSettings
from atoll.node.parallel.tensor import share_matrices
from atoll.node.plan.activations import ON_CPU, SCORES, Activations
from atoll.node.plan.rank_memory import rank_memory, share_of
from atoll.node.plan.tensors import PARTS, parameters_by_part, shapes
from atoll.node.worker.model import Transformer
from atoll.node.worker.recipe import make_optimizer, token_loss
from atoll.node.worker.shared_model import built_in, stage_of
from atoll.protocol.model_settings import MODELS, ModelSettings, TrainerSettings
from atoll.protocol.settings import RunSettings
from tests.harness.live_memory import Live

TOLERANCE = 0.1
WIDE = ModelSettings(dim=256, num_layers=4, num_heads=8, num_kv_heads=2, ffn_dim=704, vocab_size=512, max_sequence=128)
MANY_WORDS = ModelSettings(num_kv_heads=4, vocab_size=4096)
EXPERTS = replace(WIDE, ffn_dim=128, num_experts=4, num_shared_experts=1)
ONE_OF_FOUR = replace(MANY_WORDS, ffn_dim=128, num_experts=4, experts_per_token=1)


class Measured(NamedTuple):
    weights: int
    optimizer: int
    forward: int
    """At the end of the forward pass, beside weights and optimizer."""
    peak: int
    """The most until the backward pass is over, beside them."""


def measured(model: ModelSettings, settings: ParallelSettings, batch: int, sequence: int) -> Measured:
    trained = parallelize(
        Transformer(model, 0), settings, None, partial(share_matrices, is_tied=False, by_positions=False)
    )
    optimizer = make_optimizer(trained.parameters(), TrainerSettings())
    tokens = torch.randint(0, model.vocab_size, (batch, sequence + 1))
    live, at_forward = Live(), 0

    def step() -> None:
        nonlocal at_forward
        with computing(settings, torch.device("cpu")):
            logits = trained(tokens[:, :-1])
        at_forward = live.now
        token_loss(logits, tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]

    step()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    states = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    for tensor in (*trained.parameters(), *trained.buffers(), *states, tokens):
        live.count(tensor)
    live.now = live.most = 0
    with live:
        step()
    weights = sum(p.untyped_storage().nbytes() for p in trained.parameters())
    return Measured(weights, sum(v.untyped_storage().nbytes() for v in states), at_forward, live.most)


MODELS_TRIED = {"wide": WIDE, "many words": MANY_WORDS, "experts": EXPERTS, "one of four experts": ONE_OF_FOUR}
IN_TEST = (
    ("wide", "none", "fp32"),
    ("wide", "full", "fp32"),
    ("one of four experts", "none", "bf16"),
    ("one of four experts", "selective", "bf16"),
)


@pytest.mark.parametrize(
    ("model", "checkpointing", "precision"),
    [
        pytest.param(
            model,
            checkpointing,
            precision,
            id=f"{name}-{checkpointing}-{precision}",
            marks=() if (name, checkpointing, precision) in IN_TEST else pytest.mark.slow,
        )
        for name, model in MODELS_TRIED.items()
        for checkpointing in ("none", "selective", "full")
        for precision in ("fp32", "bf16")
    ],
)
def test_a_step_has_the_memory_of_the_formulas(model: ModelSettings, checkpointing: str, precision: str) -> None:
    settings = ParallelSettings(checkpointing=checkpointing, precision=precision)
    found, said = measured(model, settings, 8, 128), rank_memory(model, settings, 8, 128, ON_CPU)
    assert (found.weights, found.optimizer) == (said.weights, said.optimizer)
    assert said.gradients == said.weights
    share = share_of(model, settings, 0)
    casts = share.cast_bytes(precision) if checkpointing == "none" else share.cast_bytes(precision) and 2 * share.head
    assert found.forward == pytest.approx(said.activations + casts, rel=0.01)
    assert found.peak == pytest.approx(said.peak - said.weights - said.optimizer, rel=TOLERANCE)


def test_a_smaller_share_of_the_batch_has_less() -> None:
    one, two = (rank_memory(WIDE, ParallelSettings(dp_shard=size), 8, 128) for size in (1, 2))
    assert two.activations == pytest.approx(one.activations / 2)
    assert two.weights == one.weights / 2


def test_matrices_are_shared_by_tp_and_norms_are_not() -> None:
    whole, half = (share_of(WIDE, ParallelSettings(tp=size), 0) for size in (1, 2))
    assert whole.block - half.block == (whole.block - 2 * WIDE.dim) // 2
    assert half.head == whole.head // 2
    assert half.embedding == whole.embedding
    whole, half = (share_of(EXPERTS, ParallelSettings(tp=size), 0) for size in (1, 2))
    is_whole = (2 + EXPERTS.num_experts) * EXPERTS.dim  # norms and router
    assert whole.block - half.block == (whole.block - is_whole) // 2


def test_experts_are_put_together_by_the_ranks_that_have_the_same() -> None:
    """Weights are the same whatever `ep` is; what is gathered is not."""
    settings = ParallelSettings(dp_shard=4)
    one, two = (rank_memory(EXPERTS, replace(settings, ep=ep), 8, 128) for ep in (1, 2))
    assert (one.weights, one.optimizer, one.activations) == (two.weights, two.optimizer, two.activations)
    of_block = 3 * EXPERTS.num_experts * EXPERTS.dim * EXPERTS.ffn_dim
    whole, half = (share_of(EXPERTS, replace(settings, ep=ep), 0) for ep in (1, 2))
    assert whole.block_here - half.block_here == of_block // 2
    assert whole.total_here - half.total_here == EXPERTS.num_layers * of_block // 2
    assert one.peak - two.peak >= 2 * 4 * of_block // 2, "of two blocks at a time"


def test_between_matrices_positions_are_shared_too() -> None:
    by_heads, by_positions = (ParallelSettings(tp=2, sequence_parallel=size, checkpointing="full") for size in (0, 1))
    kept, less = (rank_memory(WIDE, settings, 8, 128) for settings in (by_heads, by_positions))
    tokens = 8 * 128
    norm = (4 + 4 * WIDE.dim) / 2  # the last one
    assert kept.activations - less.activations == tokens * (WIDE.num_layers * 4 * WIDE.dim / 2 + norm)
    assert share_of(WIDE, by_positions, 0).embedding == share_of(WIDE, by_heads, 0).embedding / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_diagonal", [False, True])
def test_a_block_of_a_ring_has_scores_in_memory(dtype: torch.dtype, is_diagonal: bool) -> None:
    """As GPUs compute it: in its backward pass, as often as the formula says."""
    q, k, v, d_out = (torch.randn(1, 4, 512, 16, dtype=dtype) for _ in range(4))
    block = Block(q, k, v, is_diagonal)
    out, log_sum = block.attention()
    with Live() as live:
        block.gradients(d_out, out, log_sum)
    assert live.most == pytest.approx(SCORES * 4 * 4 * 512 * 512, rel=0.2)


def test_a_ring_on_gpus_has_its_scores_at_the_peak() -> None:
    """Of as many tokens a rank, in one sequence and in two."""
    ring = ParallelSettings(cp=4, cp_ulysses=1)
    one, two = (rank_memory(WIDE, ring, batch, 4096 // batch) for batch in (1, 2))
    assert one.moment == two.moment == "the backward pass of the last block"
    assert one.peak - two.peak == SCORES * 4 * WIDE.num_heads * (1024 * 1024 - 2 * 512 * 512)
    heads = ParallelSettings(cp=2, cp_ulysses=2)
    assert rank_memory(WIDE, heads, 1, 4096) == rank_memory(WIDE, heads, 2, 2048)
    one, two = (rank_memory(WIDE, ring, batch, 4096 // batch, ON_CPU) for batch in (1, 2))
    assert one == two


def test_what_is_offloaded_is_not_in_the_gpus_memory() -> None:
    here, offloaded = (rank_memory(WIDE, ParallelSettings(dp_shard=2, offload=size), 8, 128) for size in (0, 1))
    assert (offloaded.weights, offloaded.optimizer) == (here.weights, here.optimizer)
    assert here.moment == offloaded.moment == "the loss"
    assert here.peak - offloaded.peak == here.weights + here.optimizer


def test_the_first_stage_of_a_pipeline_holds_a_microbatch_a_rank() -> None:
    memory = rank_memory(WIDE, ParallelSettings(pp=4, microbatches=8), 8, 128)
    block = Activations(model=WIDE, precision="fp32").block_bytes("none")
    assert memory.activations == 4 * 128 * (block + 4 * WIDE.dim)  # and what goes to the next stage


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pp", [1, 2])
def test_a_stage_has_as_many_parameters_as_it_is_built_with(name: str, pp: int) -> None:
    settings, model = ParallelSettings(pp=pp), MODELS[name]
    for stage in range(pp):
        shareable = built_in(RunSettings(run_id="run", model=model), settings, torch.device("cpu"), None)
        built = stage_of(shareable, stage, pp)
        assert share_of(model, settings, stage).total == sum(p.numel() for p in built.parameters())


def test_a_tied_matrix_is_shared_by_tp() -> None:
    tied = replace(MANY_WORDS, tie_embeddings=True)
    whole, half = (share_of(tied, ParallelSettings(tp=size), 0) for size in (1, 2))
    assert half.embedding == whole.embedding // 2


@pytest.mark.parametrize("name", MODELS)
def test_named_models_are_built_with_the_tensors_of_the_formula(name: str) -> None:
    with torch.device("meta"):
        built = Transformer(MODELS[name])
    assert [(n, tuple(p.shape)) for n, p in built.named_parameters()] == list(shapes(MODELS[name]))
    parts = parameters_by_part(MODELS[name])
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == sum(p.numel() for p in built.parameters())
