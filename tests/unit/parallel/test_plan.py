"""Plans of runs: bubbles, layouts, syncs, and the example of docs/plan.md."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.passes import parameters_of
from atoll.node.parallel.settings import check_site, parse
from atoll.node.plan.bubbles import bubble_share
from atoll.node.plan.layouts import moved, num_gathers
from atoll.node.plan.plan import Question, RunPlan, plan
from atoll.node.plan.rank_memory import share_of
from atoll.node.plan.syncs import Link, advice, recommended, settings_of
from atoll.node.worker.shared_model import shared_model
from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import ModelSettings, TrainerSettings
from atoll.protocol.settings import RunSettings
from tests.harness.fake_group import fake_rank

PAGE = Path(__file__).parents[3] / "docs" / "plan.md"
QUESTION = Question(
    model="llama3-8b",
    num_gpus=8,
    gpu_bytes=80 * 10**9,
    link=Link(bits_per_s=1e9, rtt_s=0.03, num_sites=4),
    batch=None,
    sequence=None,
    flops=989e12,
    step_s=None,
    precision="bf16",
    every=None,
    strategies=(),
)
SMALL = replace(QUESTION, model="llama-125m")
COSTS = {"FORWARD": 1, "FULL_BACKWARD": 2, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1}


@pytest.fixture(scope="module")
def example() -> RunPlan:
    return plan(QUESTION)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("interleaved-1f1b", schedules.ScheduleInterleaved1F1B),
        ("looped-bfs", schedules.ScheduleLoopedBFS),
        ("interleaved-zero-bubble", schedules.ScheduleInterleavedZeroBubble),
        ("zbv", schedules.ScheduleZBVZeroBubble),
        ("dualpipev", schedules.ScheduleDualPipeV),
    ],
)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 8), (4, 8), (4, 16), (8, 32)])
def test_bubbles_are_those_of_torchs_schedules(name: str, kind: Any, num_ranks: int, num_microbatches: int) -> None:
    orders = _orders(kind, num_ranks, num_microbatches)
    assert _waited(orders, num_ranks) == pytest.approx(bubble_share(name, num_ranks, num_microbatches))


def _orders(kind: Any, num_ranks: int, num_microbatches: int) -> list[list[Any]]:
    """What each rank does, one after the other, by torch: its tables need no processes."""
    made = object.__new__(kind)
    made.pp_group_size, made._n_microbatches, made.n_local_stages = num_ranks, num_microbatches, 2
    made._num_stages, made._stages = 2 * num_ranks, [None, None]
    made.num_stages, made.n_microbatches = 2 * num_ranks, num_microbatches  # as zbv names them
    made.number_of_rounds = max(1, num_microbatches // num_ranks)
    made.microbatches_per_round = num_microbatches // made.number_of_rounds
    table = {rank: made._calculate_single_rank_operations(rank) for rank in range(num_ranks)}
    if hasattr(made, "_add_bubbles_to_actions"):
        made.pipeline_order = table
        table = made._add_bubbles_to_actions(2 * num_ranks)
    return [[action for action in table[rank] if action is not None] for rank in range(num_ranks)]


def _waited(orders: list[list[Any]], num_ranks: int) -> float:
    """The share of time that ranks wait, where each begins an action as soon as what it needs is there."""
    ended: dict[tuple[str, int, int], float] = {}
    now, busy, left = [0.0] * num_ranks, [0.0] * num_ranks, [list(order) for order in orders]

    def ready(action: Any) -> float | None:
        stage, part = action.stage_index, action.microbatch_index
        match action.computation_type.name:
            case "FORWARD":
                return 0.0 if stage == 0 else ended.get(("forward", stage - 1, part))
            case "BACKWARD_WEIGHT":
                return ended.get(("backward", stage, part))
        after = 0.0 if stage == 2 * num_ranks - 1 else ended.get(("backward", stage + 1, part))
        own = ended.get(("forward", stage, part))
        return None if own is None or after is None else max(own, after)

    while any(left):
        before = sum(map(len, left))
        for rank in range(num_ranks):
            while left[rank]:
                actions = list(getattr(left[rank][0], "sub_actions", None) or [left[rank][0]])
                times = [at for action in actions if (at := ready(action)) is not None]
                if len(times) < len(actions):
                    break
                cost = sum(COSTS[action.computation_type.name] for action in actions)
                now[rank] = max(now[rank], *times) + cost
                busy[rank] += cost
                for action in actions:
                    kind = "forward" if action.computation_type.name == "FORWARD" else "backward"
                    if action.computation_type.name != "BACKWARD_WEIGHT":
                        ended[kind, action.stage_index, action.microbatch_index] = now[rank]
                del left[rank][0]
        assert sum(map(len, left)) < before, "each waits for another"
    return 1 - max(busy) / max(now)


def test_pipelines_of_one_stage_a_rank() -> None:
    assert bubble_share("gpipe", 4, 12) == bubble_share("1f1b", 4, 12) == pytest.approx(3 / 15)


@pytest.mark.parametrize(("p", "m", "percent"), [(2, 8, 2.04), (4, 16, 3.03), (8, 32, 3.52), (4, 8, 5.88)])
def test_zbv_waits_too(p: int, m: int, percent: float) -> None:
    """An optimizer's step after a global norm waits for all ranks, so that ends of steps do not overlap."""
    assert 100 * bubble_share("zbv", p, m) == pytest.approx(percent, abs=0.005)


def test_layouts_use_all_gpus_and_can_be_said(example: RunPlan) -> None:
    for found in example.layouts:
        settings = found.settings
        assert settings.dp_replicate * settings.dp_shard * settings.cp * settings.tp * settings.pp == 8
        assert parse(str(settings)) == settings
        assert found.fits == (found.memory.peak <= example.site.usable_bytes)
    fitting = [found.fits for found in example.layouts]
    assert fitting == sorted(fitting, reverse=True)
    assert "dp_shard=8" in [
        str(replace(found.settings, checkpointing="none", precision="fp32")) for found in example.layouts
    ]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"batch": 4},
        {"sequence": 131_072, "batch": 1},
        {"sequence": 131_071, "batch": 2},
        {"model": "nano", "batch": 3},
        {"model": "llama3-1b", "num_gpus": 7, "batch": 5},
        {"model": "llama-125m", "num_gpus": 12, "batch": 1},
        {"model": "llama3-70b", "num_gpus": 64},
        {"model": "llama3-70b", "num_gpus": 512, "batch": 64, "sequence": 32_768},
        {"model": "mixtral-8x7b", "num_gpus": 16, "batch": 8, "sequence": 65_536},
        {"model": "deepseek-moe-16b", "num_gpus": 16, "batch": 1},
    ],
    ids=str,
)
def test_a_node_takes_each_layout(change: dict[str, Any]) -> None:
    found = plan(replace(QUESTION, **change))
    trainer = TrainerSettings(batch_size=found.site.batch, sequence=found.site.sequence)
    run = RunSettings(run_id="run", model=found.settings, trainer=trainer)
    for layout in found.layouts:
        check_site(str(layout.settings), found.site.num_gpus, run)


def test_ranks_share_sequences_where_there_are_too_few(example: RunPlan) -> None:
    assert {found.settings.cp for found in example.layouts} == {1}
    few = plan(replace(QUESTION, model="nano", batch=3))
    assert [str(found.settings) for found in few.layouts] == [
        "cp=8,precision=bf16",
        "cp=4,pp=2,microbatches=3,precision=bf16",
    ]
    assert "sends keys and values between GPUs" in few.reason
    four = plan(replace(QUESTION, batch=4))
    assert {found.settings.cp for found in four.layouts if found.settings.tp * found.settings.pp == 1} == {2}
    assert str(four.layouts[0].settings) == "dp_replicate=2,dp_shard=2,cp=2,precision=bf16"


def test_ranks_share_sequences_that_are_too_long_for_one() -> None:
    long = plan(replace(QUESTION, sequence=131_072, batch=8))
    assert long.settings.max_sequence == 131_072
    best = long.layouts[0]
    assert (best.fits, best.settings.cp) == (True, 8)
    assert not any(found.fits for found in long.layouts if found.settings.cp == 1)
    assert all(found.fits for found in long.layouts if found.settings.cp > 1)
    small = plan(replace(QUESTION, sequence=131_072, gpu_bytes=24 * 10**9)).layouts
    assert (small[0].fits, small[0].settings.cp) == (False, 8), "needs least"
    assert {found.settings.cp for found in small[1:]} == {1}


def test_heads_are_exchanged_within_a_host() -> None:
    (best, *_) = plan(replace(SMALL, num_gpus=12, batch=1)).layouts
    assert str(best.settings) == "cp=12,cp_ulysses=4,precision=bf16", "of twelve heads"


@pytest.mark.parametrize(
    ("layout", "passes", "of_keys"),
    [
        # Seven eighths of q, k, v and o, of which k and v are a quarter as wide each.
        ("cp=8", 2, (0, 7 / 8 * 2.5)),
        ("cp=8,checkpointing=full", 3, (0, 7 / 8 * 2.5)),
        # Three times k and v in each pass, and their gradients in fp32 four times.
        ("cp=4,cp_ulysses=1", 2, (0.5 * (2 * 3 + 4 * 2), 0)),
        # Of half the heads: two places of two ranks each.
        ("cp=4,tp=2,cp_ulysses=2", 2, (0.25 * (2 * 1 + 2 * 2), 1 / 2 * 2.5 / 2)),
    ],
)
def test_keys_and_values_travel(layout: str, passes: int, of_keys: tuple[float, float]) -> None:
    """Beside the computing by rings; waited for where heads are exchanged."""
    settings = replace(parse(layout), precision="bf16")
    site = replace(plan(QUESTION).site, num_gpus=settings.cp * settings.tp, batch=1, sequence=16_384)
    row = 16_384 // settings.cp * 4096 * 2
    around, exchanged = of_keys
    weights = max(1, share_of(site.model, settings, 0).total)
    summed = passes * 4 * (settings.tp - 1) / settings.tp
    of_data, of_activations = moved(site, settings)
    # Parameters in bf16, in the forward and the backward pass, and gradients in fp32.
    assert of_data == pytest.approx((2 * 2 + 4) * weights * (settings.cp - 1) / settings.cp + 32 * row * around)
    assert of_activations == pytest.approx(32 * row * (summed + passes * exchanged))


class Gathers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The sizes of what FSDP2 gathers, in bytes."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.num_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("layout", "times"),
    [
        ("dp_shard=2", 2),
        ("dp_shard=2,accumulation=4", 8),
        ("dp_shard=2,checkpointing=full", 2),
        ("dp_shard=2,zero=2,accumulation=4", 4),
        ("dp_shard=2,precision=bf16", 2),
    ],
)
def test_parameters_are_gathered_as_often_as_by_torch(layout: str, times: int) -> None:
    settings = parse(layout)
    run = RunSettings(run_id="run", model=ModelSettings(dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=24))
    tokens = torch.zeros(8, 4, dtype=torch.int64)
    with fake_rank(0, 2):
        cpu = torch.device("cpu")
        passes = shared_model(run, settings, Mesh.of_site(cpu, settings), cpu)
        num_parameters = sum(parameter.numel() for parameter in parameters_of(passes))
        with Gathers() as found:  # type: ignore[no-untyped-call]
            passes(tokens, tokens)
    itemsize = 2 if settings.precision == "bf16" else 4
    assert found.num_bytes == times * itemsize * num_parameters
    assert num_gathers(settings) == times


@pytest.mark.parametrize(
    ("layout", "times"),
    [
        ("dp_shard=4,accumulation=1", 2),
        ("dp_shard=4,accumulation=4", 8),
        ("dp_shard=4,zero=2,accumulation=4", 4),
        # As counted by hand in four processes of dp_shard=2,pp=2, at either stage.
        ("dp_shard=4,pp=2,microbatches=4", 5),
        ("dp_shard=4,pp=2,microbatches=8", 9),
        ("dp_shard=4,zero=2,pp=2,microbatches=8", 1),
    ],
)
def test_a_gpu_sends_parameters_each_time_that_they_are_gathered(layout: str, times: int) -> None:
    """And gradients once."""
    settings = parse(layout)
    site = replace(plan(QUESTION).site, num_gpus=4 * settings.pp, batch=64)
    largest = max(share_of(site.model, settings, stage).total for stage in range(settings.pp))
    of_data, of_activations = moved(site, settings)
    assert of_data == pytest.approx((times + 1) * 4 * largest * 3 / 4)
    assert of_activations == 0


def test_tensor_parallelism_stays_within_a_host() -> None:
    assert max(found.settings.tp for found in plan(replace(QUESTION, num_gpus=64, batch=64)).layouts) == 8


def test_a_model_that_fits_everywhere_is_replicated() -> None:
    small = plan(SMALL)
    assert small.layouts[0].settings.num_data_ranks == 8
    assert small.layouts[0].settings.checkpointing == "none"


def test_a_mixture_computes_with_what_a_token_goes_through() -> None:
    found = plan(replace(QUESTION, model="mixtral-8x7b", num_gpus=16))
    assert found.site.compute_s == pytest.approx(
        6 * (12.88e9 + 32 * 4096 * 4096) * 32 * 4096 / (16 * 989e12 * 0.4), rel=1e-3
    )
    assert found.document()["parameters"]["active"] == 12_879_925_248
    by_ep = {p.settings.ep: p for p in found.layouts if p.settings.dp_shard == 16 and p.settings.tp == 1}
    assert sorted(by_ep) == [1, 2, 4, 8], "as many as divide the experts, within a host"
    assert by_ep[1].moved_bytes > by_ep[8].moved_bytes, "tokens travel in place of experts"
    assert by_ep[8].step_s > by_ep[1].step_s, "and are waited for"
    assert by_ep[8].memory.peak < by_ep[1].memory.peak
    shared = [p for p in found.layouts if p.settings.ep > 1]
    assert "selective" not in {p.settings.checkpointing for p in shared}
    for layout in shared:
        assert parse(str(layout.settings)) == layout.settings


def test_attention_to_long_sequences_takes_most_of_a_step(example: RunPlan) -> None:
    long = plan(replace(QUESTION, sequence=131_072))
    assert example.site.compute_s == pytest.approx((48.18e9 + 3.22e9) * 65_536 / (8 * 989e12 * 0.4), rel=1e-3)
    assert long.site.compute_s == pytest.approx((48.18e9 + 103.08e9) * 32 * 65_536 / (8 * 989e12 * 0.4), rel=1e-3)


def test_what_does_not_fit_says_so() -> None:
    found = plan(replace(QUESTION, model="llama3-70b", gpu_bytes=24 * 10**9))
    assert not found.layouts[0].fits
    assert "none fits" in found.reason


def test_what_costs_time_is_offloaded_only_where_nothing_else_fits(example: RunPlan) -> None:
    assert example.layouts[0].settings.offload == example.offloaded_bytes == 0
    kept = [found for found in example.layouts if found.fits and not found.settings.offload]
    assert example.layouts[: len(kept)] == kept
    large = plan(replace(QUESTION, model="llama3-70b"))
    best = large.layouts[0]
    assert best.settings.offload == 1
    assert best.memory.peak < best.memory.weights + best.memory.gradients
    assert large.offloaded_bytes == pytest.approx(16 * large.num_parameters, rel=0.01)
    assert "does AdamW's steps on the CPU" in large.reason
    # Their parameters are in the host's memory, where they read in place; GPUs are given copies.
    assert large.document()["node"]["reads_in_place"] is True
    assert large.node.footprint.shared_bytes == pytest.approx(4 * large.num_parameters, rel=0.01)
    assert example.document()["node"]["reads_in_place"] is False
    assert example.document()["node"]["shared_bytes"] == pytest.approx(8 * example.num_parameters, rel=0.01)


def test_positions_are_divided_where_that_helps(example: RunPlan) -> None:
    chosen = {found.settings.sequence_parallel for found in example.layouts}
    assert chosen == {0, 1}
    odd = plan(replace(QUESTION, sequence=4095))
    assert {found.settings.sequence_parallel for found in odd.layouts} == {0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "llama3-9b"}, 'did you mean "llama3-8b"'),
        ({"strategies": ("dilocco",)}, 'did you mean "diloco"'),
        ({"strategies": ("streaming",), "every": 2}, "sync.overlap_steps"),
    ],
)
def test_what_makes_no_run_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan(replace(QUESTION, **change))


def test_a_strategy_that_cannot_have_this_h_is_left_out_of_all() -> None:
    names = {sync.name for sync in plan(replace(SMALL, every=2)).syncs}
    assert "streaming" not in names
    assert {"diloco", "adamw"} <= names


def test_waiting_at_the_recommended_h_is_the_goal() -> None:
    slow = replace(SMALL, step_s=0.1, strategies=("diloco-int4",))
    (once,) = plan(slow).syncs
    (at_it,) = plan(replace(slow, every=once.enough_every)).syncs
    (below,) = plan(replace(slow, every=once.enough_every - 1)).syncs
    assert at_it.utilization >= 0.95 > below.utilization
    assert f"H = {once.enough_every}" in advice(once) or once.utilization >= 0.95


def test_one_strategy_is_recommended_with_its_h_and_the_reason() -> None:
    fast = plan(replace(SMALL, step_s=1000.0)).syncs
    best, every, why = recommended(fast)
    assert every == best.every == min(sync.every for sync in fast if sync.every > 1)
    assert "the shortest H" in why
    best, every, why = recommended(plan(replace(SMALL, step_s=0.1, strategies=("diloco-int4",))).syncs)
    assert (best.name, every) == ("diloco-int4", 100)
    assert "no step waits" in why
    best, every, why = recommended(plan(replace(SMALL, step_s=0.001, strategies=("sign1-ef",))).syncs)
    assert every == best.enough_every > best.every
    assert "nearest" in why


def test_with_the_tau_that_is_said_no_step_waits() -> None:
    settings = settings_of("diloco-int4", 4, None)
    (waits,) = plan(replace(SMALL, step_s=0.1, strategies=("diloco-int4",))).syncs
    assert settings.sync.every >= waits.enough_overlap_steps > 0
    assert waits.utilization < 1
    assert waits.sync_s <= 0.1 * waits.enough_overlap_steps < waits.sync_s + 0.1


def test_a_site_sends_and_fragments_share_the_link(example: RunPlan) -> None:
    by_name = {sync.name: sync for sync in example.syncs}
    plain, parts = by_name["diloco-int4"], by_name["streaming"]
    assert plain.sent_bytes == pytest.approx(2 * 3 / 4 * plain.bits_up / 8 * example.num_parameters)
    assert parts.sync_s == pytest.approx((plain.sync_s - 0.045) / 4 + 0.045)
    sparse = by_name["sparseloco"]
    assert sparse.bits_down == pytest.approx(4 * sparse.bits_up, rel=0.01)  # the contributions of four sites


def test_the_page_has_the_example(example: RunPlan) -> None:
    best = example.layouts[0]
    by_name = {sync.name: sync for sync in example.syncs}
    int4, needs = by_name["diloco-int4"], example.node
    for words in (
        f"{example.num_parameters:,} parameters",
        f"--parallel {best.settings}",
        f"{best.memory.weights / 2**30:.2f} GiB of weights",
        f"{best.memory.activations / 2**30:.2f} GiB of activations",
        f"{best.memory.peak / 2**30:.2f} GiB at {best.memory.moment}",
        f"a step takes {example.step_s:.3f} s",
        f"{int4.sent_bytes / 1e9:.2f} GB",
        f"{int4.sync_s:.1f} s",
        f"{100 * int4.utilization:.1f} %",
        f"H = {int4.enough_every}",
        f"overlap_steps = {int4.enough_overlap_steps}",
        f"{needs.footprint.memory_bytes / 2**30:.1f} GiB of memory",
        f"{needs.footprint.disk_bytes / 2**30:.1f} GiB of disk",
        f"{needs.written_bytes / 2**30:.1f} GiB written",
    ):
        assert words in " ".join(PAGE.read_text(encoding="utf-8").split()), words


def test_the_document_is_json(example: RunPlan) -> None:
    document = json.loads(json.dumps(example.document()))
    assert document["recommended"]["parallel"] == str(example.layouts[0].settings)
    assert len(document["layouts"]) == len(example.layouts)
    assert [sync["sent_bytes"] for sync in document["syncs"]] == [sync.sent_bytes for sync in example.syncs]
