"""Ranks that read the outer values where they lie: which of them may still read, the core says with each commit."""

from __future__ import annotations

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.disk import Outer
from atoll.node.core.events import AnswerKind, MergeMode
from atoll.protocol import messages as m
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.unit.node_core.test_site import (
    HASH,
    MANIFEST,
    SETTINGS,
    Driver,
    at_boundary,
    commit,
    exchanged,
    opened,
    plan,
)


class InPlace(Driver):
    """Its ranks can."""

    def joined(self) -> list[out.Output]:
        joined = e.WorkersJoined(
            generation=self.generation,
            manifest=MANIFEST,
            data_fingerprint=b"",
            max_retained_bytes=1 << 20,
            read_in_place=True,
        )
        return self(joined)


def starting(settings: RunSettings = SETTINGS) -> InPlace:
    drive = InPlace(Outer(commit=0, state_hash=HASH, run_step=0, run_tokens=0), settings=settings)
    drive.up_to_admitted(m.AdmittedAs.MEMBER)
    drive.ask(0)
    drive.receive(opened(1, 0))
    drive(e.Published(e.Values(0)))
    return drive


def started(settings: RunSettings = SETTINGS) -> InPlace:
    drive = starting(settings)
    drive.merged(0)
    return drive


def applied_next(drive: Driver) -> bool:
    """Whether the old values may go."""
    found = drive.wants(out.ApplyCommit)
    assert isinstance(found, out.ApplyCommit)
    return found.lets_go


def let_go(drive: Driver) -> None:
    """Of the old values, with the commit that holds what all ranks have sealed."""
    at_boundary(drive)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(commit(1, 1))
    assert applied_next(drive)


def test_the_old_values_may_go_where_all_ranks_wait_for_newer_ones() -> None:
    drive = started()
    let_go(drive)
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(1))
    drive(e.Published(e.Values(1)))
    assert drive.answer().mode is MergeMode.REPLACE
    drive.merged(1)
    at_boundary(drive, 20)


@pytest.mark.parametrize("sync", [SyncSettings(every=10, overlap_steps=5), SyncSettings(every=10, fragments=2)])
def test_where_a_run_overlaps_or_has_fragments_nothing_is_read_in_place(sync: SyncSettings) -> None:
    assert not sync.may_read_in_place
    assert not SyncSettings(every=1, strategy="gradient").may_read_in_place
    assert SETTINGS.sync.may_read_in_place


def test_they_stay_for_a_site_that_did_not_contribute() -> None:
    """Its difference starts from them."""
    drive = started()
    drive.receive(plan(1, contributors=(2, 3), receivers=(1,)))
    exchanged(drive, 1)
    drive.receive(commit(1, 1, contributors=(2, 3)))
    assert not applied_next(drive)
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.ask(10)
    assert drive.wants(out.PublishState) == out.PublishState(e.Difference(0, 1))


def test_they_stay_for_a_site_that_sealed_too_late() -> None:
    """All of its ranks wait; what they wait for is not in this commit."""
    drive = started()
    drive.receive(plan(1, contributors=(2, 3), receivers=(1,)))
    at_boundary(drive)
    exchanged(drive, 1)
    drive.receive(commit(1, 1, contributors=(2, 3)))
    assert not applied_next(drive)


def test_they_stay_for_ranks_that_have_not_asked_again() -> None:
    drive = started()
    drive.ask(10)
    drive.sealed(10)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(commit(1, 1))
    assert not applied_next(drive)


def test_they_stay_where_ranks_were_told_to_train_on() -> None:
    """Without a coordinator. The first rank asks again; another one may still be on its way there, and read."""
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive(e.SessionLost("away"))
    drive.now += drive.core.limits.lease_s
    drive(e.Tick())
    assert drive.answer().kind is AnswerKind.CONTINUE
    while drive.out:
        drive.ask(drive.answer().next_step)
    drive(e.SessionOpened())
    drive.receive(commit(1, 1))
    assert not applied_next(drive)


def test_the_outer_state_stays_while_ranks_take_it() -> None:
    drive = starting()
    drive.receive(plan(1, contributors=(2, 3), receivers=(1,)))
    exchanged(drive, 1)
    drive.receive(commit(1, 1, contributors=(2, 3)))
    assert not any(isinstance(o, out.ApplyCommit) for o in drive.out)
    drive.merged(0)
    assert not applied_next(drive)


def test_ranks_that_go_on_from_values_that_went_wait_until_these_are_published_again() -> None:
    """The commit that they wait for cannot be applied, and the coordinator is gone: they train on."""
    drive = started()
    let_go(drive)
    drive(e.SessionLost("away"))
    drive.now += drive.core.limits.lease_s
    drive(e.Tick())
    assert not any(isinstance(o, out.AnswerWorkers) for o in drive.out)
    drive(e.ApplyFailed(1, "the log is damaged", has_moved=False))
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(0))
    assert not any(isinstance(o, out.AnswerWorkers) for o in drive.out)
    drive(e.Published(e.Values(0)))
    assert drive.answer().kind is AnswerKind.CONTINUE


def test_new_workers_read_nothing_before_their_first_values() -> None:
    drive = started()
    let_go(drive)
    drive(e.WorkersFailed(generation=1, kind=e.FailureKind.CRASHED, text="killed", num_steps=10))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.now += 100.0
    drive(e.Tick())
    drive.joined()
    drive.ask(0)
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(1))
    drive(e.Published(e.Values(1)))
    assert drive.answer().fresh
