"""Encoded chunks cut into frames and put together again; whatever else arrives is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.exchange.peers.frames import (
    FRAME_BYTES,
    MIN_PART_BYTES,
    Encoded,
    PartAssembler,
    pack_frames,
    parse,
)
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.transport import MAX_FRAME_BYTES
from atoll.protocol.v1 import peer_pb2

HASH = bytes(range(32))
MAX_BYTES = 100_000


def limit(chunk: int) -> int:
    if chunk >= 1000:
        raise InvalidMessage(f"chunk {chunk} does not belong here")
    return MAX_BYTES


def assemble(frames: list[peer_pb2.Parts]) -> list[Encoded]:
    assembler = PartAssembler(limit)
    return [done for frame in frames for part in frame.parts if (done := assembler.add(part)) is not None]


sizes = st.lists(st.one_of(st.integers(1, 300), st.integers(1, MAX_BYTES)), max_size=12)


@given(sizes, st.integers(8 << 10, 1 << 16))
@settings(max_examples=60)
def test_what_is_packed_comes_out_again(sizes: list[int], frame_bytes: int) -> None:
    items = [Encoded(i, bytes([i]) * size, HASH) for i, size in enumerate(sizes)]
    frames = list(pack_frames(items, frame_bytes))
    assert all(len(frame) <= frame_bytes + 16 for frame in frames)
    requests = [parse(peer_pb2.ExchangeRequest, frame) for frame in frames]
    assert assemble([r.contribution for r in requests]) == items
    responses = [parse(peer_pb2.ExchangeResponse, frame) for frame in frames]
    assert assemble([r.payload for r in responses]) == items
    bare = [parse(peer_pb2.FetchPayloadsResponse, f) for f in pack_frames(items, frame_bytes, wrapped=False)]
    assert assemble([peer_pb2.Parts(parts=b.parts) for b in bare]) == items


def test_frames_are_the_bytes_of_the_generated_code() -> None:
    items = [Encoded(3, b"abc", HASH), Encoded(300, b"x" * 200, HASH)]
    parts = [peer_pb2.Part(chunk=i.chunk, total_bytes=len(i.data), data=i.data, hash=HASH) for i in items]
    (frame,) = pack_frames(items)
    assert parse(peer_pb2.ExchangeRequest, frame) == peer_pb2.ExchangeRequest(contribution=peer_pb2.Parts(parts=parts))


def test_many_small_chunks_share_a_frame_and_a_large_one_has_several() -> None:
    small = [Encoded(i, b"1234", HASH) for i in range(1000)]
    assert len(list(pack_frames(small, wrapped=False))) == 1
    assert len(list(pack_frames(small))) == 2
    large = list(pack_frames([Encoded(0, bytes(3 * FRAME_BYTES), HASH)]))
    assert len(large) == 4
    assert max(map(len, large)) < MAX_FRAME_BYTES


@pytest.mark.parametrize("sizes", [[100], [300] * 400, [3 * FRAME_BYTES]])
def test_a_series_begins_with_a_small_frame_and_the_others_say_that_they_follow(sizes: list[int]) -> None:
    """What the receiver waits for the others, the link takes."""
    frames = list(pack_frames(Encoded(i, bytes(size), HASH) for i, size in enumerate(sizes)))
    assert len(frames[0]) < 2 * MIN_PART_BYTES
    assert (len(frames) > 1) == (sum(sizes) > MIN_PART_BYTES)
    follow = [False] + [True] * (len(frames) - 1)
    assert [parse(peer_pb2.ExchangeRequest, frame).follows for frame in frames] == follow
    assert [parse(peer_pb2.ExchangeResponse, frame).follows for frame in frames] == follow


def part(**fields: object) -> peer_pb2.Part:
    return peer_pb2.Part(**{"chunk": 1, "total_bytes": 3, "data": b"abc", "hash": HASH, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (part(total_bytes=MAX_BYTES + 1), "announced"),
        (part(total_bytes=0), "announced"),
        (part(total_bytes=0xFFFFFFFF), "announced"),
        (part(chunk=1000), "does not belong"),
        (part(chunk=0xFFFFFFFF), "does not belong"),
        (part(offset_bytes=1), "at byte 1"),
        (part(data=b"abcd"), "a part of 4 bytes"),
        (part(data=b""), "a part of 0 bytes"),
        (part(hash=b""), "hash"),
        (part(hash=b"x" * 31), "hash"),
        (part(total_bytes=4), "all but the last"),
        (part(total_bytes=MAX_BYTES, data=b"x" * MIN_PART_BYTES), "no other, carries a hash"),
    ],
)
def test_a_part_that_is_not_right_is_refused(bad: peer_pb2.Part, text: str) -> None:
    with pytest.raises(InvalidMessage, match=text):
        PartAssembler(limit).add(bad)


def test_chunks_of_one_stream_do_not_mix() -> None:
    assembler = PartAssembler(limit)
    assert assembler.add(part(total_bytes=8192, data=b"x" * 4096, hash=b"")) is None
    with pytest.raises(InvalidMessage, match="chunk 1 at byte 4096 of 8192 goes on"):
        assembler.add(part(chunk=2))


some_parts = st.builds(
    peer_pb2.Part,
    chunk=st.integers(0, 1100),
    offset_bytes=st.sampled_from([0, 1, 4096, 5000, 0xFFFFFFFF]),
    total_bytes=st.sampled_from([0, 1, 3, 4096, 8192, MAX_BYTES, MAX_BYTES + 1, 0xFFFFFFFF]),
    data=st.sampled_from([b"", b"x", b"abc", b"x" * 4096, b"x" * 5000]),
    hash=st.sampled_from([b"", b"short", HASH]),
)


@given(st.lists(some_parts, max_size=20))
@settings(max_examples=300)
def test_any_parts_are_taken_or_refused_within_the_bound(parts: list[peer_pb2.Part]) -> None:
    assembler = PartAssembler(limit)
    try:
        for each in parts:
            done = assembler.add(each)
            assert sum(map(len, assembler._pieces)) <= MAX_BYTES
            assert len(assembler._pieces) <= MAX_BYTES // MIN_PART_BYTES + 1
            if done is not None:
                assert done.chunk < 1000
                assert 0 < len(done.data) <= MAX_BYTES
    except InvalidMessage:
        pass


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for cls in (peer_pb2.ExchangeRequest, peer_pb2.ExchangeResponse, peer_pb2.FetchStateResponse):
        try:
            message = parse(cls, data)
        except InvalidMessage:
            continue
        assert isinstance(message, cls)
