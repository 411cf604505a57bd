"""The run's metrics: what they are called, what they say, and that nobody outside adds series."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, TypeVar

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from atoll.coordinator import web
from atoll.coordinator.core import events as e
from atoll.coordinator.metrics import METRICS
from atoll.coordinator.sync_times import BOUNDS_S, SyncTimes
from atoll.node.daemon.metrics import METRICS as OF_NODE
from atoll.protocol import messages as m
from atoll.protocol import pages
from atoll.protocol.figures import SyncPhases
from atoll.protocol.metrics import Kind, families
from atoll.protocol.sync_settings import SyncSettings
from tests.harness import metrics_page
from tests.harness.coordinator_story import Story, some_settings
from tests.harness.memory_store import MemoryStore

R = TypeVar("R")
LABELS = {"site", "state", "cause", "part", "what", "codec", "sender", "receiver", "name", "of"}

TOLD = m.Telemetry(
    trained_tokens=1000,
    sent_contribution_bytes=300,
    sent_average_bytes=200,
    sent_state_bytes=500,
    exchange_total_s=4.0,
    num_applied=2,
    apply_total_s=1.0,
    num_crashes=1,
    num_reconnects=2,
    num_failed_checkpoints=3,
    model_flops=6e15,
    peak_flops_per_s=2e15,
    node_memory_bytes=10,
    rank_memory_bytes=20,
    num_gpus=2,
    gpu_used_bytes=30,
    gpu_total_bytes=40,
    disk_free_bytes=50,
    disk_total_bytes=60,
    certificate_until_s=1.9e9,
    metrics_address="10.0.0.5:9100",
)


def a_story() -> Story:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    story.says("a", m.Heartbeat(phase="training", inner_step=7, loss=2.25, sent_bytes=1000, train_s=9.0, wait_s=1.0))
    story.says("a", TOLD)
    story.commit_one("a", "b", state="s0", following="s1")
    return story


def document_of(story: Story, **more: Any) -> dict[str, Any]:
    """As the shell has it."""
    times = {"sync_times": SyncTimes().document(), "root_until_s": 2e9}
    document = asdict(story.view) | {"atoll_version": "1"} | times | more
    for i, commit in enumerate(document["commits"]):
        commit["time"] = 1.7e9 + 10 * i
    return document


def shown(document: dict[str, Any]) -> dict[str, Metric]:
    """By name, as Prometheus reads it."""
    text = pages.metrics(families(METRICS, document)).body.decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def by_label(family: Metric) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def test_the_page_of_metrics_is_what_the_tables_say() -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "run python -m tests.harness.metrics_page"


@pytest.mark.parametrize("rows", [METRICS, OF_NODE])
def test_names_follow_the_conventions_of_prometheus(rows: Any) -> None:
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    for row in rows:
        assert re.fullmatch(r"atoll(_[a-z]+)+", row.name)
        assert not row.name.endswith(("_total", "_info", "_count", "_bucket"))
        assert not re.search(r"_(s|ms|kb|mb|minutes|percent|time)$", row.name), "base units, in full"
        assert row.text.endswith(".")
        assert set(row.labels) <= LABELS


def test_what_a_site_tells_is_seen_at_the_coordinator() -> None:
    found = shown(document_of(a_story()))
    assert by_label(found["atoll_site_tokens"])["a",] == 1000
    assert by_label(found["atoll_site_wire_bytes"]) == {
        ("fp32", "a", "contribution"): 300, ("fp32", "a", "average"): 200, ("", "a", "state"): 500,
    }, "b has told nothing, and a counter that is 0 would have begun anew"  # fmt: skip
    assert by_label(found["atoll_site_flops_utilization"]) == {("a",): 6e15 / (2e15 * 9.0)}
    assert by_label(found["atoll_site_utilization"]) == {("a",): 0.9}
    for name, value in (
        ("node_memory_bytes", 10), ("rank_memory_bytes", 20), ("gpus", 2), ("gpu_memory_used_bytes", 30),
        ("gpu_memory_bytes", 40), ("disk_free_bytes", 50), ("disk_bytes", 60),
        ("certificate_expiry_timestamp_seconds", 1.9e9),
    ):  # fmt: skip
        assert by_label(found[f"atoll_site_{name}"]) == {("a",): value}, "b has told nothing"
    for name, value in (("worker_crashes", 1), ("reconnects", 2), ("checkpoints_failed", 3), ("commits_applied", 2)):
        assert by_label(found[f"atoll_site_{name}"]) == {("a",): value}
    assert by_label(found["atoll_site_train_seconds"]) == {("a",): 9.0}, "nor has b sent a heartbeat"


@pytest.mark.parametrize(
    ("sync", "up", "down"),
    [
        (SyncSettings(codec="int4", up="sign1"), "sign1", "int4"),
        (SyncSettings(codec="topk2"), "topk2", "bundle"),
        (SyncSettings(strategy="momentum", every=1, warmup_commits=2, codec="sign1"), "bf16+sign1", "bf16+sign1"),
    ],
)
def test_bytes_are_counted_by_the_codecs_of_the_run(sync: SyncSettings, up: str, down: str) -> None:
    story = Story(replace(some_settings(min_sites=1), sync=sync))
    story.start("a")
    story.says("a", TOLD)
    found = by_label(shown(document_of(story))["atoll_site_wire_bytes"])
    assert found == {(up, "a", "contribution"): 300, (down, "a", "average"): 200, ("", "a", "state"): 500}


def test_counters_do_not_begin_anew_with_the_coordinator() -> None:
    story = a_story()
    story.restart()
    story.connect("a", state=(1, "s1"))
    story.offer("a")
    found = shown(document_of(story))
    for name in ("site_tokens", "site_worker_crashes", "site_sent_bytes", "site_wire_bytes"):
        assert not by_label(found[f"atoll_{name}"]), name
    story.says("a", TOLD)
    assert by_label(shown(document_of(story))["atoll_site_tokens"]) == {("a",): 1000}


def test_the_snapshots_of_all_syncs_are_added_up_by_site() -> None:
    """Of each that a site says, and never less than before, whatever it says."""
    story = a_story()

    def written(*said: tuple[int, float]) -> dict[tuple[str, ...], float]:
        taken = tuple(SyncPhases(sync=sync, train_s=8.0, snapshot_s=took_s, wait_s=4.0) for sync, took_s in said)
        story.says("a", m.Heartbeat(phase="training", phases=taken))
        return by_label(shown(document_of(story))["atoll_site_snapshot_seconds"])

    assert written() == {("a",): 0.0, ("b",): 0.0}
    assert written((1, 0.5), (2, 0.25)) == {("a",): 0.75, ("b",): 0.0}
    assert written() == {("a",): 0.75, ("b",): 0.0}, "each once"
    assert written((3, -5.0)) == {("a",): 0.75, ("b",): 0.0}
    assert written((3, 2e9)) == {("a",): 1e9 + 0.75, ("b",): 0.0}


def test_a_disk_that_is_full_has_no_byte_free() -> None:
    story = a_story()
    story.says("a", replace(TOLD, disk_free_bytes=0))
    assert by_label(shown(document_of(story))["atoll_site_disk_free_bytes"]) == {("a",): 0}


def test_the_disk_of_the_store_is_shown_where_there_is_one() -> None:
    found = shown(document_of(a_story(), store_disk={"free_bytes": 0, "total_bytes": 60}))
    assert by_label(found["atoll_store_disk_free_bytes"]) == {(): 0}
    assert by_label(found["atoll_store_disk_bytes"]) == {(): 60}
    for unknown in ({}, {"store_disk": None}):
        assert not any("store_disk" in name for name in shown(document_of(a_story(), **unknown)))


def test_sites_that_cannot_go_on_and_losses_that_are_no_numbers_are_counted() -> None:
    story = a_story()
    story.says("b", m.Diverged(commit=1, text="the loss is nan"))
    story.says("a", m.Leave(reason="no such data", fatal=True))
    found = shown(document_of(story))
    assert by_label(found["atoll_losses_not_finite"]) == {(): 1}
    assert by_label(found["atoll_sites_failed"]) == {(): 1}


def test_why_a_site_cannot_go_on_is_shown_once_and_until_it_is_in_the_run_again() -> None:
    story = a_story()
    story.says("b", m.Leave(reason="its disk is full", fatal=True))
    story.says("a", m.Leave(reason="no such data", fatal=True))
    assert list(story.view.errors) == ["b (site 2): its disk is full", "a (site 1): no such data"]
    story.connect("a", incarnation=2)
    assert len(story.view.errors) == 2, "it has said Hello, and trains not yet"
    story.says("a", m.Leave(reason="the same again", fatal=True))
    assert list(story.view.errors) == ["b (site 2): its disk is full", "a (site 1): the same again"]
    story.join("a", incarnation=3)
    assert list(story.view.errors) == ["b (site 2): its disk is full"]
    found = shown(document_of(story))
    assert by_label(found["atoll_sites_failed"]) == {(): 3}, "a count does not fall"


def test_nothing_follows_from_what_a_site_tells() -> None:
    story = a_story()
    before = story.core.next_deadline()
    story.sent.clear()
    story.says("a", TOLD)
    assert not story.sent
    assert story.core.next_deadline() == before


def test_a_site_that_hangs_does_not_get_on_by_telling() -> None:
    story = a_story()
    story.sites["b"].trains = False
    for i in range(60):
        story.wait(1.0)
        if story.view.num_evicted:
            break
        story.says("b", replace(TOLD, trained_tokens=1000 + i))
    assert [name for name in ("a", "b") if story.num(name, m.Evicted)] == ["b"]


def test_whoever_starts_again_has_told_nothing() -> None:
    story = a_story()
    story.connect("a", incarnation=2, state=(1, "s1"))
    assert ("a",) not in by_label(shown(document_of(story))["atoll_site_gpus"])


def test_a_site_that_does_not_contribute_is_behind() -> None:
    story = a_story()
    for name in "ab":
        story.ready(name)
    for name in "ab":
        story.done(name, "s1")
    found = by_label(shown(document_of(story))["atoll_site_commits_behind"])
    assert found == {("a",): 1, ("b",): 1}, "neither has said that it applied the commit"
    for name in "ab":
        story.applied(name, 2, "s2")
    assert by_label(shown(document_of(story))["atoll_site_commits_behind"]) == {("a",): 0, ("b",): 0}


def test_evictions_are_counted_by_cause() -> None:
    story = a_story()
    story.evict("a")
    story.drop("b")
    story.wait(2 * story.limits.lease_s)
    found = by_label(shown(document_of(story))["atoll_sites_evicted"])
    assert found == {
        ("absence",): 1, ("hang",): 0, ("state",): 0, ("contribution",): 0, ("contradiction",): 0, ("audit",): 0,
        ("memory",): 0, ("silence",): 0, ("operator",): 1,
    }  # fmt: skip
    assert story.view.num_evicted == 2


def test_the_pace_of_a_run_is_over_its_newest_commits() -> None:
    document = document_of(a_story())
    assert "atoll_run_tokens_per_second" not in shown(document), "of one commit there is none"
    first = document["commits"][0]
    document["commits"] = [first, first | {"commit": 2, "time": first["time"] + 8, "tokens": 400}]
    assert by_label(shown(document)["atoll_run_tokens_per_second"]) == {(): 50.0}


def test_a_run_in_plain_text_says_so() -> None:
    assert by_label(shown(document_of(a_story()))["atoll_plain_text"]) == {(): 0.0}
    plain = shown(document_of(a_story(), root_until_s=None))
    assert by_label(plain["atoll_plain_text"]) == {(): 1.0}
    assert "atoll_root_expiry_timestamp_seconds" not in plain


def test_a_hostile_member_makes_no_series() -> None:
    """Whatever it says, and however often it comes: series are those of its own name."""
    story = a_story()
    num = sum(len(family.samples) for family in shown(document_of(story)).values())
    for i in range(200):
        story.connect(f"stranger{i}")
        if i % 2:
            story.drop(f"stranger{i}")
    for i in range(50):
        story.says("a", m.Heartbeat(phase=f"phase {i}", doing=f"doing {i}", loss=float(i), inner_step=i))
        story.says("a", replace(TOLD, metrics_address=f'10.0.0.{i}:1"{{evil="1"}}', num_crashes=i))
    found = shown(document_of(story))
    assert sum(len(family.samples) for family in found.values()) <= num
    assert not any("stranger" in str(sample.labels) for family in found.values() for sample in family.samples)
    assert web.nodes_to_scrape(document_of(story)) == [], "that is no address"


def test_prometheus_is_told_where_the_nodes_are_that_can_be_scraped() -> None:
    story = a_story()
    expected = [{"targets": ["10.0.0.5:9100"], "labels": {"site": "a", "instance": "a"}}]
    assert web.nodes_to_scrape(document_of(story)) == expected
    story.says("a", replace(TOLD, metrics_address="10.0.0.6:9101"))
    moved = [expected[0] | {"targets": ["10.0.0.6:9101"]}]
    assert web.nodes_to_scrape(document_of(story)) == moved, "another address makes no other series"
    story.leave("a")
    assert web.nodes_to_scrape(document_of(story)) == []


# --- how long the parts of syncs take


def counts(times: SyncTimes, part: str) -> dict[float, int]:
    said: Any = times.document()[part]
    return {bound: count for bound, count in zip(BOUNDS_S, said["counts"], strict=True) if count}


@dataclass
class Kept:
    """Of the first sync."""

    opened: e.OpenRecord
    planned: e.PlanRecord
    committed: e.CommitRecord
    attested: e.AttestationRecord


def a_sync(monkeypatch: pytest.MonkeyPatch) -> Kept:
    records: list[e.Record] = []
    monkeypatch.setattr(MemoryStore, "persist", lambda self, term, kept, wall_s: records.extend(kept))
    a_story()

    def first(kind: type[R]) -> R:
        return next(record for record in records if isinstance(record, kind))

    attested = next(r for r in records if isinstance(r, e.AttestationRecord) and r.commit == 1)
    return Kept(first(e.OpenRecord), first(e.PlanRecord), first(e.CommitRecord), attested)


def test_parts_of_a_sync_are_measured_from_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = a_sync(monkeypatch)
    opened, planned, committed, attested = kept.opened, kept.planned, kept.committed, kept.attested
    times = SyncTimes()
    times.kept([opened], 100.0)
    times.kept([planned], 100.2)
    times.kept([planned], 105.0)  # another attempt
    times.kept([committed], 107.0)
    times.kept([attested], 407.0)
    times.kept([attested], 999.0)
    assert counts(times, "collect") == {0.3: 1}
    assert counts(times, "exchange") == {3.0: 1}, "of the last attempt"
    assert counts(times, "attest") == {300.0: 1}
    document: Any = times.document()
    assert document["attest"]["total_s"] == 300.0
    buckets = shown(document_of(a_story(), sync_times=document))["atoll_sync_seconds"].samples
    cumulative = [s.value for s in buckets if s.name.endswith("_bucket") and s.labels["part"] == "exchange"]
    assert cumulative == [float(bound >= 3.0) for bound in BOUNDS_S]
    assert [s.value for s in buckets if s.name.endswith("_count")] == [1.0, 1.0, 1.0]


def test_what_is_abandoned_or_was_begun_before_this_start_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = a_sync(monkeypatch)
    opened, planned, committed = kept.opened, kept.planned, kept.committed
    times = SyncTimes()
    times.kept([committed], 50.0)
    times.kept([opened], 100.0)
    times.kept([planned], 101.0)
    times.kept([e.AbandonRecord(1, "?", 1)], 102.0)
    times.kept([committed], 103.0)
    assert counts(times, "collect") == {1.0: 1}
    assert counts(times, "exchange") == {}
    assert BOUNDS_S[-1] == inf


def test_kinds_of_values_are_those_of_prometheus() -> None:
    kinds = {Kind.GAUGE: "gauge", Kind.COUNTER: "counter", Kind.INFO: "gauge", Kind.HISTOGRAM: "histogram"}
    found = shown(document_of(a_story()))
    for row in METRICS:
        name = row.name + ("_info" if row.kind is Kind.INFO else "")
        if name in found:
            assert found[name].type == kinds[row.kind], row.name
    assert len(found) > 0.8 * len(METRICS)
