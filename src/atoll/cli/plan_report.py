"""A plan of a run as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.cli.words import count
from atoll.node.dataplane.footprint import MAX_CHECKPOINTS
from atoll.node.plan.layouts import RECOMPUTED, LayoutPlan
from atoll.node.plan.plan import ASSUMED, RunPlan
from atoll.node.plan.syncs import advice, recommended
from atoll.protocol.model_settings import MODELS
from atoll.protocol.text import byte_count


def text(plan: RunPlan) -> str:
    blocks = (_model(plan), _layouts(plan), _pipelines(plan), _node(plan), _syncs(plan), _assumed())
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _model(plan: RunPlan) -> list[str]:
    parts = ", ".join(f"{name} {count(number)}" for name, number in plan.parameters.items())
    model, own = plan.settings, MODELS[plan.question.model].max_sequence
    active = f", {count(plan.num_active)} for a token" if model.num_experts else ""
    shared = f", and {model.num_shared_experts} for all tokens" if model.num_shared_experts else ""
    experts = f", {model.num_experts} experts, {model.experts_per_token} for a token{shared}"
    return [
        f"model {plan.question.model}: {count(plan.num_parameters)} parameters{active}",
        f"  {parts}" + ("; the head is the embedding" if model.tie_embeddings else ""),
        f"  dim {model.dim}, {model.num_layers} layers, {model.num_heads} heads, {model.num_kv_heads} of keys and "
        f"values, ffn {model.ffn_dim}, vocabulary {model.vocab_size}{experts if model.num_experts else ''}",
        *(
            [f"  with max_sequence = {model.max_sequence} in place of its own {own}"]
            if model.max_sequence > own
            else []
        ),
    ]


def _layouts(plan: RunPlan) -> list[str]:
    site, best = plan.site, plan.layouts[0]
    rows = [("layout", "weights", "gradients", "AdamW", *_by_name("act. {}"), *_by_name("peak {}"), "bubble", "fits")]
    rows += [_row(layout) for layout in plan.layouts]
    return [
        f"inside a site: {_number(site.num_gpus, 'GPU')} of {byte_count(site.gpu_bytes)}, "
        f"{byte_count(site.usable_bytes)} for training; {_number(site.batch, 'sequence')} of "
        f"{_number(site.sequence, 'token')} a step, {site.precision}",
        f"  take --parallel {best.settings}" if best.fits else f"  does not fit; the least is {best.settings}",
        f"  {plan.reason}",
        f"  its peak is {byte_count(best.memory.peak)}, at {best.memory.moment}; a step takes {plan.step_s:.2f} s",
        f"  bytes a parameter of the model, on its fullest GPU: {_each(plan, best.memory.weights)} weights, "
        f"{_each(plan, best.memory.gradients)} gradients, {_each(plan, best.memory.optimizer)} AdamW, "
        f"{_each(plan, best.memory.activations)} activations",
        "  memory of the fullest GPU, in GiB (*N: with accumulation=N, +seq: sequence_parallel=1, +off: offload=1):",
        *_table(rows),
    ]


def _number(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _by_name(form: str) -> Iterator[str]:
    return (form.format(name) for name in RECOMPUTED)


def _row(layout: LayoutPlan) -> tuple[str, ...]:
    memory, settings = layout.by_checkpointing, layout.settings
    sizes = {
        name: size
        for name in ("dp_replicate", "dp_shard", "cp", "ep", "tp", "pp")
        if (size := getattr(settings, name)) > 1
    }
    fits = settings.checkpointing if layout.fits else "no"
    fits += f" *{settings.accumulation}" if layout.fits and settings.accumulation > 1 else ""
    fits += " +seq" * settings.sequence_parallel + " +off" * settings.offload
    first = memory["none"]
    return (
        ",".join(f"{name}={size}" for name, size in sizes.items()) or "one GPU",
        *(_gib(size) for size in (first.weights, first.gradients, first.optimizer)),
        *(_gib(memory[name].activations) for name in RECOMPUTED),
        *(_gib(memory[name].peak) for name in RECOMPUTED),
        f"{100 * layout.bubble:.0f} %" if settings.pp > 1 else "-",
        fits,
    )


def _each(plan: RunPlan, num_bytes: float) -> str:
    """Bytes a parameter."""
    return f"{num_bytes / plan.num_parameters:.2f}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"


def _pipelines(plan: RunPlan) -> list[str]:
    if not plan.bubbles:
        return []
    rows = [("ranks", *next(iter(plan.bubbles.values())))]
    rows += [(str(num), *(f"{100 * share:.1f} %" for share in by.values())) for num, by in plan.bubbles.items()]
    return ["a pipeline's bubble by pp_schedule, with four microbatches a rank:", *_table(rows)]


def _node(plan: RunPlan) -> list[str]:
    needs, node = plan.node.footprint, plan.node
    return [
        f"the node of a site, with {plan.node_of}:",
        f"  memory   {byte_count(needs.memory_bytes)}: {byte_count(needs.shared_bytes)} shared with the workers "
        f"({needs.shared_in_words}), {byte_count(needs.outer_bytes)} outer state (mapped), "
        f"{byte_count(needs.sync_bytes)} held as a reducer, "
        f"{byte_count(needs.thread_bytes)} that threads compute in",
        f"           and {byte_count(plan.copies_bytes)} for the ranks' copies of the inner optimizer",
        *(
            [f"           and {byte_count(plan.offloaded_bytes)} of the ranks' own, with offload=1"]
            if plan.offloaded_bytes
            else []
        ),
        f"  disk     {byte_count(needs.disk_bytes)} at the most: "
        + ", ".join(f"{byte_count(size)} {what}" for what, size in needs.disk_parts),
        f"           and {byte_count(MAX_CHECKPOINTS * plan.copies_bytes)} for checkpoints of the inner optimizer",
        f"  written  {byte_count(node.written_bytes)} a sync: "
        + ", ".join(f"{byte_count(size)} {what}" for what, size in node.written),
        f"  bytes a parameter: {_each(plan, needs.memory_bytes)} memory ({_each(plan, needs.shared_bytes)} shared, "
        f"{_each(plan, needs.outer_bytes)} outer state, {_each(plan, needs.sync_bytes)} as a reducer), "
        f"{_each(plan, needs.disk_bytes)} disk, {_each(plan, node.written_bytes)} written a sync",
    ]


def _syncs(plan: RunPlan) -> list[str]:
    link = plan.question.link
    if not plan.syncs:
        return ["syncs: one site sends nothing to others, so no strategy is recommended"]
    rows = [("strategy", "H", "bits up", "bits down", "sent", "a sync", "in steps", "waiting", "tau", "H for 95 %")]
    rows += [
        (
            sync.name,
            str(sync.every) + (f"/{sync.fragments}" if sync.fragments > 1 else ""),
            f"{sync.bits_up:.3g}",
            f"{sync.bits_down:.3g}",
            byte_count(sync.sent_bytes),
            f"{sync.sync_s:.3g} s",
            f"{100 * sync.utilization:.1f} %",
            f"{100 * sync.utilization_waiting:.1f} %",
            str(sync.enough_overlap_steps or "-"),
            str(sync.enough_every) if sync.every > 1 else "-",
        )
        for sync in plan.syncs
    ]
    best, every, why = recommended(plan.syncs)
    tau = best.enough_overlap_steps if every == best.every else 0
    overlap = f" and sync.overlap_steps = {tau}" if tau else ""
    return [
        f"syncs of {link.num_sites} sites over {link.bits_per_s / 1e6:g} Mbit/s, steps of {plan.step_s:.3g} s "
        "(in steps: share of the time; waiting: without overlap; tau: overlap_steps with which none waits):",
        f"  take {best.name} with H = {every}{overlap}: {why}",
        *_table(rows),
        *(f"  {sync.name}: {advice(sync)}" for sync in plan.syncs if sync.every > 1),
    ]


def _assumed() -> list[str]:
    return ["assumed (docs/plan.md):", *(f"  {line}" for line in ASSUMED)]


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        right = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield f"    {first.ljust(widths[0])}  {'  '.join(right)}"
