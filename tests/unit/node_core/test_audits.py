"""A run with audits, on a site: it is ready when what it contributes is kept, and says the root over it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.protocol import messages as m
from atoll.protocol.plans import with_weights
from tests.unit.node_core.test_site import SETTINGS, Driver, plan, started, weights_of

AUDITED = replace(SETTINGS, sync=replace(SETTINGS.sync, audits=2))
ROOT, OTHER = b"r" * 32, b"o" * 32
PLAN = with_weights(plan(1), (0, 0))


def kept(drive: Driver, root: bytes = ROOT, sync: int = 1) -> list[out.Output]:
    return drive(e.ContributionsKept(sync, 0, root))


def sealed(tokens: int = 100) -> Driver:
    drive = started(settings=AUDITED)
    drive.ask(10)
    drive.sealed(10, tokens=tokens)
    return drive


def readys(drive: Driver) -> list[m.Ready]:
    return [message for message in drive.sent() if isinstance(message, m.Ready)]


def test_it_is_ready_when_all_is_kept_and_says_the_root() -> None:
    drive = sealed()
    assert drive.wants(out.KeepContributions) == out.KeepContributions(1, 0, 0, ())
    assert not readys(drive)
    drive.receive(PLAN)
    assert not drive.out, "a plan that comes meanwhile"
    kept(drive)
    assert [ready.contributions_root for ready in readys(drive)] == [ROOT]
    drive(e.PeersProbed((2,)))
    assert [ready.contributions_root for ready in readys(drive)] == [ROOT], "said again, and encoded once"
    assert not [o for o in drive.out if isinstance(o, out.KeepContributions)]


def test_the_exchange_begins_with_the_roots_of_all() -> None:
    drive = sealed()
    kept(drive)
    drive.receive(PLAN)
    drive.receive(replace(weights_of(PLAN, 100, 100), roots=(ROOT, OTHER)))
    begun = drive.wants(out.BeginExchange)
    assert isinstance(begun, out.BeginExchange)
    assert begun.roots == (ROOT, OTHER)


@pytest.mark.parametrize("roots", [(), (OTHER, ROOT), (OTHER,)])
def test_what_the_coordinator_says_that_it_contributes_is_held_against_what_it_said(roots: tuple[bytes, ...]) -> None:
    drive = sealed()
    kept(drive)
    drive.receive(PLAN)
    drive.receive(replace(weights_of(PLAN, 100, 100), roots=roots))
    (failed,) = [message for message in drive.sent() if isinstance(message, m.ExchangeFailed)]
    assert "contributes something else than its Ready said" in failed.text
    assert not [o for o in drive.out if isinstance(o, out.BeginExchange)]


def test_what_was_encoded_on_a_base_that_is_gone_or_for_another_sync_is_no_contribution() -> None:
    drive = sealed()
    kept(drive, sync=7)
    assert not readys(drive)
    kept(drive, root=b"")
    assert not readys(drive)


def test_contributions_that_carry_over_are_kept_for_the_sync_that_follows() -> None:
    drive = sealed()
    kept(drive)
    following = m.Open(sync=2, base_commit=0, run_step=0, run_tokens=0, num_steps=10)
    drive.receive(m.Abandoned(sync=1, reason="a test", next=following))
    assert drive.wants(out.KeepContributions) == out.KeepContributions(2, 0, 0, ())
    assert not readys(drive)
    kept(drive, root=OTHER, sync=2)
    assert [(ready.sync, ready.contributions_root) for ready in readys(drive)] == [(2, OTHER)]


def test_a_site_without_tokens_has_nothing_to_keep() -> None:
    drive = sealed(tokens=0)
    assert [ready.contributions_root for ready in readys(drive)] == [b""]
    assert not [o for o in drive.out if isinstance(o, out.KeepContributions)]
