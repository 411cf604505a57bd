"""PeerService as it travels: the names of its methods, the header that every request passes first, how calls end, and
writing to a peer that may have stopped reading."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import grpc
import grpc.aio

from atoll.protocol import PROTOCOL_VERSION, traces
from atoll.protocol.errors import PeerError, RefusedError, StateError
from atoll.protocol.status import from_rpc_error, was_cancelled
from atoll.protocol.v1 import common_pb2, peer_pb2

SERVICE = peer_pb2.DESCRIPTOR.services_by_name["PeerService"].full_name
EXCHANGE_METHOD = f"/{SERVICE}/Exchange"
FETCH_STATE_METHOD = f"/{SERVICE}/FetchState"
FETCH_PAYLOADS_METHOD = f"/{SERVICE}/FetchPayloads"
DONATE_METHOD = f"/{SERVICE}/Donate"
PROBE_METHOD = f"/{SERVICE}/Probe"
MEASURE_METHOD = f"/{SERVICE}/Measure"
DIAL_ME_METHOD = f"/{SERVICE}/DialMe"

Context = grpc.aio.ServicerContext[bytes, bytes]
Stream = grpc.aio.StreamStreamCall[bytes, bytes]


class NotRead(PeerError):
    """The peer does not take what it asked for, or has had its turn: it is cut off (`status.cut_off`)."""


def open_stream(channel: grpc.aio.Channel, method: str) -> Stream:
    """Of frames as bytes, see frames.py."""
    call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
        method, request_serializer=None, response_deserializer=None
    )
    return call(metadata=traces.metadata())


def check_header(header: common_pb2.Header, run_id: str) -> None:
    """Raises RefusedError with both values for another run or protocol version."""
    if header.protocol_version != PROTOCOL_VERSION:
        raise RefusedError(
            f"protocol version {header.protocol_version}, this node speaks {PROTOCOL_VERSION}; update the older one"
        )
    if header.run_id != run_id:
        raise RefusedError(f"run {header.run_id[:64]!r}, this node is in run {run_id!r}")


async def write_within(limit_s: float, write: Callable[[bytes], Awaitable[None]], frame: bytes, who: str) -> None:
    """Raises NotRead."""
    try:
        async with asyncio.timeout(limit_s):
            await write(frame)
    except TimeoutError:
        raise NotRead(f"{who} has taken no byte for {limit_s:.1f} s of what it asked for") from None


@contextmanager
def call_errors(where: str, site_id: int, *, may_lack: bool = False) -> Iterator[None]:
    """Around a call to that peer: raises its end as one of atoll's errors. `may_lack`: it may say that it does not have
    what it is asked for (StateError). Of any other peer that would be taken for a fault of this site's state."""
    try:
        yield
    except asyncio.CancelledError:
        if was_cancelled():
            raise
        raise PeerError(f"{where}: it cancelled the call", site_id) from None
    except grpc.RpcError as error:
        ended = from_rpc_error(error, where)
        raise (ended if may_lack or not isinstance(ended, StateError) else PeerError(str(ended), site_id)) from None
