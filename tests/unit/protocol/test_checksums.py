"""What a link does to the bytes of a session is seen, whatever it changes; another version is refused by name."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import pytest

from atoll.protocol import PROTOCOL_VERSION, wire
from atoll.protocol import messages as m
from atoll.protocol.errors import DigestMismatch, InvalidMessage
from atoll.protocol.v1 import session_pb2
from tests.harness.envelopes import response

HASH = bytes(range(32))
HEADER = m.Header(protocol_version=PROTOCOL_VERSION, run_id="run", term=2, site_id=3, incarnation=1)
MEMBERS = tuple(m.Member(site_id=i, incarnation=1, address=f"10.0.0.{i}:7701", tokens=100 * i) for i in (1, 2))
OPEN = m.Open(sync=8, base_commit=7, run_step=70, run_tokens=7000, num_steps=10)
PLAN = m.Plan(
    sync=8,
    attempt=1,
    term=2,
    base_commit=7,
    contributors=MEMBERS,
    trees=(m.Tree(first_chunk=0, num_chunks=3, top=1),),
    stall_limit_s=6.0,
    num_steps=10,
    deadline_s=48.0,
    slowest_bytes_per_s=1024,
)
COMMIT = m.Commit(
    commit=7,
    sync=7,
    attempt=1,
    term=2,
    contributors=MEMBERS,
    payload_digest=HASH,
    run_step=70,
    run_tokens=7000,
    next=OPEN,
)
HELLO = m.Hello(name="berlin", key=HASH, address="10.0.0.3:7701", process_id=bytes(16))
REFUSED = m.Refused(kind=m.RefusedKind.PROTOCOL, text="install the same version")
READY = m.Ready(
    sync=8, tokens=300, num_steps=10, mean_loss=2.5, train_s=4.0, ranges=(m.DataRange(first=900, num_samples=300),)
)


def as_sent(message: Any, header: m.Header = HEADER) -> tuple[Any, bytes]:
    """The envelope's class, and the bytes on the wire."""
    if type(message) in (m.Ready, m.Hello):
        return session_pb2.SessionRequest, wire.to_bytes(wire.request(message, header, 5, 4))
    return session_pb2.SessionResponse, wire.response_around(wire.response_body(message), header, 5, 4)


MESSAGES = [READY, HELLO, PLAN, COMMIT, m.RolledBack(branch=2, commit=6, reason="lost"), REFUSED]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_flip_of_one_bit_is_seen(message: Any) -> None:
    cls, data = as_sent(message)
    header, body = wire.unpack(wire.parse(cls, data))
    assert (header, body) == (HEADER, message)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DigestMismatch):
            wire.parse(cls, bytes(flipped))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_torn_off_repeated_or_in_another_order_is_seen(message: Any) -> None:
    cls, data = as_sent(message)
    spoiled = [data[:end] for end in range(len(data))] + [data[start:] for start in range(1, len(data))]
    spoiled += [data + data, data + b"\0", data[len(data) // 2 :] + data[: len(data) // 2]]
    for received in spoiled:
        with pytest.raises(DigestMismatch):
            wire.parse(cls, received)


def test_bytes_that_are_as_they_were_sent_and_no_message_are_the_senders_fault() -> None:
    whole = wire.Body(b"\xff\xff", zlib.crc32(b"\xff\xff"))
    with pytest.raises(InvalidMessage, match="no session message") as raised:
        wire.parse(session_pb2.SessionResponse, wire.response_around(whole, HEADER, 1, 0))
    assert not isinstance(raised.value, DigestMismatch), "its checksum is right"


@pytest.mark.parametrize("message", [HELLO, REFUSED], ids=lambda message: type(message).__name__)
def test_hello_and_refused_of_a_version_without_checksums_can_be_read(message: Any) -> None:
    header = replace(HEADER, protocol_version=PROTOCOL_VERSION - 1)
    pack: Any = wire.request if message is HELLO else response
    envelope = pack(message, header, 1, 0)
    assert wire.unpack(wire.parse(type(envelope), envelope.SerializeToString())) == (header, message)
    for other in (HEADER, replace(HEADER, protocol_version=0)):
        with pytest.raises(DigestMismatch):
            wire.parse(type(envelope), pack(message, other, 1, 0).SerializeToString())


def test_other_messages_are_not_read_without_their_checksum() -> None:
    for message in (READY, PLAN, COMMIT):
        pack: Any = wire.request if message is READY else response
        envelope = pack(message, replace(HEADER, protocol_version=PROTOCOL_VERSION - 1), 1, 0)
        with pytest.raises(DigestMismatch):
            wire.parse(type(envelope), envelope.SerializeToString())
