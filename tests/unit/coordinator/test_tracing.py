"""Spans of the coordinator, of what the store keeps. `tests/process/test_traces.py` has them beside those of sites."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.tracing import MOST_COMMITS, SyncTraces
from atoll.protocol import traces
from atoll.protocol.traces import Span
from tests.unit.coordinator.test_metrics import a_sync


def in_words(spans: list[Span]) -> list[str]:
    """And forgets them."""
    found = [f"{s.name} {s.begin_s:g}-{s.end_s:g} {s.problem}".rstrip() for s in spans]
    spans.clear()
    return found


def test_attempts_follow_each_other_and_the_sync_ends_with_its_attestation(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, spans = a_sync(monkeypatch), list[Span]()
    of_run = SyncTraces("run", spans.append)
    of_run.kept([kept.opened], 10.0)
    of_run.kept([kept.planned], 11.0)
    of_run.kept([e.PlanRecord(replace(kept.planned.plan, attempt=2))], 15.0)
    of_run.kept([kept.committed], 18.0)
    root = traces.of_sync("run", kept.opened.open.sync)
    assert {span.parent for span in spans} == {root}
    assert len({span.place.span_id for span in spans}) == 3
    assert in_words(spans) == ["collect 10-11", "attempt 11-15 another attempt", "attempt 15-18"]
    of_run.kept([kept.attested], 19.0)
    of_run.kept([kept.attested], 99.0)
    assert (spans[-1].place, spans[-1].attributes["atoll.attempts"]) == (root, 2)
    assert in_words(spans) == ["attest 18-19", "sync 10-19"]


def test_what_has_no_result_is_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, spans = a_sync(monkeypatch), list[Span]()
    of_run = SyncTraces("run", spans.append)
    of_run.kept([kept.opened, kept.planned], 10.0)
    of_run.kept([e.AbandonRecord(kept.opened.open.sync, "a secret reason", 1)], 12.0)
    assert "secret" not in str(spans)
    assert in_words(spans) == ["collect 10-10", "attempt 10-12 abandoned", "sync 10-12 abandoned"]
    of_run.kept([kept.committed], 20.0)
    of_run.kept([e.AttestationRecord(1, b"")], 21.0)
    assert in_words(spans) == ["sync 20-21 not attested"], "it was begun before this start, and is disputed"


def test_commits_that_nobody_attests_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    committed, spans = a_sync(monkeypatch).committed, list[Span]()
    of_run = SyncTraces("run", spans.append)
    for number in range(1, MOST_COMMITS + 3):
        of_run.kept([replace(committed, commit=replace(committed.commit, commit=number, sync=number))], float(number))
    assert in_words(spans) == [f"sync {n}-{n + MOST_COMMITS} not attested" for n in (1, 2)]
