"""One job at a time works on the disk; the others wait in one queue."""

from __future__ import annotations

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.disk import Disk, IllegalStep, Outer
from atoll.protocol import messages as m
from atoll.protocol.settings import settings_to_json
from tests.unit.node_core.test_crashes import crash
from tests.unit.node_core.test_site import (
    GOOD_HASH,
    HASH,
    SETTINGS,
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


def test_new_workers_use_no_difference_that_was_made_for_those_that_crashed() -> None:
    """It is based on commit 0, and they hold none: they would have waited for what the job is to bring."""
    drive = shifting()
    crash(drive)
    drive.receive(m.RolledBack(branch=1, commit=0, reason="a power cut"))
    assert begun(drive) == [out.RollBack(0, 1)]


def test_a_site_that_was_evicted_as_its_workers_crashed_catches_up_before_they_ask() -> None:
    """Of the sync whose difference they were told to take nothing is open then: nothing else would move it on."""
    drive = shifting()
    crash(drive)
    drive.receive(m.Evicted(reason="silent"))
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS)))
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7, last_commit=2))
    sources = sources_of(2, commit(2, 2))
    drive.receive(sources)
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


@pytest.mark.parametrize("job", ["apply", "fetch"])
def test_nothing_is_published_from_a_disk_that_a_job_has_left_between_two_commits(job: str) -> None:
    """It would end the node: what is there is no state of the commit that the site holds."""
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    sources = sources_of(3, commit(2, 2), commit(3, 3))
    if job == "apply":
        drive.receive(commit(2, 2, contributors=(2, 3)))
        drive(e.ApplyFailed(2, "the payload of chunk 3 is damaged", has_moved=True))
    else:
        drive.receive(sources)
        drive(e.FetchFailed("its link is cut", has_moved=True))
    drive.ask(10)
    assert not begun(drive)
    drive.now += 8.0
    drive(e.Tick())
    drive.receive(sources)
    assert begun(drive) == [out.FetchState(sources)]
    drive(e.StateFetched(commit=3, state_hash=GOOD_HASH, run_step=30, run_tokens=900))
    drive.receive(opened(4, 3))
    assert begun(drive) == [out.PublishState(e.Difference(0, 3))]


def test_what_a_fetch_brought_before_it_broke_off_is_tried_from_the_own_log() -> None:
    """Who gave it may be gone for good."""
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.ApplyFailed(1, "its payloads are not in the log"))
    assert drive.sent() == [m.FindSources(has_state=True, after_commit=0, lacks_commit=1)]
    commits = commit(1, 1), commit(2, 2)
    drive.receive(sources_of(2, *commits))
    drive(e.FetchFailed("its link is cut", has_moved=True))
    drive.now += 8.0
    drive(e.Tick())
    assert drive.sent() == [m.FindSources(has_state=True, after_commit=0)]
    drive.receive(m.Sources(commits=commits))
    assert begun(drive) == [out.ApplyCommit(commits[0])]


def test_what_is_lacking_is_said_though_sources_were_asked_for_meanwhile() -> None:
    """Else the coordinator waits for this site to try its own log, for ever."""
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive.receive(commit(3, 3, contributors=(2, 3)))
    assert drive.sent() == [m.FindSources(has_state=True, after_commit=0)]
    drive(e.ApplyFailed(1, "its payloads are not in the log"))
    assert drive.sent() == [m.FindSources(has_state=True, after_commit=0, lacks_commit=1)]


def test_a_rollback_ends_between_no_commits() -> None:
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.receive(sources_of(3, commit(2, 2), commit(3, 3)))
    drive(e.FetchFailed("its link is cut", has_moved=True))
    drive.receive(m.RolledBack(branch=1, commit=1, reason="a power cut"))
    drive(e.DiskRolledBack(branch=1, held=(1, HASH)))
    drive.receive(opened(5, 1))
    drive.ask(10)
    assert begun(drive) == [out.PublishState(e.Difference(0, 1))]


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


def test_a_publish_for_workers_that_are_gone_does_not_count() -> None:
    """It may end after others were told where their slices lie, whose hosts have nothing of it."""
    disk, values = Disk(), e.Values(3, 0)
    disk.begin(out.PublishState(values))
    disk.unpublish()
    disk.publish_ended(values)
    assert disk.published is None
    assert disk.running is None
    disk.begin(out.PublishState(values))
    disk.publish_ended(values)
    assert disk.published == values
    disk.unpublish()
    assert disk.published is None
