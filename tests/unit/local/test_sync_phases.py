"""What a sync took at a site, phase by phase."""

from __future__ import annotations

from dataclasses import replace

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.exchange_events import ExchangeFinished
from atoll.node.daemon.sync_phases import MOST_SYNCS, SitePhases
from atoll.protocol.errors import PeerError
from atoll.protocol.figures import SyncPhases
from atoll.protocol.messages import MAX_PHASES
from tests.unit.local.test_site_traces import COMMIT, PLAN, READY, SEALED

WRITE = out.AnswerWorkers(generation=1, step=1, seq=0, answer=e.Answer(kind=e.AnswerKind.SNAPSHOT))


def exchange(phases: SitePhases, sync: int, begin_s: float, *, attempt: int = 1) -> None:
    begun = out.BeginExchange(replace(PLAN, sync=sync, attempt=attempt), tokens=1, weights=())
    phases.wanted(begun, begin_s)


def apply(phases: SitePhases, sync: int, commit: int, begin_s: float, *, takes_s: float) -> None:
    message = replace(COMMIT, sync=sync, commit=commit)
    phases.heard(e.Received(1, message), begin_s)
    phases.wanted(out.ApplyCommit(message), begin_s)
    phases.heard(e.CommitApplied(commit=commit, state_hash=bytes(32)), begin_s + takes_s)
    phases.wanted(out.DropSync(sync), begin_s + takes_s)


def test_of_two_attempts_each_counts_and_a_sync_is_told_once_when_the_ranks_have_taken_it() -> None:
    phases = SitePhases()
    phases.wanted(WRITE, 9.5)
    phases.heard(SEALED, 10.0)
    phases.wanted(out.Send(READY), 10.0)
    exchange(phases, 1, 11.0)
    phases.heard(e.ExchangeBroken(PLAN, PeerError("a peer is gone", 2)), 12.0)
    exchange(phases, 1, 20.0, attempt=2)
    phases.heard(ExchangeFinished(replace(PLAN, attempt=2), bytes(32)), 23.0)
    apply(phases, 1, 5, 24.0, takes_s=0.25)
    phases.wanted(out.PublishState(e.Values(5)), 25.0)
    phases.heard(e.Published(e.Values(5)), 25.5)
    assert phases.taken() == (), "the ranks have not taken it"
    phases.heard(e.Merged(generation=1, version=5, wait_s=15.0), 26.0)
    told = SyncPhases(sync=1, train_s=2.0, snapshot_s=0.5, exchange_s=4.0, apply_s=0.75, wait_s=15.0)
    assert phases.taken() == (told,)
    assert phases.taken() == ()


def test_what_comes_of_no_commit_is_not_told_and_a_site_that_received_trained_nothing_of_it() -> None:
    phases = SitePhases()
    exchange(phases, 1, 1.0)
    phases.wanted(out.CancelExchange(1, 1), 2.0)
    phases.wanted(out.DropSync(1), 2.0)
    exchange(phases, 2, 3.0)
    phases.heard(ExchangeFinished(replace(PLAN, sync=2), bytes(32)), 4.0)
    apply(phases, 2, 7, 4.0, takes_s=1.0)
    phases.heard(e.Merged(generation=1, version=7, wait_s=0.5), 6.0)
    assert phases.taken() == (SyncPhases(sync=2, exchange_s=1.0, apply_s=1.0, wait_s=0.5),)


def test_two_commits_that_the_ranks_take_at_once_are_waited_for_once() -> None:
    phases = SitePhases()
    for sync in (1, 2):
        exchange(phases, sync, 1.0)
        phases.heard(ExchangeFinished(replace(PLAN, sync=sync), bytes(32)), 2.0)
        apply(phases, sync, sync, 2.0, takes_s=1.0)
    phases.heard(e.Merged(generation=1, version=2, wait_s=4.0), 5.0)
    assert [(one.sync, one.wait_s) for one in phases.taken()] == [(1, 0.0), (2, 4.0)]


def test_it_is_bounded_while_no_commit_comes_and_while_nobody_listens() -> None:
    phases = SitePhases()
    for sync in range(1, 2 * MOST_SYNCS + 1):
        exchange(phases, sync, 1.0)
    for sync in range(1, 2 * MOST_SYNCS + 1):
        apply(phases, sync, sync, 2.0, takes_s=1.0)
        phases.heard(e.Merged(generation=1, version=sync, wait_s=0.0), 4.0)
    assert [one.sync for one in phases.taken()] == list(range(MOST_SYNCS + 1, 2 * MOST_SYNCS + 1))
    assert MOST_SYNCS <= MAX_PHASES
