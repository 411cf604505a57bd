"""Averages by influence as a site lives them: it says inner products, and hears what contributions count."""

from __future__ import annotations

from dataclasses import replace

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.exchange_events import ProductsMade
from atoll.protocol import messages as m
from atoll.protocol.errors import StateError
from atoll.protocol.plans import weighed, with_weights
from atoll.protocol.settings import RunSettings, settings_to_json
from tests.unit.node_core.test_site import SETTINGS, Driver, at_boundary, commit, exchanged, plan, started

BY_INFLUENCE = replace(SETTINGS, min_sites=3, quorum=3, max_sites=64, sync=replace(SETTINGS.sync, robust="gram"))
PLAN = with_weights(plan(1), (0, 0))
PRODUCTS = (4.0, 0.0, 9.0)
SAID = m.Products(sync=1, attempt=1, term=1, products=PRODUCTS)


def influences_of(*influences: int, attempt: int = 1) -> m.Influences:
    return m.Influences(sync=1, attempt=attempt, term=1, influences=influences)


def exchanging(settings: RunSettings = BY_INFLUENCE) -> Driver:
    drive = started(settings=settings)
    at_boundary(drive)
    drive.receive(plan(1))
    return drive


def on_a_new_stream(drive: Driver) -> list[m.SiteMessage]:
    drive(e.SessionLost("gone"))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(drive.core.settings)))
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))
    return drive.sent()


def test_products_are_said_and_again_on_a_new_stream_until_the_coordinator_has_answered() -> None:
    drive = exchanging()
    drive(ProductsMade(PLAN, PRODUCTS))
    assert drive.sent() == [SAID]
    assert SAID in on_a_new_stream(drive)
    drive.receive(influences_of(3, 1))
    assert drive.out == [out.InfluenceExchange(PLAN, (3, 1))]
    assert SAID not in on_a_new_stream(drive)


def test_influences_never_change_and_those_of_another_attempt_are_nothing() -> None:
    drive = exchanging()
    assert not drive.receive(influences_of(3, 1, attempt=2))
    drive.receive(influences_of(3, 1))
    assert not drive.receive(influences_of(1, 3))


def test_products_of_an_attempt_that_is_over_are_not_said() -> None:
    drive = exchanging()
    drive.receive(plan(1, attempt=2))
    drive(ProductsMade(PLAN, PRODUCTS))
    assert not drive.sent()


def test_influences_that_do_not_fit_the_plan_end_the_attempt() -> None:
    for wrong in ((3,), (3, 1, 1), (0, 4)):
        drive = exchanging()
        drive.receive(influences_of(*wrong))
        (failed,) = drive.sent()
        assert isinstance(failed, m.ExchangeFailed)
        assert failed.text == "influences that do not fit its plan"
        drive.wants(out.CancelExchange)


def test_in_another_run_they_are_nothing() -> None:
    assert not exchanging(SETTINGS).receive(influences_of(3, 1))


def test_a_commit_says_the_influences_that_were_missed() -> None:
    drive = exchanging()
    found = commit(1, 1)
    drive.receive(replace(found, contributors=weighed(found.contributors, (100, 100), (3, 1))))
    assert out.InfluenceExchange(PLAN, (3, 1)) in drive.out


def test_a_commit_with_other_influences_than_were_said_ends_the_site() -> None:
    drive = exchanging()
    drive.receive(influences_of(3, 1))
    exchanged(drive, 1)
    found = commit(1, 1)
    drive.receive(replace(found, contributors=weighed(found.contributors, (100, 100), (1, 3))))
    ended = drive.wants(out.Exit)
    assert isinstance(ended, out.Exit)
    assert (ended.code, ended.text) == (
        StateError.exit_code,
        "commit 1 lists other influences of its contributors than were said of its attempt",
    )
