"""The layouts of a site that use exactly its GPUs: memory of a rank, what a step loses, and which one is best. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from atoll.node.parallel.settings import ParallelSettings, check_batch, check_model, check_sequence
from atoll.node.plan.bubbles import bubble_share
from atoll.node.plan.rank_memory import RankMemory, rank_memory, share_of
from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import ModelSettings

GPUS_OF_HOST = 8
RESERVE = 0.1
"""Of a GPU's memory: CUDA's context, NCCL's buffers, and what the allocator cannot use."""
RECOMPUTED = {"none": 0.0, "selective": 0.05, "full": 1 / 3}
"""By checkpointing: computed again, as a share of a step. selective: norms, SiLU and rotations, which are bound by
memory; full: a forward pass, of three."""
FABRIC_BYTES_PER_S = 300e9
"""Between GPUs of a host, each way."""
HOST_LINK_BYTES_PER_S = 50e9
"""Between a GPU and its host, each way (docs/decisions/0051)."""
HOST_BYTES_PER_S = 20e9
"""Of the host's memory, of each rank: a guess. AdamW reads weights, gradients and two moments, and writes three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a layout is for."""

    model: ModelSettings
    num_gpus: int
    gpu_bytes: int
    batch: int
    """Sequences a step."""
    sequence: int
    precision: str
    compute_s: float
    """Of a step, without what a layout loses."""

    @property
    def usable_bytes(self) -> int:
        """Of a GPU."""
        return round(self.gpu_bytes * (1 - RESERVE))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    settings: ParallelSettings
    """With the checkpointing and accumulation that lose least among those that fit; if none does, that need least.
    Sequence parallelism and offload only where they help with that."""
    memory: RankMemory
    by_checkpointing: dict[str, RankMemory]
    """Without accumulation."""
    fits: bool
    bubble: float
    """Share of a step."""
    moved_bytes: int
    """That a GPU sends to others of the site in a step."""
    step_s: float

    @property
    def by_layer(self) -> tuple[int, int]:
        """What layouts have alike that are compared by `cp`."""
        return self.settings.tp, self.settings.pp

    @property
    def loss(self) -> tuple[float, ...]:
        """What is less is better: it fits, without offload, without recomputing all; else the peak."""
        if not self.fits:
            return 1, self.memory.peak
        return 0, self.settings.offload, self.settings.checkpointing == "full"


def layouts(site: Site) -> list[LayoutPlan]:
    """Those that fit first, and of these the fastest, those with offload behind all others; of equals the one whose
    GPUs send least.

    Of those with the same `tp` and `pp`, ranks share a sequence (`cp`) where that fits and with fewer of them it
    would not, or only by offload or recomputing all; also where nothing fits and it needs least of all.
    """
    planned = sorted((_planned(site, settings) for settings in _dimensions(site)), key=lambda plan: plan.settings.cp)
    least: dict[tuple[int, int], tuple[float, ...]] = {}
    found: list[LayoutPlan] = []
    for _, group in itertools.groupby(planned, key=lambda plan: plan.settings.cp):
        better = [plan for plan in group if plan.settings.cp == 1 or plan.loss < least.get(plan.by_layer, (2,))]
        for plan in better:
            least[plan.by_layer] = min(plan.loss, least.get(plan.by_layer, plan.loss))
        found += better
    found.sort(key=lambda plan: (*plan.loss[:2], round(plan.step_s, 9), plan.moved_bytes))
    return [plan for plan in found if plan.fits or plan.settings.cp == 1 or plan is found[0]]


def reason(plans: list[LayoutPlan]) -> str:
    """Why the first one is best."""
    best, fitting = plans[0], [plan for plan in plans if plan.fits]
    if not best.fits:
        return "none fits: more GPUs, a smaller batch or shorter sequences; this one needs least"
    losses = [
        text
        for text, is_so in (
            (f"computes again ({best.settings.checkpointing})", best.settings.checkpointing != "none"),
            (f"waits for {100 * best.bubble:.0f} % in the pipeline", best.bubble > 0),
            ("sums activations between GPUs", best.settings.tp > 1),
            ("sends keys and values between GPUs", best.settings.cp > 1),
            ("sends tokens to experts of other GPUs", best.settings.ep > 1),
            ("does AdamW's steps on the CPU", best.settings.offload == 1),
        )
        if is_so
    ]
    lost = "loses nothing to recomputing, bubbles or activations that travel" if not losses else " and ".join(losses)
    others = f"the fastest of {len(fitting)} that fit; " if len(fitting) > 1 else "the only one that fits; "
    return f"{others}it {lost}; a GPU sends {best.moved_bytes / 1e9:.1f} GB a step"


def _dimensions(site: Site) -> Iterator[ParallelSettings]:
    """Tensor and expert parallelism stay within a host, as do ranks that exchange heads; rings need not."""
    kv_heads = site.model.num_kv_heads
    for tp in _divisors(site.num_gpus):
        if tp > GPUS_OF_HOST or GPUS_OF_HOST % tp:
            continue
        for pp, cp in itertools.product(_divisors(site.num_gpus // tp), repeat=2):
            replicas, rest = divmod(site.num_gpus, tp * pp * cp)
            of_all = ParallelSettings(cp=cp, tp=tp, pp=pp, precision=site.precision)
            if math.gcd(cp, kv_heads // tp) * tp > GPUS_OF_HOST:
                of_all = replace(of_all, cp_ulysses=math.gcd(cp, kv_heads // tp, GPUS_OF_HOST // tp))
            for dp_shard in _divisors(replicas) if not rest else ():
                yield from _with_experts(site, replace(of_all, dp_replicate=replicas // dp_shard, dp_shard=dp_shard))


def _with_experts(site: Site, settings: ParallelSettings) -> Iterator[ParallelSettings]:
    """By each number of ranks that can share experts; none if model and batch cannot be shared so."""
    if settings.pp > 1:
        share = site.batch // settings.num_data_ranks
        parts = [number for number in _divisors(share) if settings.pp <= number <= 4 * settings.pp]
        settings = replace(settings, microbatches=max(parts, default=0))
    for ep in _divisors(settings.dp_shard * settings.cp):
        shared = replace(settings, ep=ep)
        try:
            check_model(shared, site.model)
            check_batch(shared, site.batch)
        except ConfigError:
            continue
        if ep * settings.tp <= GPUS_OF_HOST:
            yield shared


def _planned(site: Site, settings: ParallelSettings) -> LayoutPlan:
    is_dense = not site.model.num_experts
    parts = [1] if settings.pp > 1 else _divisors(site.batch // settings.num_data_ranks)
    tries = [
        replace(
            settings, checkpointing=name, accumulation=accumulation, sequence_parallel=by_positions, offload=offload
        )
        for offload in ((0, 1) if settings.has_fsdp and is_dense else (0,))
        for by_positions in ((0, 1) if is_dense and _shares_positions(site, settings) else (0,))
        for accumulation in parts
        for name in RECOMPUTED
    ]
    memory = {tried: rank_memory(site.model, tried, site.batch, site.sequence) for tried in tries}
    allowed = [tried for tried in tries if settings.ep == 1 or tried.checkpointing != "selective"]
    fitting = [tried for tried in allowed if memory[tried].peak <= site.usable_bytes]
    bubble = bubble_share(settings.pp_schedule, settings.pp, settings.num_microbatches) if settings.pp > 1 else 0.0
    if fitting:
        chosen = min(
            fitting,
            key=lambda tried: (
                tried.offload, RECOMPUTED[tried.checkpointing], tried.accumulation, tried.sequence_parallel
            ),
        )  # fmt: skip
    else:
        chosen = min(allowed, key=lambda tried: memory[tried].peak)
    busy_s = site.compute_s * (1 + RECOMPUTED[chosen.checkpointing]) / (1 - bubble)
    of_data, of_activations = moved(site, chosen)
    return LayoutPlan(
        settings=chosen,
        memory=memory[chosen],
        by_checkpointing={name: memory[replace(chosen, checkpointing=name, accumulation=1)] for name in RECOMPUTED},
        fits=bool(fitting),
        bubble=bubble,
        moved_bytes=of_data + of_activations,
        step_s=busy_s + of_activations / FABRIC_BYTES_PER_S + _offload_s(chosen, memory[chosen].weights),
    )


def _shares_positions(site: Site, settings: ParallelSettings) -> bool:
    try:
        check_sequence(replace(settings, sequence_parallel=1), site.sequence)
    except ConfigError:
        return False
    return settings.tp > 1


def _offload_s(settings: ParallelSettings, weights_bytes: int) -> float:
    """Weights to the GPU, gradients back, and AdamW on the CPU; none of it beside the computing."""
    if not settings.offload:
        return 0.0
    return weights_bytes * ((num_gathers(settings) + 1) / HOST_LINK_BYTES_PER_S + 7 / HOST_BYTES_PER_S)


def num_gathers(settings: ParallelSettings) -> int:
    """By FSDP2, of each parameter in a step. With zero=3 it is given up after each forward and backward pass; in a
    pipeline not after a backward pass, so that a forward pass between two of them has it already (1F1B)."""
    if not settings.is_sharded or settings.zero != 3:
        return settings.accumulation
    return settings.num_microbatches + 1 if settings.pp > 1 else 2 * settings.accumulation


def moved(site: Site, settings: ParallelSettings) -> tuple[int, int]:
    """Of what travels while a rank computes: parameters in the precision of a step, each time that they are gathered,
    and their gradients once, in fp32 (ZeRO, arXiv 1910.02054, section 7); and a ring's keys and values, each pass, and
    their gradients once, in fp32 (arXiv 2310.01889). And of activations, for which it waits: sums, two in the forward
    pass of a block and two in the backward pass (Megatron-LM, arXiv 1909.08053, section 3), three with shared experts,
    by rings; tokens to experts and back; and heads of queries, keys, values and outputs for positions (Ulysses, arXiv
    2309.14509)."""

    def ring(num_ranks: int) -> float:
        return (num_ranks - 1) / num_ranks

    shards = settings.dp_shard * settings.cp
    shares = [share_of(site.model, settings, stage) for stage in range(settings.pp)]
    largest, model = max(shares, key=lambda share: share.total), site.model
    of_experts = largest.num_blocks * largest.elsewhere // (settings.ep - 1) if settings.ep > 1 else 0
    sharded = ring(shards) * (largest.total_here - of_experts) + ring(shards // settings.ep) * of_experts
    replicated = 2 * ring(settings.dp_replicate) * 4 * largest.total / shards
    passes = 3 if settings.checkpointing == "full" else 2
    itemsize = 2 if settings.precision == "bf16" else 4
    row = site.batch * site.sequence // settings.num_data_ranks // settings.cp * model.dim * itemsize
    summed = (2 + bool(model.num_shared_experts)) * 2 * ring(settings.tp)
    exchanged = 2 * ring(settings.ep) * model.experts_per_token
    blocks = -(-model.num_layers // settings.pp)
    gathered = num_gathers(settings) * itemsize
    ulysses, again = settings.num_ulysses(model), settings.checkpointing != "none"
    pair = 2 * model.num_kv_heads / model.num_heads
    to_heads = (2 + again) * ring(ulysses) * (2 + pair) / settings.tp
    places = settings.cp // ulysses
    round_ring = pair / settings.tp * ((2 + again) * (places - 1) + places * 4 / itemsize if places > 1 else 0)
    return (
        round((gathered + 4) * sharded + replicated + blocks * row * round_ring),
        round(blocks * row * (passes * (summed + exchanged) + to_heads)),
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
