"""Measuring links and being dialled: whatever is said, bytes and calls stay within their bounds."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.exchange.service import PeerService
from atoll.protocol import PROTOCOL_VERSION, measuring
from atoll.protocol.errors import InvalidMessage, PeerError
from atoll.protocol.measuring import MAX_BYTES, MAX_REQUESTS, PACE, Measures, measured
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import PLAIN, Caller
from atoll.protocol.v1 import common_pb2, peer_pb2

HEADER = common_pb2.Header(protocol_version=PROTOCOL_VERSION, run_id="run")
SIZES = st.sampled_from([0, 1, 1000, MAX_BYTES // 2, MAX_BYTES, MAX_BYTES + 1, (1 << 32) - 1])


class Ended(Exception):
    """With the words of a status."""


class Context:
    """One side of a call: what comes, and what was written."""

    def __init__(self, *frames: bytes) -> None:
        self._frames = deque(frames)
        self.written: list[bytes] = []

    async def read(self) -> object:
        return self._frames.popleft() if self._frames else None

    async def write(self, frame: bytes) -> None:
        self.written.append(frame)

    async def abort(self, code: object, details: str) -> None:
        raise Ended(details)

    def cancel(self) -> None:
        pass


class Known:
    """Of everybody who calls."""

    def __init__(self, name: str = "a") -> None:
        self.name = name

    def caller(self, context: Any) -> Caller:
        return Caller(Subject("run", Kind.SITE, self.name), bytes(32))


def asked(**fields: Any) -> bytes:
    return common_pb2.MeasureRequest(**fields).SerializeToString()


def answer(measures: Measures, *frames: bytes) -> list[common_pb2.MeasureResponse]:
    """Raises Ended."""
    context = Context(*frames)
    asyncio.run(measures.answer(None, context))
    return [common_pb2.MeasureResponse.FromString(frame) for frame in context.written]


def some(security: Any) -> Measures:
    return Measures("run", security)


@given(st.lists(st.binary(max_size=50) | st.builds(lambda n, a: asked(down_bytes=n, answer=a), SIZES, st.booleans())))
def test_any_request_is_answered_within_its_bounds_or_refused(frames: list[bytes]) -> None:
    context = Context(asked(header=HEADER), *frames)
    why = ""
    try:
        asyncio.run(some(Known()).answer(None, context))
    except Ended as error:
        why = str(error)
    assert not why or re.search("cannot be read|a link is measured with fewer", why)
    given_bytes = [len(common_pb2.MeasureResponse.FromString(frame).data) for frame in context.written]
    assert sum(given_bytes) <= MAX_BYTES
    assert max(given_bytes, default=0) <= measuring.FRAME_BYTES


def test_what_is_sent_is_counted_and_no_more_is_taken() -> None:
    frame = asked(data=bytes(1 << 20))
    (ended,) = answer(some(Known()), asked(header=HEADER), *[frame] * 8, asked(answer=True))
    assert (ended.end, ended.received_bytes) == (True, MAX_BYTES)
    with pytest.raises(Ended, match="a link is measured with fewer"):
        answer(some(Known()), asked(header=HEADER), *[frame] * 9)
    with pytest.raises(Ended, match="this is run 'run'"):
        answer(some(Known()), asked())


def test_messages_are_counted_too_and_what_they_have_beside_data() -> None:
    """Of empty ones any number would be read within the bytes."""
    with pytest.raises(Ended, match="a link is measured with fewer"):
        answer(some(Known()), asked(header=HEADER), *[b""] * MAX_REQUESTS)
    unknown = b"\xfa\x01\x80\x80\x40" + bytes(1 << 20)
    with pytest.raises(Ended, match="a link is measured with fewer"):
        answer(some(Known()), asked(header=HEADER), *[unknown] * 9)


def test_one_at_a_time_now_and_then_and_nobody_without_a_certificate() -> None:
    async def main() -> None:
        with pytest.raises(Ended, match="this run is in plain text"):
            await some(PLAIN).answer(None, Context())
        known = Known()
        measures = some(known)
        for _ in range(PACE.at_once):
            await measures.answer(None, Context(asked(header=HEADER)))
        with pytest.raises(Ended, match="site a of run run was measured 4 times just now"):
            await measures.answer(None, Context())
        known.name = "b"
        waits = asyncio.Event()

        class Slow(Context):
            async def read(self) -> object:
                await waits.wait()
                return None

        first = asyncio.create_task(measures.answer(None, Slow()))
        await asyncio.sleep(0)
        with pytest.raises(Ended, match="it measures the link of another site"):
            await measures.answer(None, Context())
        waits.set()
        await first
        await measures.answer(None, Context(asked(header=HEADER)))

    asyncio.run(main())


class Channel:
    def __init__(self, *frames: bytes) -> None:
        self._call = Context(*frames)

    def stream_stream(self, method: str, **_: Any) -> Any:
        return lambda: self._call


@given(
    st.lists(
        st.binary(max_size=50)
        | st.builds(
            lambda n, end: common_pb2.MeasureResponse(data=bytes(n), end=end).SerializeToString(),
            st.sampled_from([0, 1000, 1 << 20]),
            st.booleans(),
        )
    )
)
def test_any_answer_is_a_speed_or_an_error(frames: list[bytes]) -> None:
    channel: Any = Channel(*frames)
    try:
        speed = asyncio.run(measured(channel, "m", HEADER, "site b"))
    except (InvalidMessage, PeerError):
        return
    assert min(speed.round_trip_s, speed.up_bytes_per_s, speed.down_bytes_per_s) >= 0


# --- being dialled


def service(security: Any, dialled: list[Any]) -> PeerService:
    async def channel(member: Any, *_: Any) -> Any:
        dialled.append(member)
        raise PeerError("nobody answers", member.site_id)

    dialer = SimpleNamespace(channel=channel, disconnect=lambda *_: None)
    claims = SimpleNamespace(security=security, check=lambda *_: None)
    counters = SimpleNamespace(refuse=lambda _: None)
    hub: Any = SimpleNamespace(run_id="run", dialer=dialer, claims=claims, counters=counters, identity=lambda: None)
    return PeerService(hub)


def ask_to_dial(peer: PeerService, data: bytes) -> peer_pb2.DialMeResponse:
    context: Any = Context()
    return peer_pb2.DialMeResponse.FromString(asyncio.run(peer.dial_me(data, context)))


def to_dial(address: str = "b:1") -> bytes:
    return peer_pb2.DialMeRequest(header=HEADER, address=address).SerializeToString()


@given(st.binary(max_size=50) | st.text(max_size=400).map(to_dial))
def test_whoever_wants_to_be_dialled_is_dialled_by_its_own_name_or_refused(data: bytes) -> None:
    dialled: list[Any] = []
    try:
        said = ask_to_dial(service(Known(), dialled), data)
    except Ended:
        assert not dialled
        return
    (member,) = dialled
    assert (member.name, said.problem) == ("a", "nobody answers")
    assert len(member.address) <= 256


def test_nobody_is_dialled_again_and_again_or_without_a_certificate() -> None:
    dialled: list[Any] = []
    with pytest.raises(Ended, match="this run is in plain text"):
        ask_to_dial(service(PLAIN, dialled), to_dial())
    peer = service(Known(), dialled)

    async def many() -> None:
        context: Any = Context()
        for _ in range(PACE.at_once):
            await peer.dial_me(to_dial(), context)
        with pytest.raises(Ended, match="was dialled 4 times just now"):
            await peer.dial_me(to_dial(), context)

    asyncio.run(many())
    assert len(dialled) == PACE.at_once
