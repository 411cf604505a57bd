"""Error feedback as the core lives it: a commit that holds this site's contribution advances it, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.protocol import messages as m
from atoll.protocol.settings import settings_to_json
from tests.unit.node_core.test_in_flight import TWO_AT_ONCE, Story, committed, of
from tests.unit.node_core.test_site import (
    HASH,
    SETTINGS,
    Driver,
    at_boundary,
    commit,
    exchanged,
    opened,
    plan,
    started,
)

WITH_ERRORS = replace(SETTINGS, sync=replace(SETTINGS.sync, codec="sign1", error_feedback=0.5))
JOB = out.AdvanceErrors(1, 0, 0, (0,))


def said(drive: Driver) -> list[tuple[int, ...]]:
    return [s.error_commits for s in drive.sent() if isinstance(s, m.Ready)]


def jobs(drive: Driver) -> list[out.Output]:
    return [o for o in drive.out if isinstance(o, out.AdvanceErrors | out.ApplyCommit | out.FetchState | out.RollBack)]


def reports(drive: Driver) -> list[str]:
    return [o.text for o in drive.out if isinstance(o, out.Report) and "error feedback" in o.text]


def sources(last: int, *commits: m.Commit) -> m.Sources:
    donor = m.Donor(site_id=2, incarnation=1, address="127.0.0.1:2", commit=last)
    return m.Sources(attested=(m.Attestation(commit=last, state_hash=HASH),), donors=(donor,), commits=commits)


def ready_for_sync() -> Driver:
    drive = started(settings=WITH_ERRORS)
    at_boundary(drive)
    return drive


def ready_again(drive: Driver) -> list[tuple[int, ...]]:
    """What the site says to a coordinator that asks anew for the open sync."""
    drive.receive(opened(drive.open_sync(), 0))
    return said(drive)


def test_a_commit_that_holds_the_contribution_advances_the_error_before_it_is_applied() -> None:
    drive = ready_for_sync()
    drive.receive(plan(1))
    begun = drive.wants(out.BeginExchange)
    assert isinstance(begun, out.BeginExchange)
    assert begun.error_commits == (0,)
    exchanged(drive, 1)
    drive.receive(commit(1, 1))
    assert jobs(drive) == [JOB]
    drive(e.ErrorsAdvanced())
    assert jobs(drive) == [out.ApplyCommit(commit(1, 1))]
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive(e.Published(e.Values(1)))
    drive.merged(1)
    drive.ask(20)
    drive.sealed(20)
    assert said(drive) == [(1,)]
    drive.receive(plan(2, base=1))
    begun = drive.wants(out.BeginExchange)
    assert isinstance(begun, out.BeginExchange)
    assert begun.error_commits == (1,)


def test_without_the_setting_nothing_is_advanced_or_said() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(commit(1, 1))
    assert jobs(drive) == [out.ApplyCommit(commit(1, 1))]
    assert not drive.errors()


def test_another_attempt_advances_nothing() -> None:
    drive = ready_for_sync()
    for attempt in (1, 2, 3):
        drive.receive(plan(1, attempt))
        begun = drive.wants(out.BeginExchange)
        assert isinstance(begun, out.BeginExchange)
        assert begun.error_commits == (0,)
        assert not jobs(drive)
    assert ready_again(drive) == [(0,)]


def test_an_abandoned_sync_advances_nothing() -> None:
    drive = ready_for_sync()
    drive.receive(plan(1))
    drive.receive(m.Abandoned(sync=1, reason="too few", next=opened(2, 0)))
    assert said(drive) == [(0,)]
    assert not jobs(drive)


def test_a_commit_without_this_site_advances_nothing() -> None:
    drive = ready_for_sync()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    assert jobs(drive) == [out.ApplyCommit(commit(1, 1, contributors=(2, 3)))]


def test_a_commit_that_is_fetched_advances_the_error_before_the_fetch_begins() -> None:
    drive = ready_for_sync()
    found = sources(2, commit(1, 1), commit(2, 2, contributors=(2, 3)))
    drive.receive(found)
    assert jobs(drive) == [JOB]
    drive(e.ErrorsAdvanced())
    assert jobs(drive) == [out.FetchState(found)]
    drive(e.StateFetched(commit=2, state_hash=HASH, run_step=20, run_tokens=600))
    assert drive.errors() == (1,)
    assert not reports(drive)


def test_a_commit_that_is_heard_of_twice_advances_the_error_once() -> None:
    drive = ready_for_sync()
    drive.receive(commit(1, 1))
    assert jobs(drive) == [JOB]
    for again in (commit(1, 1), sources(1, commit(1, 1))):
        drive.receive(again)
        assert not [job for job in jobs(drive) if isinstance(job, out.AdvanceErrors)]
    drive(e.ErrorsAdvanced())
    assert drive.errors() == (1,)
    assert not [job for job in jobs(drive) if isinstance(job, out.AdvanceErrors)]


def test_what_cannot_be_advanced_is_dropped_and_said_and_the_commit_is_applied() -> None:
    drive = ready_for_sync()
    drive.receive(commit(1, 1))
    drive(e.ErrorsAdvanced(problem="the disk is full"))
    assert reports(drive) == ["error feedback is dropped, and begins anew: the disk is full"]
    assert jobs(drive) == [out.ApplyCommit(commit(1, 1))]
    assert drive.errors() == (0,)
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert not reports(drive), "it is said once"
    assert drive.errors() == (0,)
    assert drive.num_errors_dropped() == 1


def test_what_two_commits_in_flight_cannot_advance_is_dropped_once_each() -> None:
    sync = replace(TWO_AT_ONCE.sync, codec="sign1", error_feedback=0.5)
    story = Story(replace(TWO_AT_ONCE, sync=sync))
    story.seal(10, fragment=0)
    story.receive(of(1, 2))
    story.asks(10)
    story.seal(20, fragment=1)
    for number in (1, 2):
        story.receive(committed(number, number, number - 1))
    for _ in range(2):
        story(e.ErrorsAdvanced(problem="the disk is full"))
    for number in (1, 2):
        story(e.CommitApplied(commit=number, state_hash=HASH))
        assert not reports(story)
    assert story.num_errors_dropped() == 2


def test_how_much_is_lost_is_said() -> None:
    drive = ready_for_sync()
    drive.receive(commit(1, 1))
    drive(e.ErrorsAdvanced(share=0.915))
    drive.receive(m.Evicted(reason="it was away"))
    assert reports(drive) == [
        "error feedback is dropped, and begins anew: what this site trained counts no longer; 0.92 of the norm of what "
        "was to be sent last is lost"
    ]


@pytest.mark.parametrize("ends", [True, False])
def test_an_eviction_drops_the_error_also_while_it_is_advanced(ends: bool) -> None:
    drive = ready_for_sync()
    drive.receive(commit(1, 1))
    if ends:
        drive(e.ErrorsAdvanced())
        assert drive.errors() == (1,)
    drive.receive(m.Evicted(reason="it was away"))
    assert drive.errors() == (0,)
    if not ends:
        drive(e.ErrorsAdvanced())
        assert drive.errors() == (0,), "it is what the discarded contribution left"


def test_going_back_drops_the_error_of_a_void_commit() -> None:
    drive = ready_for_sync()
    drive.receive(commit(1, 1))
    drive(e.ErrorsAdvanced())
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.receive(m.RolledBack(branch=1, commit=0, reason="a power cut"))
    assert drive.errors() == (0,)


def test_a_state_that_was_fetched_meanwhile_has_taken_the_base_away() -> None:
    """The fetch began before anybody said that a commit holds the contribution: it cannot be computed any more."""
    drive = ready_for_sync()
    drive.had_errors(7)
    drive.receive(sources(2, commit(2, 2, contributors=(2, 3))))
    assert [type(job) for job in jobs(drive)] == [out.FetchState]
    drive.receive(commit(1, 1))
    drive(e.StateFetched(commit=2, state_hash=HASH, run_step=20, run_tokens=600))
    assert [text.split(": ")[0] for text in reports(drive)] == ["error feedback is dropped, and begins anew"]
    assert drive.errors() == (0,)
    assert not [job for job in jobs(drive) if isinstance(job, out.AdvanceErrors)], "there is no base to do it from"


def test_a_snapshot_keeps_the_error_that_it_was_sealed_with() -> None:
    """Its Ready is said: whatever becomes of the error meanwhile, the contribution does not change."""
    drive = started(settings=WITH_ERRORS)
    drive.had_errors(7)
    at_boundary(drive)
    drive.had_errors(0)
    assert ready_again(drive) == [(7,)]
    drive.receive(plan(1))
    begun = drive.wants(out.BeginExchange)
    assert isinstance(begun, out.BeginExchange)
    assert begun.error_commits == (7,)
    drive.receive(commit(1, 1))
    assert jobs(drive) == [out.AdvanceErrors(1, 0, 0, (7,))]


def test_the_error_waits_until_the_ranks_have_taken_a_difference() -> None:
    """As the apply does: else PUBLISH would not hold the values again from which the next difference is made."""
    drive = started(settings=WITH_ERRORS)
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.ask(10)
    assert drive.wants(out.PublishState) == out.PublishState(e.Difference(0, 1))
    drive(e.Published(e.Difference(0, 1)))
    assert drive.answer().mode is e.MergeMode.SHIFT
    drive.queue(JOB)
    drive(e.Tick())
    assert not jobs(drive)
    drive.merged(1)
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(1))
    drive(e.Published(e.Values(1)))
    assert jobs(drive) == [JOB]


def test_a_fetch_that_is_told_of_a_later_commit_with_the_contribution_in_it_drops_the_error() -> None:
    """The fetch has taken the base away, or does so: what the commit left over cannot be computed, and what was left
    before is in the commit. The samples count with it, and are not contributed again."""
    drive = ready_for_sync()
    drive.had_errors(7)
    drive.receive(sources(1, commit(1, 1, contributors=(2, 3))))
    assert [type(job) for job in jobs(drive)] == [out.FetchState]
    drive(e.SourcesWanted(held=0, undialled_site_ids=()))
    drive.receive(sources(2, commit(1, 1, contributors=(2, 3)), commit(2, 1)))
    assert drive.wants(out.TellFetch)
    drive(e.StateFetched(commit=2, state_hash=HASH, run_step=20, run_tokens=600))
    assert len(reports(drive)) == 1
    assert drive.errors() == (0,)
    assert drive.has_contributed(), "the ranks take the commit as one that holds what they trained"


def test_the_error_is_advanced_before_a_fetch_that_waits() -> None:
    drive = ready_for_sync()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    assert [type(job) for job in jobs(drive)] == [out.ApplyCommit]
    queued = drive.queue(out.FetchState(sources(3)), JOB)
    assert [type(job) for job in queued] == [out.AdvanceErrors, out.FetchState]


def back(held: tuple[int | None, ...], last: tuple[int, ...], fragments: int = 1) -> Driver:
    """A later start of the site, with that on its disk, to which the coordinator says what it contributed last."""
    sync = replace(WITH_ERRORS.sync, fragments=fragments)
    drive = Driver(settings=replace(WITH_ERRORS, sync=sync), held_errors=held)
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(drive.core.settings), site_id=1, error_commits=last))
    return drive


def test_what_an_earlier_start_left_counts_if_its_commit_is_the_last_one_that_holds_the_site() -> None:
    drive = back((4,), (4,))
    assert drive.errors() == (4,)
    assert not reports(drive)
    drive(e.SessionLost("it broke"))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(drive.core.settings), site_id=1, error_commits=(9,)))
    assert drive.errors() == (4,), "of what this start contributes it hears by commits"


@pytest.mark.parametrize(
    ("held", "last", "left"),
    [
        ((4,), (5,), (0,)),  # a commit that it never heard of holds it
        ((4,), (3,), (0,)),  # the run went back
        ((4,), (0,), (0,)),  # the log does not reach so far
        ((4,), (), (0,)),  # an older coordinator
        ((4, 5), (4, 6), (4, 0)),
        ((0, 5), (4, 5), (0, 5)),  # of the first it was not advanced yet, or all of it is damaged
        ((0, 5), (0, 5), (0, 5)),  # of the first there was none
        ((None, 5), (4, 5), (0, 5)),  # a part of the first was advanced, or is damaged
    ],
)
def test_what_an_earlier_start_left_of_another_contribution_is_dropped_and_said(
    held: tuple[int | None, ...], last: tuple[int, ...], left: tuple[int, ...]
) -> None:
    drive = back(held, last, len(held))
    assert drive.errors() == left
    wanted_of = last or (0,) * len(held)
    is_lost = any((at != 0 or of) and not kept for at, of, kept in zip(held, wanted_of, left, strict=True))
    assert drive.num_errors_dropped() == is_lost
    wanted = (
        "error feedback is dropped, and begins anew: what an earlier start left is not of this site's last contribution"
    )
    assert [wanted in text for text in reports(drive)] == [True] * is_lost


def test_a_commit_with_the_contribution_of_an_earlier_start_drops_what_that_left() -> None:
    """It was on its way when the site was killed: the error was in it."""
    drive = ready_for_sync()
    drive.had_errors(3)
    of_before = m.Member(site_id=1, incarnation=0, address="127.0.0.1:1", tokens=100)
    others = commit(4, 4, contributors=(2,))
    drive.receive(sources(4, replace(others, contributors=(of_before, *others.contributors))))
    assert drive.errors() == (0,)
    assert [text.split("; ")[0] for text in reports(drive)] == [
        "error feedback is dropped, and begins anew: commit 4 holds what this site trained before it was started again"
    ]


@pytest.mark.parametrize(
    ("last", "left"),
    [
        (7, 7),  # no commit has held the site since
        (9, 0),  # one has, which is not listed for it
        (0, 0),  # the log does not reach so far
    ],
)
def test_an_error_is_dropped_where_a_commit_that_is_not_listed_may_hold_the_contribution(last: int, left: int) -> None:
    """It came to be while the site was away, and the log has not all of what was made since."""
    drive = ready_for_sync()
    drive.had_errors(7)
    drive(e.SessionLost("it broke"))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(drive.core.settings), site_id=1, error_commits=(last,)))
    assert drive.errors() == (7,), "it may be listed yet"
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7, last_commit=11))
    drive.receive(sources(11))
    drive(e.StateFetched(commit=11, state_hash=HASH, run_step=110, run_tokens=3300))
    assert drive.errors() == (left,)
    assert [text.split("; ")[0] for text in reports(drive)] == [
        "error feedback is dropped, and begins anew: this site has not heard of each commit up to 11, and one of "
        "them may hold its contribution"
    ] * (left == 0)
    assert drive.num_errors_dropped() == (left == 0)


def test_a_commit_that_is_listed_to_a_site_that_was_away_advances_the_error() -> None:
    drive = ready_for_sync()
    drive.had_errors(7)
    drive(e.SessionLost("it broke"))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(drive.core.settings), site_id=1, error_commits=(1,)))
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7, last_commit=1))
    drive.receive(sources(1, commit(1, 1)))
    drive(e.ErrorsAdvanced())
    drive(e.StateFetched(commit=1, state_hash=HASH, run_step=10, run_tokens=300))
    assert drive.errors() == (1,)
    drive.receive(commit(2, 2, contributors=(2, 3)))
    drive(e.CommitApplied(commit=2, state_hash=HASH))
    assert drive.errors() == (1,)
    assert not drive.num_errors_dropped()


def test_an_error_of_a_wrong_state_counts_no_longer() -> None:
    """Of the base that it was computed from, nobody knows."""
    drive = ready_for_sync()
    drive.had_errors(7)
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.JOINER, run_seed=7, state_hash=bytes([1]) * 32))
    assert drive.wants(out.DistrustState)
    assert drive.errors() == (0,)


@pytest.mark.parametrize(("held", "left"), [((3, 1), (0, 1)), ((1, 1), (1, 1))])
def test_errors_that_are_ahead_of_the_state_go_when_the_run_goes_back(
    held: tuple[int, ...], left: tuple[int, ...]
) -> None:
    """A power cut took the state of commits 2 and 3, and left the error."""
    drive = back(held, held, 2)
    drive.receive(m.RolledBack(branch=1, commit=1, reason="a power cut"))
    assert drive.errors() == left
    assert len(reports(drive)) == (held != left)


def test_an_older_commit_of_an_earlier_start_changes_nothing() -> None:
    drive = ready_for_sync()
    drive.had_errors(3)
    of_before = m.Member(site_id=1, incarnation=0, address="127.0.0.1:1", tokens=100)
    drive.receive(sources(3, replace(commit(3, 3, contributors=(2,)), contributors=(of_before,))))
    assert drive.errors() == (3,)
