"""The most memory of a rank in a step of the built-in trainer, and when. Pure.

A rank of a pipeline has one stage (1F1B, arXiv 2006.09503): stage `r` of `p` holds `p - r` microbatches at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from atoll.node.parallel.settings import ParallelSettings
from atoll.node.plan.activations import FP32_BYTES, ON_GPU, Activations, Kernels
from atoll.node.plan.tensors import ROUTER, shapes_of_block
from atoll.protocol.model_settings import ModelSettings

MOMENTS_BYTES = 8
"""AdamW in fp32, a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """In bytes, of the rank that needs most."""

    weights: int
    gradients: int
    optimizer: int
    """These three are in the host's memory with offload, and no part of the peak."""
    activations: int
    """At the end of the forward pass, with the logits."""
    others: int
    """At the peak, beside these: what is gathered, cast, summed or passing."""
    peak: int
    moment: str
    """Of the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Parameters of a rank's stage, before they are sharded."""

    num_blocks: int
    block: int
    """Of one block, its matrices by `tp`."""
    elsewhere: int = 0
    """Of one block, experts that other ranks of `ep` have: they are never put together here."""
    embedding: int = 0
    norm: int = 0
    head: int = 0
    tied: int = 0
    """Of a head that is the embedding's matrix, on one rank; in a pipeline both ends have it."""

    @property
    def total(self) -> int:
        return self.num_blocks * self.block + self.embedding + self.norm + self.head

    @property
    def block_here(self) -> int:
        return self.block - self.elsewhere

    @property
    def total_here(self) -> int:
        return self.total - self.num_blocks * self.elsewhere

    def cast_bytes(self, precision: str) -> int:
        """Copies of all matrices in bf16, which autocast keeps until its context ends."""
        return 2 * (self.num_blocks * self.block + self.head + self.tied) if precision == "bf16" else 0


def share_of(model: ModelSettings, settings: ParallelSettings, stage: int) -> Share:
    first, last = (number * model.num_layers // settings.pp for number in (stage, stage + 1))
    block = sum(
        prod(shape) // (settings.tp if len(shape) > 1 and name != ROUTER else 1)
        for name, shape in shapes_of_block(model).items()
    )
    experts = 3 * model.num_experts * model.dim * model.ffn_dim // settings.tp
    matrix, is_first, is_last = model.vocab_size * model.dim, stage == 0, stage == settings.pp - 1
    by_tp = matrix // settings.tp
    is_one = model.tie_embeddings and settings.pp == 1
    return Share(
        num_blocks=last - first,
        block=block,
        elsewhere=experts - experts // settings.ep,
        embedding=(by_tp if model.tie_embeddings or settings.sequence_parallel else matrix) if is_first else 0,
        norm=model.dim if is_last else 0,
        head=by_tp if is_last and not is_one else 0,
        tied=by_tp if is_one else 0,
    )


def rank_memory(
    model: ModelSettings, settings: ParallelSettings, batch: int, sequence: int, kernels: Kernels = ON_GPU
) -> RankMemory:
    """Of `batch` sequences a step and site, which `settings` share equally."""
    ring = settings.cp // settings.num_ulysses(model)
    kept = Activations(
        model=model,
        precision=settings.precision,
        is_cast=settings.has_fsdp,
        tp=settings.tp,
        by_positions=settings.sequence_parallel == 1,
        kernels=kernels,
        scored=sequence // ring if kernels is ON_GPU and ring > 1 else 0,
    )
    stages = [
        _Stage(kept, settings, share_of(model, settings, stage), stage=stage, batch_tokens=batch * sequence).memory()
        for stage in range(settings.pp)
    ]
    return max(stages, key=lambda memory: memory.peak)


class _Stage:
    def __init__(
        self, kept: Activations, settings: ParallelSettings, share: Share, *, stage: int, batch_tokens: int
    ) -> None:
        self.settings, self.share, self.kept = settings, share, kept
        self.is_pipeline = settings.pp > 1
        self.is_last = stage == settings.pp - 1
        self.num_parts = settings.num_microbatches if self.is_pipeline else settings.accumulation
        self.tokens = batch_tokens // settings.num_data_ranks // settings.cp // self.num_parts
        """Of a microbatch."""
        self.num_shards = settings.dp_shard * settings.cp
        self.in_flight = min(self.num_parts, settings.pp - stage)
        # torch's AdamW takes all tensors of a GPU at once.
        self.has_foreach = kept.kernels is ON_GPU and not settings.offload

    def memory(self) -> RankMemory:
        local = -(-self.share.total // self.num_shards)
        weights, gradients, optimizer = FP32_BYTES * local, FP32_BYTES * local, MOMENTS_BYTES * local
        if self.settings.zero == 1:
            optimizer //= self.settings.dp_replicate
        here = 0 if self.settings.offload else 1
        activations, moments = self._activations(), self._moments(gradients * here)
        moment = max(moments, key=lambda name: moments[name])
        peak = (weights + optimizer) * here + round(moments[moment])
        others = max(0, peak - (weights + gradients + optimizer) * here - round(activations))
        return RankMemory(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            activations=round(activations),
            others=others,
            peak=peak,
            moment=moment,
        )

    def _moments(self, gradients: int) -> dict[str, float]:
        """Bytes beside weights and optimizer at each moment that may be the peak: between them memory rises or falls
        evenly, as gradients come and activations go."""
        share, kept, settings = self.share, self.kept, self.settings
        gathered, unsharded = self._gathered(), self._unsharded_gradients()
        buckets = FP32_BYTES * share.total if settings.is_replicated_alone and settings.dp_replicate > 1 else 0
        casts = 0 if settings.has_fsdp else share.cast_bytes(settings.precision)
        # Autocast ends with the forward pass, unless it is around a whole schedule; graphs keep what they need.
        casts_kept = casts if self.is_pipeline or settings.checkpointing == "none" else self._head_cast()
        base = gathered + buckets
        before = gradients + unsharded if self.num_parts > 1 else 0  # of the parts before
        outputs = self._logits() * (self.num_parts if self.is_pipeline else 1)
        block = kept.block_bytes(settings.checkpointing) * self.tokens
        again = kept.again_bytes(settings.checkpointing) * self.tokens
        cast_again = self.share.block * 2 if again and casts else 0
        passing = kept.passing_bytes * self.tokens + again + cast_again
        held = self._activations() - self._logits()
        loss = kept.loss_bytes * self.tokens if self.is_last else 0
        of_head = FP32_BYTES * (share.head + share.norm + share.tied) if self.num_parts == 1 else 0
        all_gradients = max(gradients, before) + unsharded * (self.num_parts == 1)
        ended = gradients * (2 if self.has_foreach else 1)
        return {
            "the end of the forward pass": base + before + held + outputs + casts,
            "the loss": base + before + held + outputs + loss + casts_kept,
            "the backward pass of the last block": base + before + of_head + held + outputs + passing + casts_kept,
            "the backward pass of the first block": base + all_gradients + block * self.in_flight + outputs + passing
            + (casts if self.is_pipeline else cast_again),
            "the optimizer's step": ended + buckets + (outputs if self.is_pipeline else 0),
            "the end of the schedule": gradients + 2 * outputs if self.is_pipeline else 0,
        }  # fmt: skip

    def _activations(self) -> float:
        """At the end of the forward pass."""
        of_blocks = self.share.num_blocks * self.kept.block_bytes(self.settings.checkpointing)
        # To the next stage, kept for its gradient.
        sent = 0 if self.is_last else self.kept.stream_bytes
        of_head = self.kept.head_bytes * self.tokens if self.is_last else 0
        return self.in_flight * self.tokens * (of_blocks + sent) + of_head + self._logits()

    def _logits(self) -> float:
        return self.kept.logits_bytes * self.tokens if self.is_last else 0

    def _head_cast(self) -> int:
        is_cast = self.settings.precision == "bf16" and not self.settings.has_fsdp
        return 2 * (self.share.head + self.share.tied) if is_cast and self.is_last else 0

    def _gathered(self) -> int:
        """Parameters that FSDP2 has put together: all where they stay so, else those of two blocks, and of embedding,
        norm and head."""
        settings, share, size = self.settings, self.share, self.kept.itemsize
        if not settings.has_fsdp:
            return 0
        if self.num_shards == 1 or settings.zero == 2 or self.is_pipeline:
            return size * share.total_here
        return size * (min(2, share.num_blocks) * share.block_here + share.embedding + share.norm + share.head)

    def _unsharded_gradients(self) -> int:
        """Before they are summed and sharded: of two blocks at a time, or of all until the last part."""
        settings, share = self.settings, self.share
        if not settings.has_fsdp:
            return 0
        if self.num_parts > 1:
            return FP32_BYTES * share.total_here
        return FP32_BYTES * min(2, share.num_blocks) * share.block_here
