"""With gradient exchange a gradient is of the commit before: a late one is dropped, and its samples are drawn again."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.events import AnswerKind, MergeMode
from atoll.protocol import messages as m
from atoll.protocol.errors import StateError
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.unit.node_core.test_leases import ROUND, announce, asked, commit_it, draw, lease, listed, seal, spans, take
from tests.unit.node_core.test_site import HASH, SETTINGS, Driver, commit, exchanged, opened, plan, started

GRADIENTS = replace(
    SETTINGS,
    sync=SyncSettings(strategy="gradient", every=1),
    outer=OuterSettings(optimizer="adamw", momentum=0.9),
)


def loading() -> Driver:
    drive = started(settings=GRADIENTS)
    announce(drive)
    return drive


def test_samples_of_many_steps_are_leased_at_once() -> None:
    assert asked(loading()) == [(2 * 64 + 2) * ROUND]


def test_a_gradient_that_a_commit_holds_counts_and_the_next_one_follows() -> None:
    drive = loading()
    lease(drive, (0, 400))
    seal(drive, 10, ROUND)
    commit_it(drive, 1, 1)
    answer = take(drive, 1, 10, 1)
    assert (answer.mode, answer.data_epoch, answer.next_step) == (MergeMode.REPLACE, 0, 20)
    assert drive.leased_samples() == spans((ROUND, 400))


def test_a_sealed_gradient_that_no_commit_holds_is_dropped() -> None:
    drive = loading()
    lease(drive, (0, 400))
    seal(drive, 10, ROUND)
    commit_it(drive, 1, 1, contributors=(2, 3))
    answer = take(drive, 1, 10, 1)
    assert (answer.mode, answer.data_epoch) == (MergeMode.REPLACE, 1)
    assert drive.leased_samples() == spans((0, 400))
    assert draw(drive, 0, epoch=1) == spans((0, 400))
    seal(drive, answer.next_step, ROUND)
    assert listed(drive) == spans((0, ROUND))


def test_an_empty_batch_is_not_drawn_again_and_again() -> None:
    """All its labels are masked: no commit ever holds it alone."""
    drive = loading()
    lease(drive, (0, 400))
    seal(drive, 10, ROUND, tokens=0)
    commit_it(drive, 1, 1, contributors=(2, 3))
    answer = take(drive, 1, 10, 1)
    assert (answer.mode, answer.data_epoch) == (MergeMode.REPLACE, 0)
    seal(drive, answer.next_step, 2 * ROUND)
    assert listed(drive) == spans((0, 2 * ROUND)), "the next gradient lists its samples too"


LOCAL = replace(
    GRADIENTS, sync=SyncSettings(strategy="momentum", every=1, warmup_commits=1, local_doubling=1, most_local_steps=32)
)


def test_in_the_middle_of_a_window_the_ranks_ask_about_once_a_second_and_hear_that_it_is_void() -> None:
    """Windows here are of 10 steps, as the coordinator says; a step takes 0.4 seconds."""
    drive = started(settings=LOCAL)
    announce(drive)
    lease(drive, (0, 4000))
    seal(drive, 10, ROUND)
    commit_it(drive, 1, 1)
    assert take(drive, 1, 10, 1).next_step == 20, "nothing is known yet of how long a step takes"
    drive.now += 4.0
    seal(drive, 20, 2 * ROUND)
    commit_it(drive, 2, 2)
    assert take(drive, 2, 20, 1).next_step == 23
    drive.now += 1.2
    drive.ask(23)
    answer = drive.answer()
    assert (answer.kind, answer.next_step) == (AnswerKind.CONTINUE, 26)
    commit_it(drive, 3, 3, contributors=(2, 3))
    drive.now += 1.2
    drive.ask(26)
    drive(e.Published(next(o.content for o in drive.out if isinstance(o, out.PublishState))))
    answer = drive.answer()
    assert (answer.kind, answer.mode, answer.data_epoch) == (AnswerKind.APPLY, MergeMode.REPLACE, 1)


def test_many_empty_batches_do_not_end_a_site_that_the_run_needs() -> None:
    drive = loading()
    lease(drive, (0, 4000))
    for number in range(1, 20):
        seal(drive, 10 * number, number * ROUND, tokens=0)
        assert listed(drive) == spans((0, number * ROUND))
        following = replace(opened(number + 1, 0), run_step=0)
        drive.receive(m.Abandoned(sync=number, reason="nobody has tokens", next=following, without_tokens=True))
        drive.ask(10 * number, 1)
        assert drive.answer().next_step == 10 * (number + 1)


def test_a_gradient_that_is_being_computed_is_dropped() -> None:
    drive = loading()
    lease(drive, (0, 400))
    commit_it(drive, 1, 1, contributors=(2, 3))
    answer = take(drive, 1, 10, 0)
    assert (answer.mode, answer.data_epoch) == (MergeMode.REPLACE, 1)


def test_a_gradient_that_is_being_written_is_dropped() -> None:
    drive = loading()
    lease(drive, (0, 400))
    seal(drive, 10, 3 * ROUND)
    commit_it(drive, 1, 1)
    take(drive, 1, 10, 1)
    drive.ask(20)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    commit_it(drive, 2, 2, contributors=(2, 3))
    report = e.SnapshotSealed(
        generation=drive.generation,
        step=20,
        tokens=100,
        num_steps=1,
        mean_loss=1.0,
        train_s=1.0,
        samples_used=6 * ROUND,
    )
    drive(report)
    assert not [message for message in drive.sent() if isinstance(message, m.Ready)]
    answer = take(drive, 2, 20, 1)
    assert answer.mode is MergeMode.REPLACE
    seal(drive, answer.next_step, ROUND)
    assert listed(drive) == spans((3 * ROUND, 4 * ROUND)), "drawn again, in an epoch of its own"


def test_a_state_that_is_fetched_drops_what_was_computed_before_it() -> None:
    drive = loading()
    lease(drive, (0, 400))
    seal(drive, 10, ROUND)
    drive.receive(commit(3, 3, contributors=(2, 3)))
    drive.receive(
        m.Sources(
            attested=(m.Attestation(commit=3, state_hash=HASH),),
            donors=(m.Donor(site_id=2, incarnation=1, address="b:1", commit=3),),
        )
    )
    drive(e.StateFetched(commit=3, state_hash=HASH, run_step=30, run_tokens=900, touched=(3,)))
    drive.receive(opened(4, 3))
    answer = take(drive, 3, 10, 1)
    assert (answer.mode, answer.data_epoch) == (MergeMode.REPLACE, 1)


def test_without_the_coordinator_no_step_follows_the_one_that_is_sealed() -> None:
    drive = loading()
    lease(drive, (0, 400))
    seal(drive, 10, ROUND)
    drive(e.SessionLost("gone"))
    drive.now += 100
    drive.ask(10, 1)
    assert not drive.out


def test_of_the_gradients_of_a_warm_up_nothing_is_left_over() -> None:
    sync = SyncSettings(strategy="momentum", every=1, warmup_commits=1, codec="sign1", down="int8", error_feedback=1.0)
    drive = started(settings=replace(GRADIENTS, sync=sync))
    announce(drive)
    lease(drive, (0, 400))
    for number in (1, 2):
        step = 10 * number
        drive.ask(step)
        drive.sealed(step)
        assert [message.error_commits for message in drive.sent() if isinstance(message, m.Ready)] == [(0,)]
        drive.receive(plan(number, base=number - 1))
        exchanged(drive, number)
        drive.receive(commit(number, number))
        advances = [output for output in drive.out if isinstance(output, out.AdvanceErrors)]
        assert len(advances) == number - 1
        if number == 1:
            drive(e.CommitApplied(commit=number, state_hash=HASH))
            assert not [report for report in drive.out if isinstance(report, out.Report) and report.level > 20]
            take(drive, number, step, 1)


THINNED = replace(
    GRADIENTS,
    sync=SyncSettings(
        strategy="momentum", every=1, warmup_commits=8, gradient_doubling=1, codec="sign1", error_feedback=1.0
    ),
)
"""Commits 3, 5, 6 and 7 are of momenta, and the others up to 8 of gradients."""


def test_an_error_lasts_over_a_commit_of_gradients() -> None:
    """To commit 4 no error is added, and it leaves none."""
    drive = started(settings=THINNED)
    announce(drive)
    lease(drive, (0, 4000))
    said, advanced = [], []
    for number in range(1, 7):
        step = 10 * number
        drive.ask(step)
        drive.sealed(step)
        said += [message.error_commits for message in drive.sent() if isinstance(message, m.Ready)]
        drive.receive(plan(number, base=number - 1))
        exchanged(drive, number)
        drive.receive(commit(number, number))
        for output in [output for output in drive.out if isinstance(output, out.AdvanceErrors)]:
            advanced.append(output.commit)
            drive(e.ErrorsAdvanced(share=0.5))
        drive(e.CommitApplied(commit=number, state_hash=HASH))
        assert not [report for report in drive.out if isinstance(report, out.Report) and report.level > 20]
        take(drive, number, step, 1)
    assert said == [(0,), (0,), (0,), (0,), (3,), (5,)]
    assert advanced == [3, 5, 6]


@pytest.mark.parametrize(("number", "left"), [(4, (3,)), (5, (0,))])
def test_gradients_of_an_earlier_start_leave_the_error_and_momenta_do_not(number: int, left: tuple[int, ...]) -> None:
    drive = started(settings=THINNED)
    drive.had_errors(3)
    of_before = m.Member(site_id=1, incarnation=0, address="127.0.0.1:1", tokens=100)
    made = commit(number, number, contributors=(2,))
    drive.receive(
        m.Sources(
            attested=(m.Attestation(commit=number, state_hash=HASH),),
            donors=(m.Donor(site_id=2, incarnation=1, address="b:1", commit=number),),
            commits=(replace(made, contributors=(of_before, *made.contributors)),),
        )
    )
    assert drive.errors() == left


@pytest.mark.parametrize(("told", "ends"), [((), True), ((0.02, 0.1), True), ((math.nextafter(0.01, 1), 0.1), False)])
def test_a_commit_with_other_rates_than_this_site_said_ends_it(told: tuple[float, ...], ends: bool) -> None:
    """But for the last digit, which another processor may have."""
    drive = loading()
    drive.ask(10)
    drive(
        e.SnapshotSealed(
            generation=drive.generation,
            step=10,
            tokens=100,
            num_steps=1,
            mean_loss=1.0,
            train_s=1.0,
            rates=(0.01, 0.1),
        )
    )
    assert [message.rates for message in drive.sent() if isinstance(message, m.Ready)] == [(0.01, 0.1)]
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(replace(commit(1, 1), rates=told))
    if not ends:
        assert not any(isinstance(each, out.Exit) for each in drive.out)
        return
    ended = drive.wants(out.Exit)
    assert isinstance(ended, out.Exit)
    assert ended.code == StateError.exit_code
