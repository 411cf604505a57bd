"""Every word to the coordinator is the core's: heartbeats, what a running fetch asks, the last words of a node."""

from __future__ import annotations

import typing

import pytest

from atoll.node.core import commits, site
from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.protocol import messages as m
from atoll.protocol.errors import HostError, PeerError
from atoll.protocol.exit_codes import ENDED_AT_ONCE
from tests.harness.fuzzing import COORDINATOR_MESSAGES
from tests.harness.site_questions import a_core
from tests.unit.node_core.test_site import SETTINGS, commit, plan, sources_of, started


def test_somebody_hears_of_every_event_and_of_every_message() -> None:
    assert set(site.EVENTS) == set(typing.get_args(e.Event))
    assert set(site.WORDS) == set(COORDINATOR_MESSAGES)


def test_heartbeats_go_while_there_is_a_stream() -> None:
    core = a_core(SETTINGS, None, 100.0)
    every_s = core.limits.heartbeat_s
    core.handle(e.SessionOpened(), 100.0)
    assert core.next_deadline() == 100.0 + every_s
    assert not core.handle(e.Tick(), 100.0 + every_s / 2)
    assert core.handle(e.Tick(), 100.0 + every_s) == [out.Beat()]
    assert core.next_deadline() == 100.0 + 2 * every_s
    core.handle(e.SessionLost("gone"), 100.0 + every_s)
    assert out.Beat() not in core.handle(e.Tick(), 100.0 + 2 * every_s)


def test_a_second_ctrl_c_ends_it_with_the_last_figures_and_a_word() -> None:
    drive = started()
    outputs = drive.core.handle(e.LeaveAsked("enough", at_once=True), drive.now)
    assert outputs[:2] == [out.Beat(), out.Send(m.Leave(reason="enough"))]
    assert outputs[-1] == out.Exit(ENDED_AT_ONCE, "enough")


def test_what_a_running_fetch_asks_is_answered_to_it() -> None:
    drive = started()
    drive.receive(sources_of(2))
    drive.wants(out.FetchState)
    drive(e.SourcesWanted(held=0, undialled_site_ids=(3,)))
    assert drive.sent() == [m.FindSources(has_state=True, after_commit=0, undialled_site_ids=(3,))]
    newer = sources_of(3, commit(3, 3))
    drive.receive(newer)
    assert drive.out == [out.TellFetch(newer)]


def test_a_fetch_that_was_cancelled_asks_nobody() -> None:
    drive = started()
    drive.receive(sources_of(2))
    drive.receive(m.RolledBack(branch=1, commit=0, reason="a power cut"))
    drive.wants(out.CancelFetch)
    drive(e.SourcesWanted(held=None, undialled_site_ids=()))
    assert not drive.out


def test_a_core_that_fails_says_its_last_words_and_nothing_of_what_it_had_half_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = started()

    def fail(_: object) -> None:
        raise ZeroDivisionError("of the core")

    monkeypatch.setattr(commits, "apply_next", fail)
    with pytest.raises(ZeroDivisionError):
        drive.receive(m.Peers(members=()))
    outputs = drive(e.NodeFailed("the node cannot go on", HostError.exit_code))
    assert not [output for output in outputs if isinstance(output, out.Fulfil)]
    assert outputs[0] == out.Send(m.Leave(reason="the node cannot go on", fatal=True))
    assert outputs[-1] == out.Exit(HostError.exit_code, "the node cannot go on")


def test_a_failed_exchange_is_said_as_it_is() -> None:
    drive = started()
    drive.ask(10)
    drive.sealed(10)
    drive.receive(plan(1))
    where = m.Direction.SENDING
    failure = m.ExchangeFailed(sync=1, attempt=1, term=1, peer_site_id=2, direction=where, phase="payloads", text="x")
    drive(e.ExchangeBroken(plan(1), PeerError("x", 2, sending=True, phase="payloads")))
    assert drive.sent() == [failure]
