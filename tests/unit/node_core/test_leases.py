"""The site's queue of leased samples: what is asked for, what Ready lists, and what is drawn again. Rules 2, 4, 25."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.events import AnswerKind, MergeMode
from atoll.protocol import messages as m
from atoll.protocol.sample_order import MAX_POSITION
from atoll.protocol.settings import settings_to_json
from atoll.protocol.sync_settings import SyncSettings
from tests.unit.node_core.test_site import HASH, SETTINGS, Driver, commit, exchanged, opened, plan, started

ROUND = 8  # samples of the site a step
WINDOW = 10 * ROUND


def spans(*pairs: tuple[int, int]) -> tuple[m.DataRange, ...]:
    return tuple(m.DataRange(first=first, num_samples=end - first) for first, end in pairs)


def loading() -> Driver:
    """A member whose workers have announced their data; nothing is leased yet."""
    drive = started()
    announce(drive)
    return drive


def announce(drive: Driver) -> None:
    drive(e.DataAnnounced(generation=drive.generation, num_samples=1000, round_samples=ROUND, rounds_ahead=2))


def asked(drive: Driver) -> list[int]:
    return [s.wanted for s in drive.sent() if isinstance(s, m.LeaseRequest)]


def lease(drive: Driver, *pairs: tuple[int, int]) -> None:
    drive.receive(m.Leases(ranges=spans(*pairs)))


def draw(drive: Driver, first: int, *, epoch: int = 0, count: int = ROUND, rank: int = 0) -> tuple[m.DataRange, ...]:
    """What a rank gets; empty while it waits."""
    drive(e.DrawAsked(generation=drive.generation, rank=rank, epoch=epoch, first=first, num_samples=count))
    return drawn(drive)


def drawn(drive: Driver) -> tuple[m.DataRange, ...]:
    return next((o.ranges for o in drive.out if isinstance(o, out.AnswerDraw)), ())


def seal(drive: Driver, step: int, used: int, tokens: int = 100, *, of_shards: bool = False) -> None:
    drive.ask(step)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    report = e.SnapshotSealed(
        generation=drive.generation,
        step=step,
        tokens=tokens,
        num_steps=10,
        mean_loss=1.0,
        train_s=1.0,
        samples_used=used,
        of_shards=of_shards,
    )
    drive(report)


def listed(drive: Driver) -> tuple[m.DataRange, ...]:
    (ready,) = [s for s in drive.sent() if isinstance(s, m.Ready)]
    return ready.ranges


def commit_it(drive: Driver, number: int, sync: int, *, contributors: tuple[int, ...] = (1, 2)) -> None:
    done: tuple[m.DataRange, ...] = ()
    if 1 in contributors:
        done = drive.snapshot_samples()
        drive.receive(plan(sync, base=number - 1, contributors=contributors))
        exchanged(drive, sync)
    drive.receive(commit(number, sync, contributors=contributors, done=done))
    drive(e.CommitApplied(commit=number, state_hash=HASH))


def take(drive: Driver, number: int, step: int, seq: int) -> e.Answer:
    """The ranks take the new commit."""
    drive.ask(step, seq)
    wanted = [o for o in drive.out if isinstance(o, out.PublishState)]
    if wanted:
        drive(e.Published(wanted[0].content))
    answer = drive.answer()
    drive.merged(number)
    return answer


def test_two_windows_the_overrun_and_what_is_fetched_ahead_are_leased_at_first() -> None:
    drive = loading()
    assert asked(drive) == [3 * WINDOW + 2 * ROUND]
    drive(e.Tick())
    assert asked(drive) == [], "once"
    lease(drive, (0, 256))
    assert asked(drive) == []
    assert draw(drive, 0) == spans((0, 256))
    assert draw(drive, 250, count=6) == spans((250, 256))


@pytest.mark.parametrize("used", [257, (1 << 64) - 1])
def test_more_samples_than_were_leased_cannot_be_used(used: int) -> None:
    """The next request for leases would be beyond what a message holds, and break the stream, again and again."""
    drive = loading()
    lease(drive, (0, 256))
    seal(drive, 10, used=used)
    leave, *_ = drive.sent()
    assert isinstance(leave, m.Leave)
    assert f"they used {used} samples" in leave.reason
    assert not [s for s in drive.sent() if isinstance(s, m.Ready | m.LeaseRequest)]


def test_no_request_for_leases_is_beyond_the_positions_that_there_are() -> None:
    drive = loading()
    lease(drive, (0, 256))
    draw(drive, MAX_POSITION - 1)
    assert asked(drive) == [MAX_POSITION]


def test_a_rank_waits_for_what_is_not_leased() -> None:
    drive = loading()
    assert draw(drive, 0) == ()
    lease(drive, (700, 704))
    assert drawn(drive) == ()
    lease(drive, (20, 30), (700, 704))
    assert drawn(drive) == spans((700, 704), (20, 30)), "in the order in which they were leased"


def test_a_rank_that_needs_more_than_was_thought_is_leased_more() -> None:
    drive = loading()
    lease(drive, (0, 256))
    assert draw(drive, 256) == ()
    assert asked(drive) == [256 + ROUND + WINDOW]


def test_a_site_that_got_less_than_it_wants_asks_again_once_something_has_changed() -> None:
    drive = loading()
    lease(drive, (0, 200))
    assert asked(drive) == [], "the answer would be the same"
    drive(e.Tick())
    assert asked(drive) == []
    assert draw(drive, 200) == ()
    assert asked(drive) == [200 + ROUND + WINDOW]


def test_ready_lists_what_is_used_and_the_commit_ends_it() -> None:
    drive = loading()
    lease(drive, (0, 40), (500, 716))
    seal(drive, 10, WINDOW)
    assert listed(drive) == spans((0, 40), (500, 540))
    assert asked(drive) == [256 + WINDOW], "as much again, as none of it is in a commit yet"
    lease(drive, (0, 40), (500, 796))
    commit_it(drive, 1, 1)
    take(drive, 1, 10, 1)
    assert drive.leased_samples() == spans((540, 796))
    seal(drive, 20, 2 * WINDOW)
    assert listed(drive) == spans((540, 620))


def test_steps_of_several_batches_are_learnt() -> None:
    drive = loading()
    lease(drive, (0, 256))
    seal(drive, 10, 3 * WINDOW)
    assert asked(drive) == [3 * WINDOW + 3 * (3 * WINDOW) + 2 * ROUND]


def test_a_shard_in_progress_is_leased_and_in_no_ready_until_it_is_finished() -> None:
    """Of two ranks, with the shards that come next; what is leased does not grow with steps."""
    drive = started()
    drive(e.DataAnnounced(generation=drive.generation, num_samples=50, round_samples=2, rounds_ahead=2, of_shards=True))
    assert asked(drive) == [4]
    lease(drive, (0, 4))
    assert draw(drive, 0, count=2) == spans((0, 4))
    for number, used in ((1, 0), (2, 0), (3, 2)):
        seal(drive, 10 * number, used, of_shards=True)
        (ready,) = [s for s in drive.sent() if isinstance(s, m.Ready)]
        assert (ready.ranges, ready.of_shards) == (spans(*[(0, used)] * (used > 0)), True)
        assert asked(drive) == ([6] if used else []), "the next round, once one is through"
        commit_it(drive, number, number)
        take(drive, number, 10 * number, 1)
    assert drive.leased_samples() == spans((2, 4)), "the round in progress"
    assert asked(drive) == []
    drive.receive(m.Leases(ranges=spans((2, 6))))
    assert draw(drive, 4, count=2) == spans((4, 6))


def test_2_a_site_that_missed_the_sync_lists_the_same_and_more_in_the_next_one() -> None:
    drive = loading()
    lease(drive, (0, 400))
    seal(drive, 10, WINDOW)
    commit_it(drive, 1, 1, contributors=(2, 3))
    assert take(drive, 1, 10, 1).mode is MergeMode.SHIFT
    assert drive.leased_samples() == spans((0, 400))
    drive(e.Published(e.Values(1)))
    seal(drive, 10, WINDOW + ROUND)
    assert listed(drive) == spans((0, WINDOW + ROUND))


def test_steps_beyond_the_boundary_are_listed_in_the_next_ready() -> None:
    drive = loading()
    lease(drive, (0, 400))
    seal(drive, 10, WINDOW)
    drive(e.SessionLost("gone"))
    drive.now += 100
    drive.ask(10, 1)
    assert drive.answer().next_step == 11
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), started=True))
    commit_it(drive, 1, 1)
    assert take(drive, 1, 11, 0).mode is MergeMode.MERGE
    seal(drive, 20, 2 * WINDOW)
    assert listed(drive) == spans((WINDOW, 2 * WINDOW))


def test_what_the_coordinator_says_twice_changes_nothing() -> None:
    drive = loading()
    lease(drive, (0, 256))
    lease(drive, (0, 256))
    assert drive.queue_places() == (0, 256)


def test_a_question_that_was_lost_is_asked_again() -> None:
    drive = loading()
    drive(e.SessionLost("gone"))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), started=True))
    assert asked(drive) == [256]


def test_25_after_an_eviction_nothing_is_left_and_the_ranks_hear_of_the_new_epoch() -> None:
    drive = loading()
    lease(drive, (0, 256))
    drive.receive(m.Evicted(reason="silent"))
    assert drive.leased_samples() == ()
    # On the way to the boundary a rank still gets samples: they will not count.
    assert draw(drive, 256) == spans((0, ROUND))
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), started=True))
    assert asked(drive) == [], "not admitted yet"
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))
    assert asked(drive) == [256]
    lease(drive, (256, 512))
    drive.receive(opened(1, 0))
    answer = take(drive, 0, 10, 0)
    assert (answer.kind, answer.mode, answer.data_epoch) == (AnswerKind.APPLY, MergeMode.REPLACE, 1)
    assert draw(drive, 0, epoch=1) == spans((256, 512))


def evicted_and_ready_again(*, is_sent: bool) -> Driver:
    """For the same sync, with error feedback. `is_sent`: what it had sealed before, too."""
    errors = replace(SETTINGS.sync, codec="sign1", error_feedback=0.5)
    drive = started(settings=replace(SETTINGS, sync=errors))
    announce(drive)
    lease(drive, (0, 256))
    seal(drive, 10, WINDOW)
    if is_sent:
        drive.receive(plan(1))
        exchanged(drive, 1)
    drive.receive(m.Evicted(reason="an operator asked for it"))
    drive.receive(m.Welcome(settings_json=settings_to_json(drive.core.settings), started=True))
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))
    lease(drive, (256, 512))
    drive.receive(opened(1, 0))
    assert take(drive, 0, 10, 1).mode is MergeMode.REPLACE
    seal(drive, 20, WINDOW)
    assert listed(drive) == spans((256, 256 + WINDOW))
    return drive


def test_25_a_commit_of_what_an_eviction_discarded_holds_nothing_of_what_was_trained_since() -> None:
    """Its reducers had the contribution when the site was evicted; the site is ready again for the same sync."""
    drive = evicted_and_ready_again(is_sent=True)
    drive.receive(commit(1, 1, done=spans((0, WINDOW))))
    assert [o for o in drive.out if isinstance(o, out.AdvanceErrors | out.ApplyCommit)] == [
        out.ApplyCommit(commit(1, 1, done=spans((0, WINDOW))))
    ]
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.leased_samples() == spans((256, 512))
    assert take(drive, 1, 20, 1).mode is MergeMode.SHIFT
    seal(drive, 20, WINDOW)
    assert listed(drive) == spans((256, 256 + WINDOW)), "it is contributed to the next sync"


def test_25_what_is_sealed_after_an_eviction_is_in_the_commit_of_the_same_sync_if_nothing_was_sent_before() -> None:
    drive = evicted_and_ready_again(is_sent=False)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(commit(1, 1, done=spans((256, 256 + WINDOW))))
    drive.wants(out.AdvanceErrors)
    drive(e.ErrorsAdvanced())
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.leased_samples() == spans((256 + WINDOW, 512))
    assert take(drive, 1, 20, 1).mode is MergeMode.REPLACE


def restarted(drive: Driver) -> None:
    """The workers crash and come back."""
    drive(e.WorkersFailed(generation=drive.generation, kind=e.FailureKind.CRASHED, text="killed"))
    drive.joined()


def test_4_samples_that_crashed_workers_had_drawn_are_drawn_again() -> None:
    drive = loading()
    lease(drive, (0, 256))
    draw(drive, 0)
    draw(drive, 300, rank=1)
    restarted(drive)
    answer = take(drive, 0, 0, 0)
    assert (answer.fresh, answer.data_epoch) == (True, 1)
    assert drive.num_draws_waiting() == 0, "who asked is gone"
    announce(drive)
    assert draw(drive, 0, epoch=1) == spans((0, 256))


def test_4_a_sealed_snapshot_of_crashed_workers_is_not_drawn_again_unless_it_is_given_up() -> None:
    for is_committed in (True, False):
        drive = loading()
        lease(drive, (0, 256))
        seal(drive, 10, WINDOW)
        lease(drive, (0, 336))
        restarted(drive)
        take(drive, 0, 0, 0)
        announce(drive)
        assert draw(drive, 0, epoch=1) == spans((WINDOW, 336))
        commit_it(drive, 1, 1, contributors=(1, 2) if is_committed else (2, 3))
        if is_committed:
            assert drive.leased_samples() == spans((WINDOW, 336))
            assert drive.queued_samples() == spans((WINDOW, 336))
        else:
            assert drive.queued_samples() == spans((WINDOW, 336), (0, WINDOW)), "drawn again, behind the others"


def test_a_rank_that_draws_what_is_in_a_commit_is_a_fatal_error() -> None:
    drive = loading()
    lease(drive, (0, 256))
    seal(drive, 10, WINDOW)
    commit_it(drive, 1, 1)
    draw(drive, 0)
    (end,) = [o for o in drive.out if isinstance(o, out.Exit)]
    assert "that a commit lists" in end.text


def test_a_site_that_leaves_asks_only_for_what_a_rank_waits_for() -> None:
    drive = loading()
    lease(drive, (0, 256))
    drive(e.LeaveAsked("ctrl-c"))
    seal(drive, 10, WINDOW)
    assert asked(drive) == []
    draw(drive, 256)
    assert asked(drive) == [256 + ROUND + WINDOW]


def test_after_the_last_commit_nobody_waits_for_samples() -> None:
    """A loader that fetches ahead must not keep the rank from the boundary where it hears of the end."""
    drive = loading()
    lease(drive, (0, 256))
    draw(drive, 256)
    drive.receive(commit(1, 1, contributors=(2, 3), final=True))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drawn(drive) == spans((0, ROUND))


def test_ranks_that_train_on_beyond_their_snapshot_do_not_wait_for_leases() -> None:
    """The coordinator has gone before it answered what was asked for at the snapshot: they come to the next boundary,
    and to the end of the overrun beyond it."""
    settings = replace(SETTINGS, overrun_steps=8, sync=SyncSettings(every=10, overlap_steps=8))
    drive = started(settings=settings)
    announce(drive)
    (wanted,) = asked(drive)
    lease(drive, (0, wanted))
    drive.receive(replace(opened(1, 0), overlap_steps=8))
    seal(drive, 10, used=WINDOW)
    assert asked(drive), "for the window after the next one"
    drive(e.SessionLost("connection reset"))
    for step in range(10, 28):
        assert draw(drive, step * ROUND), step
