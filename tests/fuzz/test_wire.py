"""Session envelopes and stored messages: any bytes and any content come out as a message or as InvalidMessage."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cli.client import parse_status, read_document
from atoll.cli.status import data_lines, text_lines
from atoll.coordinator import streams
from atoll.protocol import PROTOCOL_VERSION, wire
from atoll.protocol import messages as m
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import Manifest
from atoll.protocol.v1 import session_pb2
from tests.harness.coordinator_story import Story, some_settings
from tests.harness.envelopes import response
from tests.harness.fuzzing import (
    ANY_FLOATS,
    COORDINATOR_MESSAGES,
    MANIFESTS,
    SITE_MESSAGES,
    TEXTS,
    UINT64,
    damaged,
    fuzz,
    instances,
    peak_bytes,
    protos,
)

HEADER = m.Header(protocol_version=PROTOCOL_VERSION, run_id="run", site_id=1, incarnation=1)
MAX_BYTES_FOR_A_BYTE = 200
"""Of Python objects for each byte of a message: the smallest item, a number in a list, is one byte there."""
FIXED_BYTES = 1 << 18

ENVELOPES: list[Any] = [session_pb2.SessionRequest, session_pb2.SessionResponse]


@pytest.mark.parametrize("cls", ENVELOPES)
@fuzz(300)
@given(st.data())
def test_any_content_is_a_message_or_refused(cls: Any, data: st.DataObject) -> None:
    envelope = data.draw(protos(cls))
    try:
        header, body = wire.unpack(envelope)
    except InvalidMessage:
        return
    # What passes can be said again, and means the same.
    pack: Any = wire.request if cls is session_pb2.SessionRequest else response
    assert wire.unpack(pack(body, header, envelope.seq, envelope.ack)) == (header, body)


@pytest.mark.parametrize("cls", ENVELOPES)
@fuzz(120)
@given(st.data())
def test_any_bytes_are_a_message_or_refused(cls: Any, data: st.DataObject) -> None:
    from_site = cls is session_pb2.SessionRequest
    body = data.draw(st.one_of([instances(c) for c in (SITE_MESSAGES if from_site else COORDINATOR_MESSAGES)]))
    pack: Any = wire.request if from_site else response
    whole = wire.to_bytes(pack(body, HEADER, 1, 0))
    received = data.draw(damaged(whole))

    def parse() -> None:
        try:
            envelope = wire.parse(cls, received)
            assert received == whole or envelope.header.protocol_version != PROTOCOL_VERSION, "nothing else passes"
            wire.unpack(envelope)
        except InvalidMessage:
            pass

    assert peak_bytes(parse) < FIXED_BYTES + MAX_BYTES_FOR_A_BYTE * len(received)


@fuzz(300)
@given(st.one_of([instances(body) for body in SITE_MESSAGES]), st.data())
def test_the_coordinators_door_lets_in_or_refuses(body: Any, data: st.DataObject) -> None:
    received = data.draw(damaged(wire.to_bytes(wire.request(body, HEADER, 1, 0))))
    try:
        streams.parse(received)
    except InvalidMessage:  # both are answered
        pass


JSON = st.recursive(
    st.none() | st.booleans() | ANY_FLOATS | UINT64 | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
DEEP = "[" * 100_000


@st.composite
def statuses(draw: st.DrawFn) -> str:
    """A coordinator's own document with some of its values replaced, or any text."""
    story = Story(some_settings())
    story.start("a", "b")
    story.commit_one("a", "b", state="s0", following="s1")
    document: Any = asdict(story.view)
    parts = [document, document["sites"][0], document["commits"][0]]
    for inside in draw(st.lists(st.sampled_from(parts), max_size=2)):
        inside[draw(st.sampled_from(sorted(inside)))] = draw(JSON)
    return draw(st.just(json.dumps(document)) | TEXTS | st.sampled_from([DEEP, '{"sites": ' + DEEP, "3", "nan", "{}"]))


@fuzz(100)
@given(statuses())
def test_any_status_of_a_coordinator_is_shown_or_refused(text: str) -> None:
    try:
        status = parse_status(read_document(session_pb2.StatusResponse(json=text).json, "a:1"))
    except InvalidMessage:
        return
    shown = "\n".join([text_lines(status), *data_lines(status)])
    assert all(c.isprintable() or c == "\n" for c in shown), "nothing steers a terminal"


@pytest.mark.parametrize("cls", [Manifest, m.Plan, m.Commit, m.Open], ids=lambda cls: cls.__name__)
@fuzz(150)
@given(st.data())
def test_what_a_store_keeps_is_read_back_or_refused(cls: Any, data: st.DataObject) -> None:
    value = data.draw(MANIFESTS if cls is Manifest else instances(cls))
    try:
        came = wire.decode(cls, wire.encode(value))  # as through the door: texts without control characters
        assert wire.decode(cls, wire.encode(came)) == came
        found = wire.decode(cls, data.draw(damaged(wire.encode(value))))
    except InvalidMessage:
        return
    if isinstance(found, Manifest):
        assert len(found.digest) == 32
