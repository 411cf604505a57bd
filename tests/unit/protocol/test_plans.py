"""Plans: one reducer for every chunk, digests that notice what two sites must agree on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.protocol.digest import Digest
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.messages import Endpoint, Member, Plan, Tree
from atoll.protocol.plans import payload_digest, plan_digest, reducers, weights, with_weights

MEMBERS = tuple(Member(site_id=i, incarnation=1, address=f"h:{i}", tokens=10 * i) for i in (1, 2, 5))
PLAN = Plan(
    sync=3,
    attempt=1,
    term=1,
    base_commit=2,
    contributors=MEMBERS,
    trees=(
        Tree(first_chunk=0, num_chunks=2, parents=(-1, 0, 0)),
        Tree(first_chunk=2, num_chunks=1, parents=(2, 2, -1)),
    ),
    stall_limit_s=6.0,
    num_steps=20,
    deadline_s=600.0,
    slowest_bytes_per_s=1 << 10,
)


def test_the_top_of_each_tree_reduces_its_chunks() -> None:
    assert [m.site_id for m in reducers(PLAN, 3)] == [1, 1, 5]
    stars = (Tree(first_chunk=0, num_chunks=2, top=0), Tree(first_chunk=2, num_chunks=1, top=2))
    assert [m.site_id for m in reducers(replace(PLAN, trees=stars), 3)] == [1, 1, 5]


@pytest.mark.parametrize(
    ("trees", "text"),
    [
        ((Tree(first_chunk=0, num_chunks=2, parents=(-1, 0, 0)),), "2 of 3 chunks"),
        ((Tree(first_chunk=1, num_chunks=2, parents=(-1, 0, 0)),), "do not cover"),
        ((Tree(first_chunk=0, num_chunks=4, parents=(-1, 0, 0)),), "do not cover"),
        ((Tree(first_chunk=0, num_chunks=3, parents=(-1, 0)),), "one parent for each"),
        ((Tree(first_chunk=0, num_chunks=3, parents=(-1, -1, 0)),), "one top"),
        ((Tree(first_chunk=0, num_chunks=3, parents=(0, 0, 0)),), "one top"),
        ((Tree(first_chunk=0, num_chunks=3, top=3),), "one top"),
        ((Tree(first_chunk=0, num_chunks=3, parents=(-1, 0, 1)),), "stars only"),
    ],
)
def test_trees_that_do_not_fit_are_refused(trees: tuple[Tree, ...], text: str) -> None:
    with pytest.raises(InvalidMessage, match=text):
        reducers(replace(PLAN, trees=trees), 3)


def test_contributors_must_be_distinct_and_ascending() -> None:
    with pytest.raises(InvalidMessage, match="not distinct and ascending"):
        reducers(replace(PLAN, contributors=MEMBERS[::-1]), 3)


def test_the_plan_digest_notices_what_sites_must_agree_on() -> None:
    variants = [
        PLAN,
        replace(PLAN, sync=PLAN.sync + 1),
        replace(PLAN, fragment=PLAN.fragment + 1),
        replace(PLAN, base_commit=PLAN.base_commit + 1),
        replace(PLAN, num_steps=PLAN.num_steps + 1),
        replace(PLAN, attempt=2),
        replace(PLAN, term=2),
        replace(PLAN, contributors=MEMBERS[:2], receivers=MEMBERS[2:]),
        replace(PLAN, trees=PLAN.trees[:1]),
        replace(PLAN, trees=(Tree(first_chunk=0, num_chunks=3, top=0),)),
        replace(PLAN, trees=(Tree(first_chunk=0, num_chunks=3, top=1),)),
    ]
    assert len({plan_digest(p) for p in variants}) == len(variants)
    moved = replace(PLAN, contributors=tuple(replace(m, address="x:1") for m in MEMBERS))
    assert plan_digest(moved) == plan_digest(PLAN), "addresses may differ"
    unweighed = replace(PLAN, contributors=tuple(replace(m, tokens=0) for m in MEMBERS))
    assert plan_digest(unweighed) == plan_digest(PLAN), "weights may come later"


BEFORE_ENDPOINTS = "4a620a4ded46cfa0d0f0e5384b496401766a8cffe1058375020fbbbf8bd8a187"
"""The digest of PLAN in versions that knew of no endpoints."""


BEFORE_INFLUENCES = "b8947048001bfafd3e3a9ade15eac8f64ad512659006d2f85388f8761ceb4b16"
"""That of its payloads in versions that knew of no influences."""


def at(*firsts: tuple[int, ...], host: str = "h") -> Plan:
    """PLAN, with endpoints of its contributors that begin at these chunks."""
    return replace(
        PLAN,
        contributors=tuple(
            replace(m, endpoints=tuple(Endpoint(address=f"{host}:{first}", first_chunk=first) for first in chunks))
            for m, chunks in zip(MEMBERS, firsts, strict=True)
        ),
    )


def test_the_plan_digest_notices_which_place_of_a_site_has_which_chunks() -> None:
    variants = [PLAN, at((1,), (), ()), at((2,), (), ()), at((), (1,), ()), at((1,), (1,), ()), at((1, 2), (), ())]
    assert len({plan_digest(p) for p in variants}) == len(variants)
    assert plan_digest(at((1, 2), (3,), (), host="x")) == plan_digest(at((1, 2), (3,), ())), "addresses may differ"


def test_a_plan_of_sites_of_one_host_has_the_digest_that_it_had() -> None:
    assert plan_digest(at((), (), ())).hex() == plan_digest(PLAN).hex() == BEFORE_ENDPOINTS


def test_the_payload_digest_covers_run_attempt_weights_and_payloads() -> None:
    hashes = [bytes(32), bytes([1] * 32)]
    values = {
        payload_digest("r", PLAN, hashes),
        payload_digest("s", PLAN, hashes),
        payload_digest("r", replace(PLAN, attempt=2), hashes),
        payload_digest("r", replace(PLAN, contributors=MEMBERS[:2]), hashes),
        payload_digest("r", replace(PLAN, contributors=(replace(MEMBERS[0], tokens=11), *MEMBERS[1:])), hashes),
        payload_digest("r", PLAN, hashes[::-1]),
        payload_digest("r", PLAN, hashes[:1]),
        payload_digest("r", with_weights(PLAN, weights(PLAN), (1, 2, 3)), hashes),
        payload_digest("r", with_weights(PLAN, weights(PLAN), (3, 2, 1)), hashes),
    }
    assert len(values) == 9
    assert payload_digest("r", PLAN, hashes).hex() == BEFORE_INFLUENCES


def test_a_parent_that_is_no_place_in_the_list_is_refused() -> None:
    wrong = replace(PLAN, trees=(Tree(first_chunk=0, num_chunks=4, parents=(-2, 0)),))
    with pytest.raises(InvalidMessage, match="parent -2"):
        plan_digest(wrong)


def test_many_numbers_at_once_are_the_same_bytes() -> None:
    one_by_one = Digest("test").uint(1).uint(0).uint(2**64 - 1).finish()
    assert Digest("test").uints((1, 0, 2**64 - 1)).finish() == one_by_one
    assert Digest("test").uints(()).finish() == Digest("test").finish()
