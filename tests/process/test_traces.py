"""A real run, traced: each sync is one trace of the coordinator's and all sites' spans, made without a word between
them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from atoll.protocol import traces
from tests.harness.collector import Collector, Received, collecting
from tests.harness.local_run import LocalRun
from tests.process.test_secured_runs import LIMIT_S, MODEL, SETTINGS

pytestmark = pytest.mark.timeout(400)

NUM_COMMITS = 4
RUN = replace(SETTINGS, steps=NUM_COMMITS * SETTINGS.sync.every, quorum=2, time_limits="wan")
PHASES = ["train", "wait for plan", "exchange", "wait for commit", "apply", "publish", "take"]
OF_COORDINATOR = ["collect", "attempt", "attest"]


def test_a_sync_is_one_trace_of_all_sites(tmp_path: Path) -> None:
    with collecting() as collector:
        traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
        with LocalRun(tmp_path, RUN, secured=True) as run:
            coordinator = run.start_coordinator(environment=traced)
            for name in "ab":
                run.start_node(name, MODEL, environment=traced)
            assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
            assert run.status()["num_lost_spans"] == 0
            coordinator.interrupt()
            assert coordinator.wait(LIMIT_S) == 0
            check(collector, run)


def check(collector: Collector, run: LocalRun) -> None:
    by_trace = defaultdict(list)
    for span in collector.spans:
        by_trace[span.trace_id].append(span)
    roots = {span.trace_id: span for span in collector.spans if span.name == "sync" and not span.problem}
    assert sorted(root.about["atoll.commit"] for root in roots.values()) == list(range(1, NUM_COMMITS + 1))
    for trace_id, root in roots.items():
        assert trace_id == traces.of_sync(RUN.run_id, root.about["atoll.sync"]).trace_id
        assert (root.parent_id, sorted(root.about["atoll.contributors"])) == (b"", ["a", "b"])
        check_sync(root, by_trace.pop(trace_id), run)
    assert {span.name for spans in by_trace.values() for span in spans} <= {"session", "sync", "site", *PHASES}
    assert sum(span.name == "session" for spans in by_trace.values() for span in spans) == 2
    for secret in (b"secret_tensor", (run.home("a") / "key").read_bytes(), b"127.0.0.1"):
        assert secret not in collector.seen, secret


def check_sync(root: Received, spans: list[Received], run: LocalRun) -> None:
    """The spans of its trace."""
    assert len({span.span_id for span in spans}) == len(spans)
    own = [span for span in spans if span.parent_id == root.span_id and span.service == "atoll-coordinator"]
    own.sort(key=lambda span: span.begin_ns)
    assert [span.name for span in own] == OF_COORDINATOR
    assert (own[0].begin_ns, own[-1].end_ns) == (root.begin_ns, root.end_ns)
    check_order(own)
    sites = {span.about["atoll.site"]: span for span in spans if span.name == "site"}
    assert sites.keys() == {"a", "b"}
    for name, site in sites.items():
        assert site.parent_id == root.span_id
        parts = [span for span in spans if span.parent_id == site.span_id]
        parts.sort(key=lambda span: PHASES.index(span.name))
        assert {span.about["atoll.site"] for span in parts} == {name}
        names = [span.name for span in parts]
        is_last = root.about["atoll.commit"] == NUM_COMMITS
        assert names == PHASES[: len(names)]
        assert is_last or names == PHASES
        check_order(parts)
        assert site.begin_ns == parts[0].begin_ns
        assert site.end_ns == parts[-1].end_ns
        (kept,) = [line for line in run.journal(name, "commit") if line["commit"] == root.about["atoll.commit"]]
        assert parts[PHASES.index("exchange")].took_s >= kept["exchange_s"] - 1e-3
        assert parts[PHASES.index("apply")].took_s >= kept["apply_s"] - 1e-3
    assert len(spans) == 1 + len(own) + len(sites) + sum(
        span.parent_id in {s.span_id for s in sites.values()} for span in spans
    )


def check_order(spans: list[Received]) -> None:
    """Of one process, one after the other."""
    for before, after in pairwise(spans):
        assert before.begin_ns <= before.end_ns <= after.begin_ns + 1000, (before, after)  # rounded
