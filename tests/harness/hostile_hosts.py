"""Ends of streams between the hosts of a site that say what nobody should, without sockets."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st

from atoll.protocol.v1 import local_pb2
from tests.harness.fuzzing import damaged, protos
from tests.harness.peer_streams import Aborted

REFUSALS = {
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.DATA_LOSS,
}  # fmt: skip


class Stream:
    """The near end of one; it is over after what it has to say."""

    def __init__(self, received: list[Any]) -> None:
        self.received = deque(received)
        self.sent: list[Any] = []

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return self.received.popleft() if self.received else grpc.aio.EOF

    async def write(self, message: Any) -> None:
        self.sent.append(message)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(code, details)

    def cancel(self) -> None:
        self.received.clear()


class NotRead(Stream):
    """Nobody takes what is said on it."""

    async def write(self, _: Any) -> None:
        await asyncio.get_running_loop().create_future()


class Waiting(Stream):
    """It goes on in silence."""

    async def read(self) -> Any:
        if not self.received:
            await asyncio.get_running_loop().create_future()
        return await super().read()


def frames_of(cls: type[local_pb2.LocalRequest] | type[local_pb2.LocalResponse]) -> st.SearchStrategy[bytes]:
    whole = protos(cls).map(lambda frame: bytes(frame.SerializeToString()))
    return whole | whole.flatmap(damaged)


@st.composite
def words(draw: st.DrawFn, cls: type[Message], frames: st.SearchStrategy[bytes]) -> Any:
    """Any; those of ranks have frames that ranks could say, too."""
    word: Any = draw(protos(cls))
    if word.WhichOneof("body") == "frame" and draw(st.booleans()):
        word.frame.data = draw(frames)
    return word


@st.composite
def altered(draw: st.DrawFn, parts: list[Any]) -> list[Any]:
    """Messages of a stream, with some of them changed, left out, said twice, in another place, or quite others."""
    found = list(parts)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        match draw(st.sampled_from(["damage", "drop", "twice", "swap", "other"])):
            case "damage" if found:
                changed = type(found[at])()
                try:
                    changed.ParseFromString(draw(damaged(found[at].SerializeToString())))
                except DecodeError:
                    continue  # grpc itself refuses it
                found[at] = changed
            case "drop":
                del found[at : at + 1]
            case "twice":
                found[at:at] = found[at : at + 1]
            case "swap" if found:
                found[at], found[0] = found[0], found[at]
            case "other":
                found.insert(at, draw(protos(type(parts[0]))))
    return found
