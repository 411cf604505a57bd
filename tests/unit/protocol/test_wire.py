"""Dataclasses and protobuf messages are the same messages, and every bound is checked at the door."""

from __future__ import annotations

import dataclasses
import typing
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol import PROTOCOL_VERSION, layout, messages, wire
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.v1 import common_pb2, session_pb2
from tests.harness.envelopes import response
from tests.harness.fuzzing import messages_of

CLASSES = [
    cls
    for module in (messages, layout)
    for cls in vars(module).values()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
    if cls is not layout.Chunk
]
HEADER = messages.Header(protocol_version=PROTOCOL_VERSION, run_id="run", term=3, site_id=2, incarnation=5)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_fields_are_those_of_the_proto_message(cls: type) -> None:
    proto = getattr(common_pb2, cls.__name__, None) or getattr(session_pb2, cls.__name__)
    assert sorted(f.name for f in dataclasses.fields(cls)) == sorted(f.name for f in proto.DESCRIPTOR.fields)


@pytest.mark.parametrize("cls", [c for c in CLASSES if issubclass(c, tuple) is False], ids=lambda c: c.__name__)
def test_strings_and_repeated_fields_have_a_stated_bound(cls: type) -> None:
    hints = typing.get_type_hints(cls)
    unbounded = [
        f.name
        for f in dataclasses.fields(cls)
        if (hints[f.name] in (str, bytes) or typing.get_origin(hints[f.name]) is tuple) and "max" not in f.metadata
    ]
    assert not unbounded or cls.__module__ == layout.__name__, "the manifest checks itself"


def test_every_body_of_a_session_has_a_class() -> None:
    for proto, said_by in (
        (session_pb2.SessionRequest, messages.SiteMessage),
        (session_pb2.SessionResponse, messages.CoordinatorMessage),
    ):
        names = {f.message_type.name for f in proto.DESCRIPTOR.oneofs_by_name["body"].fields if f.message_type}
        assert {cls.__name__ for cls in messages_of(said_by)} == names
        assert all(dataclasses.is_dataclass(getattr(messages, name)) for name in names)


def test_a_commit_with_its_next_sync_comes_back_equal() -> None:
    member = messages.Member(site_id=1, incarnation=2, address="10.0.0.1:7", tokens=9)
    commit = messages.Commit(
        commit=4,
        sync=6,
        attempt=2,
        term=1,
        contributors=(member,),
        payload_digest=bytes(range(32)),
        run_step=80,
        run_tokens=1 << 40,
        next=messages.Open(sync=7, base_commit=4, run_step=80, run_tokens=1 << 40, num_steps=20, resting=(2, 5)),
    )
    header, body = wire.unpack(response(commit, HEADER, seq=3, ack=2))
    assert (header, body) == (HEADER, commit)
    assert wire.decode(messages.Commit, wire.encode(commit)) == commit


def test_a_message_that_is_encoded_once_arrives_as_one_that_was_encoded_for_its_site() -> None:
    plan = messages.Plan(
        sync=1,
        attempt=2,
        term=3,
        base_commit=0,
        contributors=(messages.Member(site_id=4, incarnation=1, address="h:1", tokens=5),),
        trees=(messages.Tree(first_chunk=0, num_chunks=3, top=1),),
        stall_limit_s=6.0,
        num_steps=20,
        deadline_s=48.0,
        slowest_bytes_per_s=1024,
    )
    for message in (plan, messages.Pulse()):
        body = wire.response_body(message)
        for seq in (1, 300):
            data = wire.response_around(body, HEADER, seq, 7)
            found = wire.parse(session_pb2.SessionResponse, data)
            found.ClearField("checksum")
            assert found == response(message, HEADER, seq, 7)


def test_a_field_that_a_newer_version_adds_is_passed_over() -> None:
    """In the envelope, in the body, in a message inside of it, and in what a store keeps."""
    unknown = bytes((1000 << 3 & 0x7F | 0x80, 1000 << 3 >> 7, 42))  # field 1000, a number
    inner = messages.Open(sync=7, base_commit=4, run_step=80, run_tokens=1 << 40, num_steps=20)
    message = messages.Abandoned(sync=6, reason="late", next=inner)
    encoded = wire.encode(message)
    assert wire.decode(messages.Abandoned, encoded + unknown) == message
    nested = wire.encode(inner) + unknown
    body = wire.encode(replace(message, next=None)) + b"\x1a" + bytes([len(nested)]) + nested + unknown
    field = session_pb2.SessionResponse.ABANDONED_FIELD_NUMBER << 3 | 2
    data = bytes((field & 0x7F | 0x80, field >> 7, len(body))) + body + unknown
    received = wire.parse(
        session_pb2.SessionResponse, wire.response_around(wire.Body(data, zlib.crc32(data)), HEADER, 1, 0)
    )
    assert wire.unpack(received) == (HEADER, message)


def test_an_absent_optional_message_is_none() -> None:
    abandoned = messages.Abandoned(sync=1, reason="all weights are 0")
    assert wire.unpack(response(abandoned, HEADER, 1, 0))[1].next is None


def test_a_field_over_its_bound_is_refused_by_name() -> None:
    envelope = wire.request(messages.Hello(name="a" * 65, key=b"", address=""), HEADER, 1, 0)
    with pytest.raises(InvalidMessage, match=r"Hello\.name: 65 items, at most 64"):
        wire.unpack(envelope)


def test_an_unknown_enum_value_is_refused() -> None:
    envelope = session_pb2.SessionResponse()
    envelope.refused.kind = 77  # type: ignore[assignment]
    with pytest.raises(InvalidMessage, match=r"Refused\.kind: unknown value 77"):
        wire.unpack(envelope)


def test_numbers_that_are_not_finite_are_refused() -> None:
    envelope = wire.request(messages.Ready(sync=1, tokens=1, num_steps=1, mean_loss=float("nan")), HEADER, 1, 0)
    with pytest.raises(InvalidMessage, match=r"Ready\.mean_loss"):
        wire.unpack(envelope)
    for norm in (float("nan"), float("inf"), 1e300):  # the last one is more than fp32 holds
        averaged = messages.Averaged(num_chunks=1, norms=(1.0, norm), num_high=(0, 0))
        done = messages.Done(
            sync=1, attempt=1, term=1, payload_digest=bytes(32), last_commit=0, state_hash=bytes(32), averaged=averaged
        )
        with pytest.raises(InvalidMessage, match=r"Averaged\.norms: not finite numbers"):
            wire.unpack(wire.request(done, HEADER, 1, 0))


def test_a_message_without_a_body_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="without a known body"):
        wire.unpack(session_pb2.SessionRequest())


@given(st.binary(max_size=400))
def test_no_bytes_crash_the_decoder(data: bytes) -> None:
    for cls in (messages.Plan, messages.Commit, layout.Manifest):
        try:
            wire.decode(cls, data)
        except InvalidMessage:
            continue


@pytest.mark.parametrize("num_bytes", [0, 31])
def test_a_digest_that_is_not_whole_is_refused(num_bytes: int) -> None:
    envelope = wire.request(messages.Applied(commit=1, state_hash=bytes(num_bytes)), HEADER, 1, 0)
    with pytest.raises(InvalidMessage, match=rf"Applied\.state_hash: {num_bytes} items, exactly 32"):
        wire.unpack(envelope)
