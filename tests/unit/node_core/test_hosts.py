"""Sites of several hosts: slices of a sealed snapshot that are on their way, and hosts that are not here."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.disk import Outer
from atoll.node.core.events import AnswerKind, MergeMode
from atoll.node.core.host_events import HostsChanged
from atoll.node.core.ranks.pieces import site_pieces
from atoll.node.local_protocol import LOCAL_VERSION, Boundary, LocalHello, MergedReport, Piece, Said
from atoll.protocol import messages as m
from atoll.protocol.settings import RunSettings, settings_to_json
from tests.harness.ranks import offer
from tests.harness.site_questions import a_node_core, wanted
from tests.unit.node_core.test_crashes import crash, reconnected, starts, wait, waiting
from tests.unit.node_core.test_fragments import started as started_in_fragments
from tests.unit.node_core.test_leases import announce, asked, draw, lease, loading, spans
from tests.unit.node_core.test_overlap import TAU, overlapping, training
from tests.unit.node_core.test_seeding import JOINER, writing
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
    put_in_place,
    started,
    weights_of,
)

LOST = "host 1 of this site (b) is lost: silent for 3 s"
HELD = Outer(commit=0, state_hash=HASH, run_step=0, run_tokens=0)


def sealed(drive: Driver, step: int, *, is_arriving: bool = True) -> None:
    """The ranks have written what they were told to."""
    report = e.SnapshotSealed(
        generation=drive.generation, step=step, tokens=100, num_steps=10, mean_loss=1.0, train_s=1.0,
        is_arriving=is_arriving,
    )  # fmt: skip
    drive(report)


def arrives(drive: Driver, step: int, *, seq: int = 0, fragment: int = 0, generation: int = 0) -> None:
    drive(e.SnapshotArrived(generation=generation or drive.generation, fragment=fragment, step=step, seq=seq))


def arriving(drive: Driver, step: int = 10) -> Driver:
    """The ranks have sealed; slices of other hosts are on their way."""
    drive.ask(step)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    sealed(drive, step)
    assert drive.out == []
    return drive


def ready(drive: Driver) -> list[int]:
    """Syncs for which it says Ready."""
    return [s.sync for s in drive.sent() if isinstance(s, m.Ready)]


def changed(drive: Driver, *missing: int, text: str = "") -> None:
    drive(HostsChanged(missing, text or (LOST if missing else "")))


# --- slices on their way


def test_a_site_is_ready_when_all_slices_are_here() -> None:
    drive = arriving(started())
    drive.ask(10, 1)
    assert drive.out == [], "the ranks wait"
    arrives(drive, 10)
    assert ready(drive) == [1]
    drive.receive(plan(1))
    drive.wants(out.BeginExchange)


def test_ranks_train_on_while_slices_are_on_their_way() -> None:
    drive = training(overlapping())
    arriving(drive)
    drive.ask(10, 1)
    assert drive.answer() == e.Answer(kind=AnswerKind.CONTINUE, next_step=11)
    for step in range(11, 10 + TAU):
        drive.ask(step)
        assert drive.answer().kind is AnswerKind.CONTINUE
        assert ready(drive) == []
    drive.ask(10 + TAU)
    assert drive.out == [], "no further than where they may train"
    arrives(drive, 10)
    assert ready(drive) == [1]


def test_a_new_stream_hears_no_ready_of_what_is_on_its_way() -> None:
    drive = arriving(started())
    reconnected(drive)
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))
    drive.receive(opened(1, 0))
    assert ready(drive) == []
    arrives(drive, 10)
    assert ready(drive) == [1]


def test_a_contributor_whose_slices_are_on_their_way_says_that_it_cannot() -> None:
    drive = arriving(started())
    drive.receive(plan(1))
    failed = [s for s in drive.sent() if isinstance(s, m.ExchangeFailed)]
    assert [s.text for s in failed] == ["planned as a contributor without a sealed snapshot"]
    assert not [o for o in drive.out if isinstance(o, out.BeginExchange)]


def test_a_plan_that_was_made_ahead_waits_for_the_slices() -> None:
    """Its weights follow the Ready of all."""
    drive = arriving(started())
    drive.receive(replace(plan(1), contributors=tuple(replace(x, tokens=0) for x in plan(1).contributors)))
    assert not [o for o in drive.out if isinstance(o, out.BeginExchange)]
    arrives(drive, 10)
    assert ready(drive) == [1]
    drive.receive(weights_of(plan(1), 100, 100))
    assert drive.wants(out.BeginExchange)


def test_the_starting_state_is_made_when_all_slices_are_here() -> None:
    drive = writing()
    sealed(drive, 0)
    assert drive.out == []
    arrives(drive, 0)
    drive.wants(out.SeedState)


def test_slices_of_a_starting_state_that_another_site_makes_now_are_nothing() -> None:
    drive = writing()
    sealed(drive, 0)
    drive.receive(JOINER)
    arrives(drive, 0)
    assert not [o for o in drive.out if isinstance(o, out.SeedState)]
    assert drive.snapshot_phase() == "free"


def test_what_was_given_up_while_it_was_on_its_way_is_nothing_when_it_is_here() -> None:
    drive = arriving(started())
    missed(drive)
    arrives(drive, 10)
    assert drive.out == []


def missed(drive: Driver) -> None:
    """Commit 1 comes without this site."""
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.ask(10, 1)
    drive(e.Published(e.Difference(0, 1)))
    answer = drive.answer()
    assert (answer.mode, answer.next_step) == (MergeMode.SHIFT, 10)


@pytest.mark.parametrize("comes", ["while it is written", "while it is on its way"])
def test_slices_of_what_was_given_up_do_not_count_for_what_is_written_again_at_the_same_step(comes: str) -> None:
    """Those of each host come in order: it is the first that arrives late."""
    drive = arriving(started())
    missed(drive)
    drive.merged(1)
    drive(e.Published(e.Values(1)))
    drive.ask(10, 2)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    if comes == "while it is written":
        arrives(drive, 10, seq=0)
    sealed(drive, 10)
    if comes == "while it is on its way":
        arrives(drive, 10, seq=0)
    assert ready(drive) == []
    assert drive.out == []
    arrives(drive, 10, seq=2)
    assert ready(drive) == [2]


def test_slices_of_another_generation_or_step_do_not_count() -> None:
    drive = arriving(started())
    arrives(drive, 10, generation=7)
    assert drive.out == []
    arrives(drive, 9)
    assert drive.out == []
    arrives(drive, 10)
    assert ready(drive) == [1]
    arrives(drive, 10)
    assert drive.out == [], "once"


def test_slices_of_one_fragment_do_not_count_for_another() -> None:
    drive = started_in_fragments()
    drive.ask(10)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    sealed(drive, 10)
    arrives(drive, 10, fragment=1)
    assert ready(drive) == []
    arrives(drive, 10, fragment=0)
    assert ready(drive) == [1]


def test_a_crash_frees_what_is_on_its_way_and_keeps_what_is_here() -> None:
    drive = arriving(started())
    crash(drive)
    assert drive.snapshot_phase() == "free"
    arrives(drive, 10, generation=1)
    assert ready(drive) == []

    drive = arriving(started())
    arrives(drive, 10)
    crash(drive)
    assert drive.snapshot_phase() == "sealed"
    drive.receive(plan(1))
    drive.wants(out.BeginExchange)


# --- hosts that are not here


def of_two_hosts(held: Outer | None = HELD) -> Driver:
    drive = Driver(held, num_hosts=2)
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS)))
    return drive


def running() -> Driver:
    """A member of two hosts, at commit 0, whose workers train towards step 10."""
    drive = of_two_hosts()
    changed(drive)
    drive.joined()
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))
    drive.ask(0)
    drive.receive(opened(1, 0))
    drive(e.Published(e.Values(0)))
    drive.merged(0)
    return drive


def reported(drive: Driver, level: int) -> list[str]:
    return [o.text for o in drive.out if isinstance(o, out.Report) and o.level == level]


def test_workers_are_started_when_all_hosts_are_here() -> None:
    drive = of_two_hosts(None)
    assert not starts(drive)
    assert drive.core.phase == "waiting for hosts"
    changed(drive)
    assert drive.wants(out.StartWorkers) == out.StartWorkers(1, settings_to_json(SETTINGS))
    assert drive.core.phase == "starting workers"


def test_hosts_that_are_here_before_the_coordinator_are_waited_for_no_more() -> None:
    drive = Driver(num_hosts=3)
    changed(drive, 2, text="host 1 is here")
    assert not starts(drive)
    changed(drive)
    assert not starts(drive), "not before the run's settings are those of the coordinator"
    drive(e.SessionOpened())
    assert drive.core.phase == "connecting"
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS)))
    assert starts(drive)


def test_a_host_that_comes_and_goes_before_all_are_here_starts_nothing() -> None:
    drive = Driver(num_hosts=3)
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS)))
    changed(drive, 2, text="host 1 is here")
    changed(drive, 1, 2)
    changed(drive, 1, text="host 2 is here")
    assert not starts(drive)
    reconnected(drive)
    assert not starts(drive), "on a new stream neither"
    changed(drive)
    assert starts(drive)


def test_without_a_host_the_workers_stop_until_it_is_back_and_that_is_no_crash() -> None:
    drive = running()
    for generation in range(1, 5):
        changed(drive, 1)
        assert drive.wants(out.StopWorkers) == out.StopWorkers(generation)
        assert not starts(drive)
        assert reported(drive, logging.ERROR) == [f"{LOST}; the workers of this site stop until it is back"]
        assert drive.core.phase == "waiting for hosts"
        changed(drive)
        assert drive.wants(out.StartWorkers) == out.StartWorkers(generation + 1, settings_to_json(SETTINGS))
    crash(drive)
    assert starts(drive), "as after a first crash"


def test_what_workers_say_while_a_host_is_missing_does_not_count() -> None:
    drive = running()
    changed(drive, 1)
    late: tuple[e.Event, ...] = (
        e.BoundaryAsked(generation=1, step=10, seq=0),
        e.SnapshotSealed(generation=1, step=10, tokens=100, num_steps=10, mean_loss=1.0, train_s=1.0),
        e.SnapshotArrived(generation=1, fragment=0, step=10, seq=0),
        e.Merged(generation=1, version=0, wait_s=0.0),
        e.WorkersFailed(generation=1, kind=e.FailureKind.CRASHED, text="a rank of the lost host"),
        e.WorkersFailed(generation=1, kind=e.FailureKind.FATAL, text="it was cut off"),
        e.WorkersLeft(generation=1, reason="the loader ended"),
        e.WorkersExited(generation=1, code=0, text="stopped"),
    )
    for event in late:
        assert drive(event) == [], event
    drive.now += 1000.0
    assert not starts(drive)
    changed(drive)
    assert starts(drive)


def test_a_second_host_that_is_lost_is_said_and_changes_nothing() -> None:
    drive = Driver(HELD, num_hosts=3)
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS)))
    changed(drive)
    changed(drive, 1)
    changed(drive, 1, 2, text="host 2 of this site is lost")
    assert drive.out == [out.Report(logging.WARNING, "host 2 of this site is lost")]
    changed(drive, 2, text="")
    assert not starts(drive)
    changed(drive)
    assert starts(drive)


def test_a_host_that_starts_again_takes_the_workers_of_the_others_with_it() -> None:
    drive = running()
    changed(drive, 1, text="host 1 of this site has started again")
    changed(drive)
    assert drive.wants(out.StartWorkers) == out.StartWorkers(2, settings_to_json(SETTINGS))


def test_new_workers_begin_from_the_outer_state() -> None:
    drive = running()
    changed(drive, 1)
    drive.receive(plan(1, contributors=(2, 3), receivers=(1,)))
    exchanged(drive, 1)
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.holds() == 1, "it follows the others meanwhile"
    changed(drive)
    drive.joined()
    drive.wants(out.SendLayout)
    drive.ask(0)
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(1))
    drive(e.Published(e.Values(1)))
    answer = drive.answer()
    assert (answer.version, answer.fresh) == (1, True)


def test_a_host_that_is_lost_frees_what_is_on_its_way_and_keeps_what_is_exchanged() -> None:
    drive = arriving(running())
    changed(drive, 1)
    assert drive.snapshot_phase() == "free"

    drive = running()
    at_boundary(drive)
    drive.receive(plan(1))
    drive.wants(out.BeginExchange)
    exchanged(drive, 1)
    changed(drive, 1)
    assert drive.snapshot_phase() == "sealed"
    drive.receive(commit(1, 1))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.holds() == 1


def test_a_plan_of_a_later_sync_frees_no_snapshot_of_a_lost_host_before_its_commit_is_applied() -> None:
    """Else its samples, which that commit counts, would be drawn again."""
    drive = running()
    at_boundary(drive)
    drive.receive(plan(1))
    exchanged(drive, 1)
    changed(drive, 1)
    drive.receive(commit(1, 1))
    drive.wants(out.ApplyCommit)
    drive.receive(plan(2, base=1, contributors=(2, 3), receivers=(1,)))
    assert drive.snapshot_phase() == "sealed"


def test_a_starting_state_that_is_not_made_yet_is_written_again() -> None:
    drive = of_two_hosts(None)
    changed(drive)
    drive.joined()
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.SEEDER, run_seed=7))
    drive.ask(0)
    sealed(drive, 0)
    changed(drive, 1)
    changed(drive)
    drive.joined()
    drive.ask(0)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    sealed(drive, 0)
    assert drive.out == []
    arrives(drive, 0)
    drive.wants(out.SeedState)


def test_samples_stay_leased_and_are_drawn_anew() -> None:
    drive = loading()
    lease(drive, (0, 256))
    draw(drive, 0)
    assert draw(drive, 256) == (), "it waits for more leases"
    epoch = drive.data_epoch()
    changed(drive, 1)
    assert asked(drive) == []
    assert drive.num_draws_waiting() == 0, "who waited is gone"
    assert drive.data_epoch() == epoch + 1
    assert draw(drive, 8) == (), "nobody draws"
    changed(drive)
    drive.joined()
    announce(drive)
    assert draw(drive, 0, epoch=drive.data_epoch()) == spans((0, 256))


def test_a_host_that_is_lost_in_the_pause_after_a_crash_is_waited_for_behind_it() -> None:
    drive = waiting(running())
    generation = drive.generation
    changed(drive, 1)
    assert drive.out == [out.Report(logging.WARNING, LOST)]
    wait(drive)
    assert not starts(drive)
    assert drive.core.phase == "waiting for hosts"
    assert drive.deadline() is None, "nothing is due"
    changed(drive)
    assert drive.wants(out.StartWorkers) == out.StartWorkers(generation + 1, settings_to_json(SETTINGS))
    crash(drive)
    ended = drive.wants(out.Exit)
    assert isinstance(ended, out.Exit)
    assert ended.text == "the workers crashed 3 times without a step: killed by signal 9", "crashes count as before"


def test_a_host_that_is_back_before_the_pause_is_over_shortens_it_not() -> None:
    drive = waiting(running())
    changed(drive, 1)
    changed(drive)
    assert not starts(drive)
    wait(drive)
    assert starts(drive)


def test_a_site_that_leaves_ends_without_its_host() -> None:
    drive = running()
    changed(drive, 1)
    drive(e.LeaveAsked("asked to leave"))
    assert drive.wants(out.Exit) == out.Exit(0, "asked to leave")


def test_who_leaves_after_the_sync_starts_no_workers_for_a_host_that_is_back() -> None:
    drive = running()
    at_boundary(drive)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive(e.LeaveAsked("asked to leave"))
    changed(drive, 1)
    drive.wants(out.StopWorkers)
    changed(drive)
    assert not starts(drive)
    drive.receive(commit(1, 1))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.wants(out.Exit) == out.Exit(0, "asked to leave")


def test_who_leaves_while_a_host_is_missing_starts_no_workers_when_it_is_back() -> None:
    drive = running()
    at_boundary(drive)
    drive.receive(plan(1))
    exchanged(drive, 1)
    changed(drive, 1)
    drive(e.LeaveAsked("asked to leave"))
    changed(drive)
    assert not starts(drive), "it waits for the commit of what it has sent"


@pytest.mark.parametrize("is_lost", ["before", "after"])
def test_the_end_of_the_run_does_not_wait_for_a_host(is_lost: str) -> None:
    drive = running()
    at_boundary(drive)
    if is_lost == "before":
        changed(drive, 1)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(commit(1, 1, final=True))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    if is_lost == "after":
        changed(drive, 1)
        changed(drive)
        assert not starts(drive)
        drive(e.Published(e.Values(1)))
    put_in_place(drive, 1)
    assert drive.wants(out.Exit) == out.Exit(0, "the run is complete")


# --- with ranks


PIECES = (Piece(name="w", offsets=(0,), sizes=(8,), dtype="F32"),)


class Node:
    """A core with a rank on each of its hosts."""

    def __init__(self, num_hosts: int, held: Outer | None = HELD, settings: RunSettings = SETTINGS) -> None:
        self.now, self.num_ranks = 100.0, 2
        self.core = a_node_core(settings, self.now, self.num_ranks, held=held, num_hosts=num_hosts)
        self.generation = 0
        self(e.SessionOpened())
        self(e.Received(1, m.Welcome(settings_json=settings_to_json(settings))))
        self(HostsChanged(()))

    def __call__(self, event: e.Event) -> list[out.Output]:
        return wanted(self.core, event, self.now)

    def all_say(self, said: Said) -> list[out.Output]:
        found: list[out.Output] = []
        for rank in range(self.num_ranks):
            found += self(e.RankSaid(generation=self.generation, rank=rank, said=said))
        return found

    def joins(self) -> None:
        """New ranks, up to their layout."""
        self.generation += 1
        self.all_say(LocalHello(world_size=self.num_ranks, pid=5, protocol_version=LOCAL_VERSION))
        (merges,) = self.all_say(offer(MANIFEST, PIECES))
        assert isinstance(merges, out.MergePieces)
        pieces = site_pieces(merges.ranks)
        self(e.PiecesMerged(generation=self.generation, pieces=pieces, max_retained_bytes=1 << 20))


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_buffers_of_other_hosts_are_filled_anew_for_each_generation(num_hosts: int) -> None:
    """That of host 0 outlives its ranks: on one host new ranks take from it what it holds."""
    node = Node(num_hosts)
    node.joins()
    node(e.Received(1, m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7)))
    node(e.Received(1, opened(1, 0)))
    node(e.LayoutSent(1))
    assert out.PublishState(e.Values(0)) in node.all_say(Boundary(step=0, seq=0))
    node(e.Published(e.Values(0)))
    node.all_say(MergedReport(version=0, step=0, wait_s=0.0))
    node(e.WorkersFailed(generation=1, kind=e.FailureKind.CRASHED, text="killed", num_steps=5))
    node.joins()
    node(e.LayoutSent(2))
    asked_again = node.all_say(Boundary(step=0, seq=0))
    assert (out.PublishState(e.Values(0)) in asked_again) == (num_hosts == 2)


def test_a_state_is_asked_for_once_there_is_room_for_it() -> None:
    """A host is lost after the ranks have said what their model is, and before the site is told that it may join: there
    are no buffers and folders then, nor in the time without the host."""
    drive = Driver(num_hosts=2)
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS)))
    changed(drive)
    drive.wants(out.StartWorkers)
    drive.joined()
    changed(drive, 1)
    drive.receive(JOINER)
    assert not [message for message in drive.sent() if isinstance(message, m.FindSources)]
    changed(drive)
    drive.wants(out.StartWorkers)
    drive.joined()
    drive.wants(out.SendLayout)
    assert [message for message in drive.sent() if isinstance(message, m.FindSources)]
