"""What the coordinator sends to many sites is encoded once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.coordinator.streams import BODIES_KEPT, Bodies
from atoll.protocol import differences, wire
from atoll.protocol import messages as m
from atoll.protocol.differences import NOTHING, WHOLE, Same
from atoll.protocol.v1 import session_pb2


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[m.CoordinatorMessage]:
    found: list[m.CoordinatorMessage] = []
    encode = wire.response_body

    def counted(message: m.CoordinatorMessage, same: Same = WHOLE) -> wire.Body:
        found.append(message)
        return encode(message, same)

    monkeypatch.setattr(wire, "response_body", counted)
    return found


def test_a_message_for_all_is_encoded_once_between_those_for_one(encoded: list[m.CoordinatorMessage]) -> None:
    bodies = Bodies()
    for_all = m.Finished(commit=3, reason="the end", run_step=30, run_tokens=300)
    for site in range(3 * BODIES_KEPT):
        for message in (m.Evicted(reason=f"site {site}"), for_all):
            body = bodies.of(message, NOTHING)
            assert (body.before, body.after, body.message) == (NOTHING, NOTHING, message)
    assert sum(message is for_all for message in encoded) == 1
    assert len(encoded) == 3 * BODIES_KEPT + 1
    assert len(bodies._known) == BODIES_KEPT


def test_streams_that_were_told_the_same_in_other_ways_share_what_follows(
    encoded: list[m.CoordinatorMessage],
) -> None:
    bodies = Bodies()
    members = tuple(m.Member(site_id=i, incarnation=1, address="h:1") for i in (1, 2))
    plan = m.Plan(
        sync=1,
        attempt=1,
        term=1,
        base_commit=0,
        contributors=members,
        trees=(m.Tree(first_chunk=0, num_chunks=3, top=1),),
        stall_limit_s=6.0,
        num_steps=20,
        deadline_s=48.0,
        slowest_bytes_per_s=1024,
    )
    first = second = NOTHING
    for message in plan, m.Weights(sync=1, attempt=1, term=1, tokens=(1, 2)):
        first = bodies.of(message, first).after
    for message in replace(plan, attempt=2), m.Weights(sync=1, attempt=2, term=1, tokens=(1, 2)):
        second = bodies.of(message, second).after
    assert first is second
    num = len(encoded)
    following = replace(plan, sync=2, base_commit=1, ahead=True)
    assert bodies.of(following, first) is bodies.of(following, second)
    assert len(encoded) == num + 1
    assert encoded[-1] == replace(following, contributors=(), trees=())
    envelope = session_pb2.SessionResponse.FromString(bodies.of(following, first).encoded.data)
    _, short = wire.unpack(envelope)
    assert differences.complete(short, wire.left_out(envelope), first) == following
