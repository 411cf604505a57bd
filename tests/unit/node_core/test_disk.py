"""One job at a time works on the disk; the others wait in one queue."""

from __future__ import annotations

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.disk import Disk, IllegalStep, Outer
from atoll.protocol import messages as m
from tests.unit.node_core.test_site import (
    GOOD_HASH,
    HASH,
    Driver,
    commit,
    evicted_and_a_joiner_again,
    opened,
    sources_of,
    started,
)


def begun(drive: Driver) -> list[out.Output]:
    """Jobs on the disk."""
    jobs = out.SeedState | out.FetchState | out.ApplyCommit | out.PublishState | out.DistrustState | out.RollBack
    return [output for output in drive.out if isinstance(output, jobs)]


def shifting() -> Driver:
    """Its workers were told to take a difference, and have not yet."""
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.ask(10)
    drive(e.Published(e.Difference(0, 1)))
    assert drive.answer().mode is e.MergeMode.SHIFT
    return drive


def test_a_fetch_begins_when_publish_holds_values_again() -> None:
    drive = shifting()
    sources = sources_of(3, commit(2, 2), commit(3, 3))
    drive.receive(sources)
    assert not begun(drive)
    drive.merged(1)
    assert begun(drive) == [out.PublishState(e.Values(1))]
    drive(e.Published(e.Values(1)))
    assert begun(drive) == [out.FetchState(sources)]


def test_a_fetch_of_what_was_applied_meanwhile_is_dropped() -> None:
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    assert begun(drive) == [out.ApplyCommit(commit(1, 1, contributors=(2, 3)))]
    drive.receive(sources_of(2, commit(2, 2)))
    newer = sources_of(3, commit(2, 2), commit(3, 3))
    drive.receive(newer)
    assert not begun(drive)
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert begun(drive) == [out.FetchState(newer)], "the newer answer counts"


def test_a_fetch_that_waits_is_dropped_when_the_run_goes_back() -> None:
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive.receive(sources_of(3, commit(2, 2), commit(3, 3)))
    drive.receive(m.RolledBack(branch=1, commit=0, reason="a power cut"))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert begun(drive) == [out.RollBack(0, 1)]
    drive(e.DiskRolledBack(branch=1, held=(0, HASH)))
    assert not begun(drive), "those commits are void"


def test_a_fetch_that_was_cancelled_has_no_end() -> None:
    drive = started()
    drive.receive(sources_of(2))
    assert begun(drive) == [out.FetchState(sources_of(2))]
    drive.receive(m.RolledBack(branch=1, commit=0, reason="a power cut"))
    assert drive.wants(out.CancelFetch)
    drive(e.StateFetched(commit=2, state_hash=GOOD_HASH, run_step=20, run_tokens=600))
    assert drive.holds() == 0


def test_a_disk_that_is_to_be_checked_is_checked_although_it_went_back_just_now() -> None:
    """What a rollback leaves is not held before every chunk is checked."""
    drive = started()
    drive.receive(m.RolledBack(branch=1, commit=0, reason="a power cut"))
    assert begun(drive) == [out.RollBack(0, 1)]
    evicted_and_a_joiner_again(drive)
    assert not begun(drive)
    drive(e.DiskRolledBack(branch=1, held=(0, HASH)))
    assert [type(job) for job in begun(drive)] == [out.DistrustState]
    assert drive.holds() is None
    assert drive.sent() == [m.FindSources(has_state=False, after_commit=0)]


def test_nothing_is_begun_for_workers_while_the_disk_is_checked() -> None:
    drive = started()
    evicted_and_a_joiner_again(drive)
    drive.receive(opened(1, 0))
    drive.ask(10)
    drive.receive(sources_of(0))
    assert not begun(drive)
    drive(e.StateVerified())
    assert begun(drive) == [out.FetchState(sources_of(0))]


def test_a_second_job_is_a_failure_that_names_both() -> None:
    disk = Disk(outer=Outer(commit=0, state_hash=HASH, run_step=0, run_tokens=0))
    disk.begin(out.ApplyCommit(commit(1, 1)))
    with pytest.raises(IllegalStep, match=r"PublishState.*is to begin, while ApplyCommit"):
        disk.begin(out.PublishState(e.Values(0)))
