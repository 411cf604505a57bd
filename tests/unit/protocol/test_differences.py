"""What follows a plan on a stream leaves out what the plan has told, and comes back whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol import PROTOCOL_VERSION, differences, wire
from atoll.protocol import messages as m
from atoll.protocol.differences import NOTHING, WHOLE, Same, Told, after, complete, shorten
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.plans import with_weights
from atoll.protocol.v1 import session_pb2


def member(number: int, tokens: int = 0, incarnation: int = 1) -> m.Member:
    return m.Member(site_id=number, incarnation=incarnation, address=f"host-{number}:1", tokens=tokens)


def a_plan(sync: int, num_sites: int = 0, *, first: int = 1) -> m.Plan:
    return m.Plan(
        sync=sync,
        attempt=1,
        term=1,
        base_commit=sync - 1,
        contributors=tuple(member(number) for number in range(first, first + num_sites)),
        trees=(m.Tree(first_chunk=0, num_chunks=4), m.Tree(first_chunk=4, num_chunks=4, top=1)),
        stall_limit_s=6.0,
        num_steps=20,
        deadline_s=48.0,
        slowest_bytes_per_s=1024,
    )


def a_commit(plan: m.Plan, *tokens: int) -> m.Commit:
    return m.Commit(
        commit=plan.sync,
        sync=plan.sync,
        attempt=plan.attempt,
        term=plan.term,
        contributors=with_weights(plan, tokens).contributors,
        payload_digest=bytes(32),
        run_step=10,
        run_tokens=100,
    )


def weights(sync: int, *tokens: int) -> m.Weights:
    return m.Weights(sync=sync, attempt=1, term=1, tokens=tokens)


def test_a_run_that_goes_on_as_it_is_tells_its_members_once() -> None:
    told = NOTHING
    for message, left_out in (
        (a_plan(1, 2), WHOLE),
        (weights(1, 5, 6), WHOLE),
        (a_commit(a_plan(1, 2), 5, 6), Same(contributors=True)),
        (a_plan(2, 2), Same(contributors=True, trees=True)),
        (weights(2, 7, 8), WHOLE),
        (a_commit(a_plan(2, 2), 7, 8), Same(contributors=True)),
        (a_plan(3, 2), Same(contributors=True, trees=True)),
    ):
        short, same = shorten(message, told)
        assert same == left_out
        assert not (same.contributors and short.contributors)  # type: ignore[attr-defined]
        assert not (same.trees and short.trees)  # type: ignore[attr-defined]
        assert complete(short, same, told) == message
        told = after(message, told)


def test_influences_are_told_apart_too_and_a_commit_with_others_is_whole() -> None:
    told = NOTHING
    counted = replace(
        a_commit(a_plan(1, 2), 5, 6), contributors=with_weights(a_plan(1, 2), (5, 6), (9, 1)).contributors
    )
    influences = m.Influences(sync=1, attempt=1, term=1, influences=(9, 1))
    for message, left_out in (
        (a_plan(1, 2), WHOLE),
        (weights(1, 5, 6), WHOLE),
        (counted, WHOLE),
        (influences, WHOLE),
        (a_commit(a_plan(1, 2), 5, 6), WHOLE),
        (counted, Same(contributors=True)),
        (a_plan(2, 2), Same(contributors=True, trees=True)),
        (weights(2, 5, 6), WHOLE),
        (a_commit(a_plan(2, 2), 5, 6), Same(contributors=True)),
    ):
        short, same = shorten(message, told)
        assert same == left_out
        assert complete(short, same, told) == message
        told = after(message, told)


@pytest.mark.parametrize(
    "message",
    [
        a_plan(2, 3),
        a_plan(2, 2, first=2),
        replace(a_plan(2, 2), contributors=(member(1), member(2, incarnation=2))),
        a_commit(a_plan(1, 2), 5, 7),  # other weights than those told
        a_commit(a_plan(1, 2), 0, 0),
        a_commit(a_plan(1, 1), 5),
        weights(2, 5, 6),
        m.Pulse(),
    ],
)
def test_what_changed_is_told_whole(message: m.CoordinatorMessage) -> None:
    told = after(weights(1, 5, 6), after(a_plan(1, 2), NOTHING))
    short, same = shorten(message, told)
    assert not same.contributors
    assert complete(short, same, told) == message
    assert shorten(message, NOTHING) == (message, WHOLE)


def test_weights_of_another_number_of_sites_tell_nothing() -> None:
    told = after(a_plan(1, 2), NOTHING)
    assert after(weights(2, 1, 2, 3), told) is told
    assert after(m.Pulse(), told) is told
    assert after(a_commit(a_plan(1, 2), 5, 6), told) is told


def test_weights_are_of_the_last_plan() -> None:
    told = after(a_plan(2, 2), after(weights(1, 5, 6), after(a_plan(1, 2), NOTHING)))
    commit = a_commit(a_plan(2, 2), 5, 6)
    assert shorten(commit, told) == (commit, WHOLE)


WEIGHED = after(weights(1, 5), after(a_plan(1, 1), NOTHING))


@pytest.mark.parametrize(
    ("message", "same", "told"),
    [
        (replace(a_plan(1), contributors=()), Same(contributors=True), NOTHING),
        (replace(a_plan(1, 1), trees=()), Same(trees=True), NOTHING),
        (replace(a_plan(1, 1), trees=()), Same(trees=True), Told(contributors=(member(1),))),
        (replace(a_commit(a_plan(1)), contributors=()), Same(contributors=True), NOTHING),
        (replace(a_commit(a_plan(1)), contributors=()), Same(contributors=True), after(a_plan(1, 1), NOTHING)),
        (a_plan(1, 1), Same(contributors=True), WEIGHED),
        (a_plan(1, 1), Same(trees=True), WEIGHED),
        (a_commit(a_plan(1, 1), 5), Same(contributors=True), WEIGHED),
        (replace(a_commit(a_plan(1)), contributors=()), Same(trees=True), WEIGHED),
        (m.Pulse(), Same(contributors=True), WEIGHED),
    ],
)
def test_what_cannot_be_completed_is_refused(message: m.CoordinatorMessage, same: Same, told: Told) -> None:
    with pytest.raises(InvalidMessage):
        complete(message, same, told)


TOKENS = st.integers(0, 2)
PLANS = st.builds(
    lambda sync, num_sites, first, tops: replace(
        a_plan(sync, num_sites, first=first), trees=tuple(m.Tree(first_chunk=0, num_chunks=1, top=t) for t in tops)
    ),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 2),
    st.lists(st.integers(0, 1), max_size=2),
)
MESSAGES = st.one_of(
    PLANS,
    st.builds(lambda plan, token: a_commit(plan, *(token,) * len(plan.contributors)), PLANS, TOKENS),
    st.lists(TOKENS, max_size=2).map(lambda tokens: weights(1, *tokens)),
    st.just(m.Pulse()),
)


@given(st.lists(MESSAGES, max_size=12))
def test_both_ends_of_a_stream_stay_together(said: list[m.CoordinatorMessage]) -> None:
    header = m.Header(protocol_version=PROTOCOL_VERSION, run_id="run")
    here = there = NOTHING
    for seq, message in enumerate(said, 1):
        short, same = shorten(message, here)
        here = after(message, here)
        data = wire.response_around(wire.response_body(short, same), header, seq, 0)
        envelope = wire.parse(session_pb2.SessionResponse, data)
        _, received = wire.unpack(envelope)
        whole = differences.complete(received, wire.left_out(envelope), there)
        there = after(whole, there)
        assert whole == message
    assert here == there
