"""A site that rests: its ranks train on until its turn, while there is a coordinator, and not for ever."""

from __future__ import annotations

from dataclasses import replace

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.events import AnswerKind
from atoll.node.core.lanes.answers import MOST_RESTED
from tests.unit.node_core.test_site import SETTINGS, Driver, opened, started

EVERY = 10


def resting(sync: int = 2, *site_ids: int) -> Driver:
    """A member whose ranks train from commit 0, and whose sync names these sites, by default this one."""
    drive = started()
    drive.receive(replace(opened(sync, 0), resting=site_ids or (1,)))
    return drive


def asked(drive: Driver, step: int) -> e.Answer | None:
    """What the ranks are told; None: they are held."""
    drive.ask(step)
    answers = [o.answer for o in drive.out if isinstance(o, out.AnswerWorkers)]
    return answers[0] if answers else None


def test_ranks_train_on_beyond_the_boundary_and_ask_again_soon() -> None:
    answer = asked(resting(), EVERY)
    assert answer is not None
    assert answer.kind is AnswerKind.CONTINUE
    assert EVERY < answer.next_step < 2 * EVERY


def test_where_others_rest_ranks_write_their_snapshot() -> None:
    answer = asked(resting(2, 2, 3), EVERY)
    assert answer is not None
    assert answer.kind is AnswerKind.SNAPSHOT


def test_ranks_train_a_bounded_number_of_windows_without_a_commit() -> None:
    """Then they wait: in a snapshot of that sync these steps could not be in the one in which the site's turn comes."""
    drive, step, num_asked = resting(), EVERY, 0
    while (answer := asked(drive, step)) is not None:
        assert answer.kind is AnswerKind.CONTINUE
        step, num_asked = answer.next_step, num_asked + 1
        assert num_asked < 100 * MOST_RESTED
    assert step >= MOST_RESTED * EVERY
    drive.receive(replace(opened(3, 0), fragment=0))
    (turn,) = [o.answer for o in drive.out if isinstance(o, out.AnswerWorkers)]
    assert turn.kind is AnswerKind.SNAPSHOT


def test_without_a_coordinator_ranks_write_their_snapshot_and_train_the_overrun_alone() -> None:
    drive = resting()
    drive(e.SessionLost("connection reset"))
    drive.now += drive.core.limits.lease_s
    drive(e.Tick())
    answer = asked(drive, EVERY)
    assert answer is not None
    assert answer.kind is AnswerKind.SNAPSHOT
    drive.sealed(EVERY)
    last = asked(drive, EVERY)
    step = EVERY
    while last is not None:
        assert last.kind is AnswerKind.CONTINUE
        step = last.next_step
        last = asked(drive, step)
    assert step == EVERY + (SETTINGS.overrun_steps or EVERY)
