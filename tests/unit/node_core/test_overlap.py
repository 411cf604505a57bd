"""Ranks train on beyond their sealed snapshot while the sites talk. The whole course is in tests/golden."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.events import AnswerKind, MergeMode
from atoll.node.core.lanes.exchanges import DEADLINE_SPREADS, SENDING
from atoll.protocol import messages as m
from atoll.protocol.errors import PeerError
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.unit.node_core.test_site import HASH, SETTINGS, Driver, commit, exchanged, opened, plan, started

STEP_S = 0.5
TAU = 8


def overlapping(**sync: object) -> RunSettings:
    return replace(SETTINGS, sync=SyncSettings(every=10, overlap_steps=TAU, **sync))  # type: ignore[arg-type]


def training(settings: RunSettings) -> Driver:
    """A member whose sync says that ranks may train on for as long as the run allows."""
    drive = started(settings=settings)
    drive.receive(opened_for(1, 0))
    return drive


def opened_for(sync: int, base: int, overlap_steps: int = TAU) -> m.Open:
    return replace(opened(sync, base), overlap_steps=overlap_steps)


def committed(number: int) -> m.Commit:
    return replace(commit(number, number), next=opened_for(number + 1, number))


def seal(drive: Driver, step: int) -> e.Answer | None:
    """What the ranks are told right after they have sealed the snapshot of this step; None: they are held."""
    train(drive, 10)
    drive.ask(step)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    drive.sealed(step)
    drive.ask(step, 1)
    return answered(drive)


def train(drive: Driver, num_steps: int) -> None:
    drive.now += num_steps * STEP_S


def answered(drive: Driver) -> e.Answer | None:
    answers = [o.answer for o in drive.out if isinstance(o, out.AnswerWorkers)]
    return answers[0] if answers else None


def update(drive: Driver, found: m.Commit, after_s: float = 0.0) -> None:
    """The sync ends, so long after this, and its commit is applied."""
    drive.receive(plan(found.sync, base=found.commit - 1))
    drive.now += after_s
    exchanged(drive, found.sync)
    drive.receive(found)
    drive(e.CommitApplied(commit=found.commit, state_hash=HASH))


def take(drive: Driver, version: int, step: int) -> e.Answer:
    """The ranks ask, train a step while it is written for them, and take it."""
    drive.ask(step)
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(version))
    waits = drive.answer()
    assert (waits.kind, waits.next_step, waits.version) == (AnswerKind.CONTINUE, step + 1, version)
    drive(e.Published(e.Values(version)))
    assert answered(drive) is None, "they train"
    train(drive, 1)
    drive.ask(step + 1)
    answer = drive.answer()
    drive.merged(version)
    return answer


def test_ranks_ask_when_the_update_is_expected_and_then_more_often() -> None:
    drive = training(overlapping())
    first = seal(drive, 10)
    assert first is not None
    assert first.next_step == 11, "nothing is known yet"
    update(drive, committed(1), after_s=2.0)
    assert take(drive, 1, 11).next_step == 20
    second = seal(drive, 20)
    assert second is not None
    assert second.next_step == 24, "2 s are 4 steps"
    train(drive, 4)
    drive.ask(24)
    assert drive.answer() == e.Answer(kind=AnswerKind.CONTINUE, next_step=25), "it is later than expected"
    train(drive, 1)
    drive.ask(25)
    assert drive.answer().next_step == 26


def test_of_an_update_that_is_very_late_ranks_ask_ever_more_rarely() -> None:
    drive = training(replace(overlapping(), sync=SyncSettings(every=1000, overlap_steps=1000)))
    drive.receive(replace(opened_for(1, 0, 1000), num_steps=10))
    assert seal(drive, 10) is not None
    step, num_questions = 11, 0
    while step < 1010:
        drive.now += 0.01 * (step - 10) if num_questions == 0 else 0
        train(drive, 1)
        drive.ask(step)
        answer = drive.answer()
        train(drive, answer.next_step - step - 1)
        step, num_questions = answer.next_step, num_questions + 1
    assert step == 1010
    assert num_questions < 100


def test_the_least_of_the_last_updates_is_expected_next() -> None:
    drive = training(overlapping())
    for number, took_s in ((1, 3.0), (2, 1.0), (3, 3.5)):
        assert seal(drive, 10 * number) is not None
        update(drive, committed(number), after_s=took_s)
        take(drive, number, 10 * number + 1)
    answer = seal(drive, 40)
    assert answer is not None
    assert answer.next_step == 42


def test_they_are_held_when_no_steps_are_left_and_the_next_boundary_counts_from_the_snapshot() -> None:
    drive = training(overlapping())
    assert seal(drive, 10) is not None
    drive.ask(18)
    assert answered(drive) is None
    update(drive, committed(1))
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(1))
    assert answered(drive) is None, "it is waited for"
    drive(e.Published(e.Values(1)))
    answer = drive.answer()
    assert (answer.mode, answer.next_step, answer.run_step) == (MergeMode.MERGE, 20, 10)


@pytest.mark.parametrize(("asked_at", "mode"), [(10, MergeMode.REPLACE), (13, MergeMode.MERGE)])
def test_keep_is_to_take_the_values_where_nothing_was_trained_since(asked_at: int, mode: MergeMode) -> None:
    drive = training(replace(overlapping(), sync=SyncSettings(every=10, overlap_steps=3)))
    drive.receive(opened_for(1, 0, asked_at - 10))
    assert (seal(drive, 10) is None) == (asked_at == 10)
    if asked_at > 10:
        drive.ask(asked_at)
    update(drive, committed(1))
    drive(e.Published(e.Values(1)))
    assert drive.answer().mode is mode


@pytest.mark.parametrize("asked_at", [10, 13])
def test_mix_is_to_mix_whatever_was_trained_since(asked_at: int) -> None:
    drive = training(overlapping(merge="mix", alpha=0.5))
    drive.receive(opened_for(1, 0, asked_at - 10))
    seal(drive, 10)
    if asked_at > 10:
        drive.ask(asked_at)
    update(drive, committed(1))
    drive(e.Published(e.Values(1)))
    answer = drive.answer()
    assert (answer.mode, answer.next_step) == (MergeMode.MIX, 20)


@pytest.mark.parametrize("settings", [overlapping(), overlapping(merge="mix", alpha=0.5)], ids=["keep", "mix"])
def test_of_the_last_sync_nothing_is_trained_beyond_and_its_values_are_taken(settings: RunSettings) -> None:
    drive = training(settings)
    drive.receive(opened_for(1, 0, 0))
    assert seal(drive, 10) is None
    update(drive, commit(1, 1, final=True))
    drive(e.Published(e.Values(1)))
    assert drive.answer().mode is MergeMode.REPLACE


def test_workers_that_were_started_anew_do_not_train_beyond_the_snapshot_of_those_before() -> None:
    drive = training(overlapping())
    assert seal(drive, 10) is not None
    drive(e.WorkersFailed(generation=1, kind=e.FailureKind.CRASHED, text="killed", num_steps=12))
    drive.joined()
    drive.ask(0)
    assert drive.answer().next_step == 10, "PUBLISH holds commit 0 still"
    drive.merged(0)
    drive.ask(10)
    assert answered(drive) is None
    update(drive, committed(1))
    drive(e.Published(e.Difference(0, 1)))
    assert drive.answer().mode is MergeMode.SHIFT, "what they trained is in no commit"


def test_a_snapshot_that_carries_over_lets_the_ranks_train_no_further() -> None:
    """The next sync opens on the same base: steps still count from the snapshot."""
    drive = training(overlapping())
    assert seal(drive, 10) is not None
    drive.receive(m.Abandoned(sync=1, reason="8 attempts failed", next=opened_for(2, 0)))
    assert [s.sync for s in drive.sent() if isinstance(s, m.Ready)] == [2]
    drive.ask(17)
    assert drive.answer().next_step == 18
    drive.ask(18)
    assert answered(drive) is None


def test_a_newer_commit_that_comes_while_one_is_written_is_taken_in_its_place() -> None:
    drive = training(overlapping())
    assert seal(drive, 10) is not None
    update(drive, committed(1))
    drive.ask(11)
    assert drive.answer().version == 1
    drive(e.Published(e.Values(1)))
    drive.receive(replace(commit(2, 2, contributors=(2, 3)), next=opened_for(3, 2)))
    drive(e.CommitApplied(commit=2, state_hash=HASH))
    assert take(drive, 2, 12) == e.Answer(
        kind=AnswerKind.APPLY, mode=MergeMode.MERGE, version=2, next_step=20, run_step=20, run_tokens=600, num_sites=3
    ), "of three sites: the two contributors, and itself before them"


def spread_s(drive: Driver, found: m.Plan) -> float:
    drive.receive(found)
    begun = drive.wants(out.BeginExchange)
    assert isinstance(begun, out.BeginExchange)
    return begun.spread_s


def test_what_is_sent_is_spread_over_most_of_the_time_in_which_they_train_on() -> None:
    drive = training(overlapping())
    seal(drive, 10)
    assert spread_s(drive, plan(1)) == SENDING * TAU * STEP_S


@pytest.mark.parametrize(("ending_s", "sending_s"), [(0.7, 5.0 - 1.4), (3.0, 5.0 / 2), (0.0, 5.0 * 0.9)])
def test_what_follows_the_sending_has_twice_the_time_that_it_took_within_bounds(
    ending_s: float, sending_s: float
) -> None:
    """The longest of the last ones. Ranks need five seconds for the overlap: as long as for eight steps before."""
    drive = training(overlapping())
    for number, took_s in enumerate((ending_s / 2, ending_s, 0.0), 1):
        seal(drive, 10 * number)
        spread = spread_s(drive, plan(number, base=number - 1))
        update(drive, committed(number), after_s=spread + took_s)
        take(drive, number, 10 * number + 1)
    seal(drive, 40)
    assert spread_s(drive, plan(4, base=3)) == pytest.approx(sending_s)


def test_of_an_exchange_that_broke_before_its_sync_was_committed_nothing_is_learnt() -> None:
    drive = training(overlapping())
    seal(drive, 10)
    assert spread_s(drive, plan(1)) == SENDING * TAU * STEP_S
    drive(e.ExchangeBroken(plan(1), PeerError("gone", 2)))
    drive.now += 60.0
    drive.receive(committed(1))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    take(drive, 1, 11)
    seal(drive, 20)
    assert spread_s(drive, plan(2, base=1)) == SENDING * 5.0


def test_an_exchange_that_begins_late_has_less_time() -> None:
    drive = training(overlapping())
    seal(drive, 10)
    train(drive, 2)
    assert spread_s(drive, plan(1)) == SENDING * (TAU - 2) * STEP_S
    drive = training(overlapping())
    seal(drive, 10)
    train(drive, TAU + 1)
    assert spread_s(drive, plan(1)) == 0


def test_a_deadline_that_is_near_has_the_sending_end_long_before() -> None:
    drive = training(overlapping())
    seal(drive, 10)
    assert spread_s(drive, replace(plan(1), deadline_s=4.0)) == 4.0 / DEADLINE_SPREADS


@pytest.mark.parametrize("why", ["another attempt", "not paced", "waits"])
def test_nothing_is_spread_where_somebody_waits(why: str) -> None:
    drive = training(overlapping(pace=why != "not paced"))
    if why == "waits":
        drive.receive(opened_for(1, 0, overlap_steps=0))
    seal(drive, 10)
    assert spread_s(drive, plan(1, attempt=2 if why == "another attempt" else 1)) == 0


@pytest.mark.parametrize("leaves", [False, True])
def test_ranks_that_wait_sooner_than_was_expected_end_the_spreading_once(leaves: bool) -> None:
    drive = training(overlapping())
    seal(drive, 10)
    assert spread_s(drive, plan(1)) > 0
    if leaves:
        drive(e.LeaveAsked("enough"))
    drive.ask(11 if leaves else 10 + TAU)
    assert drive.out == [out.HurryExchange(1)]
    drive(e.Tick())
    assert not any(isinstance(output, out.HurryExchange) for output in drive.out)
