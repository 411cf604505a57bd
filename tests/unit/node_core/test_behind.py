"""A site that is behind the run: it receives the payloads of syncs whose base it has yet to come to."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.exchange_events import ExchangeFinished
from atoll.protocol import messages as m
from atoll.protocol.errors import PeerError
from tests.unit.node_core.test_site import HASH, Driver, commit, plan, started


def received(sync: int) -> m.Plan:
    """A plan by which the others contribute, on the commit before."""
    return plan(sync, base=sync - 1, contributors=(2, 3), receivers=(1,))


def fetching(drive: Driver, *numbers: int) -> None:
    """It heard of these commits, and fetches the first."""
    for number in numbers:
        drive.receive(commit(number, number, contributors=(2, 3)))
    drive.receive(
        m.Sources(
            donors=(m.Donor(site_id=2, incarnation=1, address="b:1", commit=numbers[-1]),),
            commits=tuple(commit(number, number, contributors=(2, 3)) for number in numbers),
        )
    )


def behind() -> Driver:
    """At commit 0, while the run is at 2 and the site fetches what it lacks; sync 3 is under way."""
    drive = started()
    fetching(drive, 2)
    drive.wants(out.FetchState)
    return drive


def begun(drive: Driver) -> list[out.BeginExchange]:
    return [output for output in drive.out if isinstance(output, out.BeginExchange)]


def test_a_site_that_is_behind_receives_what_it_applies_next() -> None:
    drive = behind()
    drive.receive(received(3))
    assert begun(drive) == [
        out.BeginExchange(plan=replace(begun(drive)[0].plan), tokens=0, weights=(100, 100), is_behind=True)
    ]
    drive(ExchangeFinished(plan=received(3), payload_digest=HASH))
    drive.receive(commit(3, 3, contributors=(2, 3)))
    drive(e.StateFetched(commit=2, state_hash=HASH, run_step=20, run_tokens=600))
    applied = drive.wants(out.ApplyCommit)
    assert isinstance(applied, out.ApplyCommit)
    assert applied.commit.commit == 3, "its payloads are here, and nobody is asked for them"


def test_who_is_at_the_base_is_not_behind() -> None:
    drive = started()
    drive.receive(plan(1, contributors=(2, 3), receivers=(1,)))
    assert [output.is_behind for output in begun(drive)] == [False]


def test_a_joiner_receives_nothing_before_it_has_a_state() -> None:
    drive = Driver()
    drive.up_to_admitted(m.AdmittedAs.JOINER, 1)
    drive.receive(received(3))
    assert not begun(drive)


def test_a_contributor_without_the_base_says_so() -> None:
    drive = behind()
    drive.receive(plan(3, base=2))
    assert not begun(drive)
    (failed,) = drive.sent()
    assert isinstance(failed, m.ExchangeFailed)
    assert failed.text == "planned on commit 2, which this site has not applied"


def test_a_commit_ends_no_exchange_of_a_later_sync() -> None:
    drive = started()
    drive.receive(plan(1, contributors=(2, 3), receivers=(1,)))
    drive(ExchangeFinished(plan=plan(1, contributors=(2, 3), receivers=(1,)), payload_digest=HASH))
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive.wants(out.ApplyCommit)
    drive.receive(received(2))
    assert [output.is_behind for output in begun(drive)] == [True]
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert not [output for output in drive.out if isinstance(output, out.CancelExchange)]
    drive(ExchangeFinished(plan=received(2), payload_digest=HASH))
    drive.receive(commit(2, 2, contributors=(2, 3)))
    drive.wants(out.ApplyCommit)


def test_a_commit_ends_the_exchange_of_its_sync() -> None:
    """A receiver may have an older attempt under way, which nobody ends."""
    drive = started()
    drive.receive(plan(1, contributors=(2, 3), receivers=(1,)))
    drive.receive(commit(1, 1, contributors=(2, 3), attempt=2))
    drive.wants(out.ApplyCommit)
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert out.CancelExchange(1, 1) in drive.out


def test_a_link_that_carries_what_is_fetched_as_well_is_not_judged() -> None:
    drive = behind()
    drive.receive(received(3))
    links = (m.LinkUse(site_id=2, received_bytes=7, seconds=0.5),)
    drive(ExchangeFinished(plan=received(3), payload_digest=HASH, links=links))
    assert not [said for said in drive.sent() if isinstance(said, m.Done)]


def test_a_link_that_carried_what_was_fetched_is_not_judged_once_the_site_is_at_the_base() -> None:
    drive = behind()
    drive.receive(received(3))
    drive(e.StateFetched(commit=2, state_hash=HASH, run_step=20, run_tokens=600))
    links = (m.LinkUse(site_id=2, received_bytes=7, seconds=0.5),)
    drive(ExchangeFinished(plan=received(3), payload_digest=HASH, links=links))
    assert not [said for said in drive.sent() if isinstance(said, m.Done)]


@pytest.mark.parametrize("is_behind", [False, True])
def test_what_a_site_that_is_behind_cannot_receive_it_fetches_without_a_warning(is_behind: bool) -> None:
    drive = behind() if is_behind else started()
    what = received(3) if is_behind else plan(1, contributors=(2, 3), receivers=(1,))
    drive.receive(what)
    drive(e.ExchangeBroken(what, PeerError("sync is over here", 2)))
    (report,) = (output for output in drive.out if isinstance(output, out.Report))
    assert report.level == (logging.DEBUG if is_behind else logging.WARNING)
    assert not drive.sent()
