"""Rule 12 on a site: the plan that came with the commit is exchanged at the boundary, without the coordinator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.protocol import messages as m
from atoll.protocol.errors import PeerError
from atoll.protocol.plans import with_weights
from atoll.protocol.settings import settings_to_json
from tests.unit.node_core.test_site import (
    HASH,
    SETTINGS,
    Driver,
    at_boundary,
    commit,
    exchanged,
    opened,
    plan,
    started,
    weights_of,
)

AHEAD = replace(with_weights(plan(2, base=1), (0, 0)), ahead=True)


def with_a_plan(ahead: m.Plan = AHEAD) -> Driver:
    """After commit 1, with the plan of sync 2; training towards step 20."""
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(commit(1, 1))
    drive.receive(ahead)
    assert not [o for o in drive.out if isinstance(o, out.Send)], "it is kept until the commit is applied"
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(1))
    drive(e.Published(e.Values(1)))
    drive.out.clear()
    drive.merged(1)
    drive.out.clear()
    return drive


def seal(drive: Driver, tokens: int = 300) -> list[out.Output]:
    drive.ask(20)
    drive.out.clear()
    drive.sealed(20, tokens=tokens)
    return list(drive.out)


def test_the_exchange_begins_at_the_boundary_with_the_weight_of_this_site() -> None:
    drive = with_a_plan()
    ready, begin = seal(drive)
    assert isinstance(ready, out.Send)
    assert isinstance(ready.message, m.Ready)
    assert isinstance(begin, out.BeginExchange)
    assert begin == out.BeginExchange(AHEAD, 300, ())


def test_it_begins_while_the_coordinator_is_away() -> None:
    drive = with_a_plan()
    drive(e.SessionLost("gone"))
    (begin,) = seal(drive)
    assert isinstance(begin, out.BeginExchange)


def test_what_failed_while_the_coordinator_was_away_is_said_when_it_is_back() -> None:
    """It would take the other site for the one that hangs."""
    drive = with_a_plan()
    drive(e.SessionLost("gone"))
    seal(drive)
    drive(e.ExchangeBroken(AHEAD, PeerError("refused", 2, phase="payloads")))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS)))
    drive.out.clear()
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))
    (failed,) = [x for x in drive.sent() if isinstance(x, m.ExchangeFailed)]
    assert (failed.sync, failed.attempt, failed.peer_site_id, failed.text) == (2, 1, 2, "refused")


def test_the_weights_are_told_to_the_exchange_that_runs() -> None:
    drive = with_a_plan()
    seal(drive)
    drive.out.clear()
    drive.receive(weights_of(AHEAD, 300, 100))
    assert drive.out == [out.WeighExchange(AHEAD, (300, 100))]
    drive.out.clear()
    drive.receive(with_weights(AHEAD, (300, 100)))  # on another stream
    assert not drive.out


def test_12_a_plan_that_was_not_made_ahead_begins_with_its_weights_and_not_before() -> None:
    """The coordinator may have cut them, and another word would be with the peers."""
    drive = started()
    at_boundary(drive)
    drive.receive(with_weights(plan(1), (0, 0)))
    assert not drive.out
    drive(e.PeersProbed(()))
    assert not [o for o in drive.out if isinstance(o, out.BeginExchange)], "though it says Ready again"
    drive.receive(weights_of(plan(1), 7, 100))
    assert drive.out == [out.BeginExchange(with_weights(plan(1), (0, 0)), 7, (7, 100))]


def test_12_a_plan_with_weights_is_refused() -> None:
    drive = started()
    at_boundary(drive)
    drive(e.Received(1, plan(1)))
    (failed,) = drive.sent()
    assert isinstance(failed, m.ExchangeFailed)
    assert failed.text == "a plan that says weights; they come apart"
    drive.receive(weights_of(plan(1), 100, 100))
    assert not [o for o in drive.out if isinstance(o, out.BeginExchange)]


@pytest.mark.parametrize(
    "wrong",
    [weights_of(AHEAD, 300), weights_of(AHEAD, 300, 0), weights_of(replace(AHEAD, attempt=2), 300, 400)],
    ids=["of fewer contributors", "one of them 0", "of a plan that did not come"],
)
def test_weights_that_fit_no_plan_fail_the_attempt(wrong: m.Weights) -> None:
    drive = with_a_plan()
    seal(drive)
    drive.out.clear()
    drive.receive(wrong)
    (failed,) = [o.message for o in drive.out if isinstance(o, out.Send)]
    assert isinstance(failed, m.ExchangeFailed)
    assert (failed.sync, failed.attempt, failed.term) == (wrong.sync, wrong.attempt, wrong.term)
    assert drive.is_exchanging(), "and the one that runs is left alone"


def test_weights_of_a_plan_that_gave_way_say_nothing() -> None:
    drive = with_a_plan()
    seal(drive)
    drive.receive(plan(2, attempt=2, base=1))
    drive.out.clear()
    drive.receive(weights_of(AHEAD, 300, 400))
    assert not drive.out


def test_17_without_a_weight_it_is_not_begun() -> None:
    (ready,) = seal(with_a_plan(), tokens=0)
    assert isinstance(ready, out.Send)


def test_a_plan_of_a_sync_that_was_abandoned_is_not_begun_in_the_next_one() -> None:
    drive = with_a_plan()
    drive.receive(m.Abandoned(sync=2, reason="test", next=opened(3, 1)))
    (ready,) = seal(drive)
    assert isinstance(ready, out.Send)


def test_a_snapshot_that_missed_the_commit_is_not_exchanged_by_the_plan_after_it() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(AHEAD)
    drive.receive(opened(2, 1))  # and commit 1 is still to come
    assert not [o for o in drive.out if isinstance(o, out.BeginExchange)]
    assert not drive.is_exchanging()


def test_who_receives_by_a_later_plan_does_not_go_back_to_it() -> None:
    """The site was too slow, and was planned without; then it reaches its boundary."""
    drive = with_a_plan()
    drive.receive(plan(2, attempt=2, base=1, contributors=(2,), receivers=(1,)))
    (ready,) = seal(drive)
    assert isinstance(ready, out.Send)


def test_an_ordinary_plan_takes_its_place() -> None:
    drive = with_a_plan()
    seal(drive)
    drive.out.clear()
    second = plan(2, attempt=2, base=1)
    drive.receive(second)
    assert [type(o) for o in drive.out] == [out.CancelExchange, out.BeginExchange]
    drive.out.clear()
    drive.receive(AHEAD)
    assert not drive.out


def test_it_ends_the_exchange_of_a_plan_that_was_made_ahead_only_with_its_weights() -> None:
    drive = with_a_plan()
    seal(drive)
    drive.receive(with_weights(plan(2, attempt=2, base=1), (0, 0)))
    assert not drive.out
    drive.receive(weights_of(AHEAD, 300, 100))
    assert drive.out == [out.WeighExchange(AHEAD, (300, 100))], "what was said before it"


def test_a_plan_that_was_made_ahead_without_this_start_of_the_site_is_not_begun() -> None:
    me, other = AHEAD.contributors
    drive = with_a_plan(replace(AHEAD, contributors=(replace(me, incarnation=9), other)))
    (ready,) = seal(drive)
    assert isinstance(ready, out.Send)


def test_25_an_evicted_site_does_not_go_by_it() -> None:
    """What it trained is discarded; another contribution must not come under the same key."""
    drive = with_a_plan()
    drive.receive(m.Evicted(reason="test"))
    drive.receive(opened(2, 1))
    assert not drive.has_next_plan()
