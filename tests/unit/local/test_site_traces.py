"""A site's spans of syncs that go wrong. `tests/process/test_traces.py` has those that go well."""

from __future__ import annotations

from dataclasses import replace

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.exchange_events import ExchangeFinished
from atoll.node.daemon.tracing import MOST_SYNCS, SiteTraces
from atoll.protocol import messages as m
from atoll.protocol import traces
from atoll.protocol.errors import PeerError
from atoll.protocol.traces import Span

PLAN = m.Plan(
    sync=1,
    attempt=1,
    term=1,
    base_commit=0,
    contributors=(),
    trees=(),
    stall_limit_s=1.0,
    num_steps=1,
    deadline_s=1.0,
    slowest_bytes_per_s=1,
)
COMMIT = m.Commit(
    commit=5, sync=1, attempt=2, term=1, contributors=(), payload_digest=bytes(32), run_step=1, run_tokens=1
)
READY = m.Ready(sync=1, tokens=1, num_steps=1, mean_loss=0.0, train_s=2.0)
SEALED = e.SnapshotSealed(generation=1, step=1, tokens=1, num_steps=1, mean_loss=0.0, train_s=2.0)


class Site:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.traces = SiteTraces("run", "a", 3, site_id=lambda: 1, send=self.spans.append)

    def begin(self, attempt: int, now: float) -> None:
        begun = out.BeginExchange(replace(PLAN, attempt=attempt), tokens=1, weights=())
        self.traces.wanted(begun, now)

    def in_words(self) -> list[str]:
        found = [f"{s.name} {s.begin_s:g}-{s.end_s:g} {s.problem}".rstrip() for s in self.spans]
        self.spans.clear()
        return found


def test_attempts_that_break_and_are_cancelled_are_exchanges_of_one_site_span() -> None:
    site = Site()
    site.traces.heard(SEALED, 10.0)
    site.traces.wanted(out.Send(READY), 10.5)
    site.begin(1, 11.0)
    site.traces.heard(e.ExchangeBroken(PLAN, PeerError("tensor secret_tensor", 2)), 12.0)
    site.begin(2, 13.0)
    site.traces.wanted(out.CancelExchange(1, 2), 14.0)
    site.begin(3, 15.0)
    site.traces.heard(ExchangeFinished(replace(PLAN, attempt=3), bytes(32)), 16.0)
    exchanges = [span for span in site.spans if span.name == "exchange"]
    assert [span.place for span in exchanges] == [traces.of_exchange("run", 1, 1, n) for n in (1, 2, 3)]
    assert {span.parent for span in site.spans} == {traces.of_site("run", 1, 1)}
    assert "secret" not in str(site.spans)
    assert site.in_words() == [
        "train 8-10",
        "wait for plan 10.5-11",
        "exchange 11-12 broken",
        "exchange 13-14 cancelled",
        "exchange 15-16",
    ]
    site.traces.heard(e.Received(1, COMMIT), 17.0)
    site.traces.wanted(out.ApplyCommit(COMMIT), 17.5)
    site.traces.heard(e.CommitApplied(commit=5, state_hash=bytes(32)), 18.0)
    site.traces.wanted(out.PublishState(e.Values(5)), 18.0)
    site.traces.heard(e.Published(e.Values(5)), 19.0)
    site.traces.wanted(out.DropSync(1), 19.5)
    site.traces.heard(e.Merged(generation=1, version=5, wait_s=0.0), 20.0)
    assert site.spans[-1].parent == traces.of_sync("run", 1)
    assert site.in_words() == ["wait for commit 16-17", "apply 17.5-18", "publish 18-19", "take 19-20", "site 8-20"]
    site.traces.close()
    assert not site.spans


def test_a_sync_that_is_abandoned_ends_there_and_others_are_not_kept_for_ever() -> None:
    site = Site()
    site.begin(1, 11.0)
    site.traces.wanted(out.CancelExchange(1, 1), 12.0)
    site.traces.wanted(out.DropSync(1), 12.0)
    assert site.in_words() == ["exchange 11-12 cancelled", "site 11-12 no commit"]
    for sync in range(2, MOST_SYNCS + 4):
        site.traces.wanted(out.Send(replace(READY, sync=sync)), float(sync))
    assert [span.attributes["atoll.sync"] for span in site.spans if span.name == "site"] == [2, 3]
    site.traces.close()
    assert sum(span.name == "site" for span in site.spans) == MOST_SYNCS + 2


def test_a_stream_to_the_coordinator_is_a_trace_of_its_own() -> None:
    site = Site()
    places = []
    for began_s in (1.0, 5.0):
        ((key, text),) = site.traces.begin_session()
        places.append((key, text))
        site.traces.heard(e.SessionOpened(), began_s)
        site.traces.heard(e.SessionLost("a secret reason"), began_s + 2.0)
    assert places == [("traceparent", span.place.traceparent) for span in site.spans]
    assert "secret" not in str(site.spans)
    assert len({span.place.trace_id for span in site.spans}) == 2
    assert site.in_words() == ["session 1-3", "session 5-7"]
