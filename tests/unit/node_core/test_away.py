"""The coordinator is away until it says Welcome, whatever streams open and end meanwhile."""

from __future__ import annotations

import logging

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.events import AnswerKind
from atoll.protocol import messages as m
from atoll.protocol.errors import PeerError, RefusedError
from atoll.protocol.settings import settings_to_json
from tests.unit.node_core.test_site import SETTINGS, Driver, at_boundary, started

EVERY_S = 2.0
"""So often a stream opens and ends."""


def flap(drive: Driver, lasts_s: float) -> list[out.Output]:
    """Streams that open and end without a Welcome; all that the core wants meanwhile but Hello."""
    outputs: list[out.Output] = []
    until = drive.now + lasts_s
    while drive.now < until and not drive.has_ended():
        outputs += drive(e.SessionLost("the coordinator ended the session"))
        drive.now += EVERY_S
        outputs += drive(e.Tick())
        outputs += drive(e.SessionOpened())
    return [o for o in outputs if not (isinstance(o, out.Send) and isinstance(o.message, m.Hello))]


def test_streams_without_a_welcome_do_not_hold_the_workers_at_the_boundary() -> None:
    drive = started()
    at_boundary(drive)
    answers = [o for o in flap(drive, 4 * EVERY_S) if isinstance(o, out.AnswerWorkers)]
    assert [a.answer.kind for a in answers] == [AnswerKind.CONTINUE]


def test_streams_without_a_welcome_end_the_site_when_a_coordinator_that_is_gone_would() -> None:
    drive = started()
    began = drive.now
    ended = flap(drive, 10 * drive.core.limits.give_up_s)[-1]
    assert isinstance(ended, out.Exit)
    assert "no coordinator" in ended.text
    assert ended.code == PeerError.exit_code
    assert drive.now - began <= drive.core.limits.give_up_s + EVERY_S


def test_why_the_session_ends_is_said_once_and_again_after_a_welcome() -> None:
    drive = started()
    reports = [o for o in flap(drive, 20 * EVERY_S) if isinstance(o, out.Report)]
    assert [(r.level, "the coordinator ended the session" in r.text) for r in reports] == [(logging.WARNING, True)]
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), site_id=1))
    assert not drive.is_away()
    assert len([o for o in flap(drive, 20 * EVERY_S) if isinstance(o, out.Report)]) == 1


def test_a_refusal_is_heard_whatever_its_term() -> None:
    """A coordinator with an older copy of the store, or of another run, counts its starts in its own way."""
    drive = started()
    drive.receive(m.Pulse(), term=5)
    drive.receive(m.Refused(kind=m.RefusedKind.RUN, text="this coordinator has run 'another'"), term=1)
    ended = drive.wants(out.Exit)
    assert isinstance(ended, out.Exit)
    assert ended.code == RefusedError.exit_code
    assert "this coordinator has run 'another'" in ended.text
