"""Workers that crash: new ones at once, then after growing waits, then the site leaves. Rules 4, 5, 28, 42."""

from __future__ import annotations

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.workforce import MAX_CRASHES_IN_A_ROW
from atoll.protocol import messages as m
from atoll.protocol.errors import WorkerError
from atoll.protocol.settings import settings_to_json
from atoll.protocol.time_limits import PRESETS
from tests.unit.node_core.test_leases import announce, asked, draw, lease, loading, spans
from tests.unit.node_core.test_site import (
    HASH,
    SETTINGS,
    Driver,
    at_boundary,
    commit,
    exchanged,
    opened,
    plan,
    put_in_place,
    started,
)

LIMITS = PRESETS["local"]


def crash(drive: Driver, *, num_steps: int = 0, text: str = "killed by signal 9") -> None:
    drive(e.WorkersFailed(generation=drive.generation, kind=e.FailureKind.CRASHED, text=text, num_steps=num_steps))


def starts(drive: Driver) -> bool:
    return any(isinstance(o, out.StartWorkers) for o in drive.out)


def wait(drive: Driver) -> float:
    """Until what the core waits for; returns how long that is."""
    deadline = drive.deadline()
    assert deadline is not None
    assert deadline > drive.now
    waited_s, drive.now = deadline - drive.now, deadline
    drive(e.Tick())
    return waited_s


def waiting(drive: Driver) -> Driver:
    """Its workers have crashed twice, and new ones are not there yet."""
    crash(drive)
    crash(drive)
    assert drive.core.phase == "waiting to restart workers"
    return drive


def reconnected(drive: Driver) -> None:
    drive(e.SessionLost("connection reset"))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), site_id=1))


def test_42_the_first_crash_restarts_at_once_the_second_waits_the_third_without_a_step_leaves() -> None:
    drive = started()
    crash(drive)
    assert drive.wants(out.StartWorkers) == out.StartWorkers(2, settings_to_json(SETTINGS))
    drive.joined()
    drive.wants(out.SendLayout)
    drive.ask(0)
    assert drive.answer().fresh
    crash(drive)
    assert drive.wants(out.StopWorkers) == out.StopWorkers(2)
    assert not starts(drive)
    assert wait(drive) == LIMITS.restart_s
    assert drive.wants(out.StartWorkers) == out.StartWorkers(3, settings_to_json(SETTINGS))
    crash(drive)
    assert next(s for s in drive.sent() if isinstance(s, m.Leave)).fatal
    exit_output = drive.wants(out.Exit)
    assert exit_output == out.Exit(
        WorkerError.exit_code, "the workers crashed 3 times without a step: killed by signal 9"
    )


def test_waits_grow_to_a_bound_and_crashes_before_any_boundary_leave_in_the_end() -> None:
    drive = started()
    waits = []
    for _ in range(MAX_CRASHES_IN_A_ROW - 1):
        crash(drive, num_steps=3)
        waits.append(0.0 if starts(drive) else wait(drive))
        assert starts(drive)
    assert waits == [0, 3, 6, 12, 24, 48, 60, 60, 60]
    assert waits[-1] == LIMITS.max_restart_s
    crash(drive, num_steps=3)
    ended = drive.wants(out.Exit)
    assert isinstance(ended, out.Exit)
    assert ended.text == "the workers crashed 10 times without coming to a boundary: killed by signal 9"


def test_a_step_between_crashes_keeps_the_site_in_the_run_and_a_boundary_ends_the_waits() -> None:
    drive = started()
    for num_steps in (0, 3, 0, 0):
        if drive.deadline() is not None:
            wait(drive)
        assert drive.workers_run()
        crash(drive, num_steps=num_steps)
    wait(drive)
    drive.joined()
    drive.ask(0)
    drive(e.Published(e.Values(0)))
    drive.merged(0)
    drive.ask(10)
    crash(drive, num_steps=10)
    assert starts(drive)


def test_the_reason_of_a_leave_holds_the_end_of_what_the_workers_printed() -> None:
    drive = started()
    printed = "\n".join(f"[rank 0] line {n:03} of a traceback" for n in range(100))
    for _ in range(2):
        crash(drive)
    wait(drive)
    crash(drive, text=f"the workers ended with exit code 1\n{printed}\n[rank 0] ValueError: no such column")
    (reason,) = [s.reason for s in drive.sent() if isinstance(s, m.Leave)]
    assert reason.startswith("the workers crashed 3 times without a step: the workers ended with exit code 1\n...\n")
    assert reason.endswith("of a traceback\n[rank 0] ValueError: no such column")
    assert len(reason) == 1024
    ended = drive.wants(out.Exit)
    assert isinstance(ended, out.Exit)
    assert printed in ended.text, "here all of it is shown"


# --- the site while it waits


def test_nothing_that_dead_workers_said_counts() -> None:
    drive = waiting(started())
    late: tuple[e.Event, ...] = (
        e.BoundaryAsked(generation=2, step=10, seq=0),
        e.SnapshotSealed(generation=2, step=10, tokens=100, num_steps=10, mean_loss=1.0, train_s=1.0),
        e.Merged(generation=2, version=0, wait_s=0.0),
        e.WorkersFailed(generation=2, kind=e.FailureKind.FATAL, text="it was cut off"),
        e.WorkersLeft(generation=2, reason="the loader ended"),
    )
    for event in late:
        assert drive(event) == [], event
    assert wait(drive) == LIMITS.restart_s
    assert starts(drive)


def test_a_new_session_does_not_start_the_workers_before_their_time() -> None:
    drive = waiting(started())
    reconnected(drive)
    assert not starts(drive)
    assert any(isinstance(s, m.Offer) for s in drive.sent()), "it stays a member"
    wait(drive)
    assert starts(drive)


def test_the_snapshot_of_dead_workers_is_committed_meanwhile() -> None:
    drive = started()
    at_boundary(drive)
    waiting(drive)
    reconnected(drive)
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))
    assert any(isinstance(s, m.Ready) for s in drive.sent())
    drive.receive(plan(1))
    drive.wants(out.BeginExchange)
    exchanged(drive, 1)
    drive.receive(commit(1, 1))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.holds() == 1
    assert drive.core.phase == "waiting to restart workers"


def test_samples_stay_leased_and_are_drawn_again_by_the_new_workers() -> None:
    drive = loading()
    lease(drive, (0, 256))
    draw(drive, 0)
    waiting(drive)
    assert asked(drive) == []
    drive.receive(opened(2, 0))
    assert asked(drive) == [], "nobody draws"
    wait(drive)
    drive.joined()
    announce(drive)
    assert draw(drive, 0, epoch=drive.data_epoch()) == spans((0, 256))


def test_the_end_of_the_run_and_ctrl_c_do_not_wait_for_new_workers() -> None:
    drive = waiting(started())
    drive.receive(plan(1, contributors=(2, 3), receivers=(1,)))
    exchanged(drive, 1)
    drive.receive(commit(1, 1, contributors=(2, 3), final=True))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    put_in_place(drive, 1)
    assert drive.wants(out.Exit) == out.Exit(0, "the run is complete")

    drive = waiting(started())
    drive(e.LeaveAsked("asked to leave"))
    assert drive.wants(out.Exit) == out.Exit(0, "asked to leave")


def test_who_leaves_after_the_sync_starts_no_workers_any_more() -> None:
    """The snapshot is others' business by now; the workers that wrote it are not needed for it."""
    for leaves_first in (True, False):
        drive = started()
        at_boundary(drive)
        if leaves_first:
            drive(e.LeaveAsked("asked to leave"))
            crash(drive)
            drive.wants(out.StopWorkers)
        else:
            waiting(drive)
            drive(e.LeaveAsked("asked to leave"))
        assert not starts(drive)
        reconnected(drive)
        assert not starts(drive)
        drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))
        deadline = drive.deadline()
        assert deadline is not None
        assert deadline == drive.now + LIMITS.leave_s, "of the leave, not of new workers"
        drive.receive(plan(1))
        exchanged(drive, 1)
        drive.receive(commit(1, 1))
        drive(e.CommitApplied(commit=1, state_hash=HASH))
        assert drive.wants(out.Exit) == out.Exit(0, "asked to leave")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("killed by signal 9", "killed by signal 9"),
        (
            "the workers ended with exit code 1\n[rank 0] Traceback\n[rank 0] KeyError: 'x'\n",
            "the workers ended with exit code 1: [rank 0] KeyError: 'x'",
        ),
        ("a" * 900, "a" * 400),
        ("a" * 900 + "\n" + "b" * 900, "a" * 198 + ": " + "b" * 200),
    ],
)
def test_why_they_crashed_last_is_known_in_a_line(text: str, line: str) -> None:
    drive = started()
    crash(drive, text=text)
    assert drive.crashes() == (1, line)
