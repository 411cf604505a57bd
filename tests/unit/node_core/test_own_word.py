"""A site believes no word about itself that is not its own: weights that it did not say, samples that are left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.node.core import outputs as out
from atoll.protocol import messages as m
from atoll.protocol.errors import StateError
from atoll.protocol.plans import with_weights
from tests.unit.node_core.test_leases import lease, loading, seal
from tests.unit.node_core.test_plan_ahead import AHEAD, with_a_plan
from tests.unit.node_core.test_plan_ahead import seal as seal_ahead
from tests.unit.node_core.test_site import Driver, at_boundary, commit, exchanged, plan, started, weights_of


def failure(drive: Driver) -> str:
    (failed,) = [s for s in drive.sent() if isinstance(s, m.ExchangeFailed)]
    return failed.text


def test_a_plan_with_more_weight_than_the_site_said_is_refused_and_a_cut_weight_is_not() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(with_weights(plan(1), (101, 100)))
    assert failure(drive) == "the plan gives this site the weight 101, its Ready said 100"
    assert not any(isinstance(o, out.BeginExchange) for o in drive.out)
    drive.receive(with_weights(plan(1, attempt=2), (7, 100)))
    begun = drive.wants(out.BeginExchange)
    assert isinstance(begun, out.BeginExchange)
    assert (begun.tokens, begun.weights) == (7, (7, 100))


@pytest.mark.parametrize("told", [299, 301])
def test_weights_that_are_not_those_that_the_site_exchanges_with_end_the_attempt(told: int) -> None:
    drive = with_a_plan()
    seal_ahead(drive, tokens=300)
    drive.receive(weights_of(AHEAD, told, 100))
    assert failure(drive) == f"the coordinator says that this site has the weight {told}, and it exchanges with 300"
    drive.wants(out.CancelExchange)
    assert not any(isinstance(o, out.WeighExchange) for o in drive.out)


def test_a_commit_with_another_weight_of_the_site_ends_it_before_anything_is_applied() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1))
    exchanged(drive, 1)
    found = commit(1, 1)
    mine, other = found.contributors
    drive.receive(replace(found, contributors=(replace(mine, tokens=mine.tokens ^ 64), other)))
    ended = drive.wants(out.Exit)
    assert isinstance(ended, out.Exit)
    assert (ended.code, ended.text) == (
        StateError.exit_code,
        f"commit 1 lists this site with the weight {mine.tokens ^ 64}, it exchanged with {mine.tokens}",
    )
    assert not any(isinstance(o, out.ApplyCommit) for o in drive.out)


def test_a_commit_that_leaves_out_samples_of_the_site_ends_it() -> None:
    """They would be trained on again by somebody, and those that it lists instead by nobody."""
    drive = loading()
    lease(drive, (0, 400))
    seal(drive, 10, 80)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(commit(1, 1, done=(m.DataRange(first=0, num_samples=48),)))
    ended = drive.wants(out.Exit)
    assert isinstance(ended, out.Exit)
    assert ended.text == "commit 1 does not list 32 samples that this site's Ready did"


def test_a_receiver_believes_weights_that_are_not_its_own() -> None:
    drive = started()
    drive.receive(plan(1, contributors=(2, 3), receivers=(1,)))
    exchanged(drive, 1)
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive.wants(out.ApplyCommit)
