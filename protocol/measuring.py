"""How fast a link is, for `atoll doctor`: `Measures` answers at coordinator and nodes, `measured` asks.

Each way 8 MiB or two seconds, whichever comes first; one caller at a time, each now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from atoll.protocol import PROTOCOL_VERSION
from atoll.protocol.errors import AtollError, InvalidMessage, NotYetError, PeerError, RefusedError
from atoll.protocol.pace import Buckets, Pace
from atoll.protocol.status import abort, from_rpc_error
from atoll.protocol.trust.security import Security
from atoll.protocol.v1 import common_pb2

MAX_BYTES = 8 << 20
"""Each way, of one call."""
MAX_S = 2.0
"""Each way, of sending; what is on its way then still arrives."""
CALL_LIMIT_S = 20.0
FRAME_BYTES = 256 << 10
ROUND_TRIPS = 3
MAX_REQUESTS = 256
"""Of one call, which needs some forty."""
BESIDE_BYTES = 64 << 10
"""That all requests of a call may have beside their data."""
PACE = Pace(at_once=4, per_s=1 / 30)
"""Of one site."""
MAX_SITES = 4096
"""Of which the pace is remembered."""

T = TypeVar("T", common_pb2.MeasureRequest, common_pb2.MeasureResponse)
Write = Callable[[bytes], Awaitable[None]]
Give = Callable[[Write, bytes], Awaitable[None]]


async def _at_once(write: Write, frame: bytes) -> None:
    await write(frame)


class Measures:
    """Lives in one event loop."""

    def __init__(
        self,
        run_id: str,
        security: Security,
        *,
        check: Callable[[Any, common_pb2.Header], None] = lambda _context, _header: None,
        give: Give = _at_once,
    ) -> None:
        """`check` raises RefusedError for a caller that is not to be answered. `give` writes a frame in its turn."""
        self._run_id = run_id
        self._security = security
        self._check = check
        self._give = give
        self._is_busy = False
        self._calls = Buckets[str](PACE, MAX_SITES)

    @property
    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        return {"Measure": grpc.stream_stream_rpc_method_handler(self.answer)}

    async def answer(self, _requests: Any, context: Any) -> None:
        """A call, to its end."""
        try:
            self._let_in(context)
            try:
                async with asyncio.timeout(CALL_LIMIT_S):
                    await self._serve(context)
            except TimeoutError:
                raise PeerError(f"a link is measured for {CALL_LIMIT_S:g} s at most") from None
            finally:
                self._is_busy = False
        except AtollError as error:
            await abort(context, error)

    def _let_in(self, context: Any) -> None:
        caller = self._security.caller(context)
        if caller is None:
            raise RefusedError("links are measured for sites with certificates; this run is in plain text")
        if self._is_busy:
            raise NotYetError("it measures the link of another site: try again in a moment")
        if not self._calls.take(caller.subject.name, asyncio.get_running_loop().time()):
            raise NotYetError(f"{caller.subject} was measured {PACE.at_once} times just now: try again in a minute")
        self._is_busy = True

    async def _serve(self, context: Any) -> None:
        num_requests = whole = received = given = 0
        while isinstance(data := await context.read(), bytes):
            request = _parsed(common_pb2.MeasureRequest, data)
            if not num_requests:
                self._check_header(context, request.header)
            num_requests += 1
            whole += len(data)
            received += len(request.data)
            given += request.down_bytes
            if max(received, whole - BESIDE_BYTES, given) > MAX_BYTES or num_requests > MAX_REQUESTS:
                most = f"more than {MAX_BYTES} bytes one way, or {MAX_REQUESTS} messages"
                raise InvalidMessage(f"{most}: a link is measured with fewer")
            if request.down_bytes:
                await self._give_all(context, request.down_bytes)
            if request.answer:
                await context.write(_frame(end=True, received_bytes=received))

    def _check_header(self, context: Any, header: common_pb2.Header) -> None:
        if (header.run_id, header.protocol_version) != (self._run_id, PROTOCOL_VERSION):
            found = f"run {header.run_id[:64]!r} with protocol {header.protocol_version}"
            raise RefusedError(f"{found}; this is run {self._run_id!r} with {PROTOCOL_VERSION}")
        self._check(context, header)

    async def _give_all(self, context: Any, num_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + MAX_S
        for first in range(0, num_bytes, FRAME_BYTES):
            if loop.time() > until:
                return
            await self._give(context.write, _frame(data=bytes(min(FRAME_BYTES, num_bytes - first))))


def _parsed(cls: type[T], data: bytes) -> T:
    try:
        return cls.FromString(data)
    except DecodeError:
        raise InvalidMessage("a message that cannot be read") from None


def _frame(**fields: Any) -> bytes:
    return common_pb2.MeasureResponse(**fields).SerializeToString()


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a link."""

    round_trip_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float


async def measured(channel: grpc.aio.Channel, method: str, header: common_pb2.Header, where: str) -> Speed:
    """Over a connection that is made first. Raises PeerError, NotYetError (busy), RefusedError or InvalidMessage."""
    made: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
        method, request_serializer=None, response_deserializer=None
    )
    call = made()
    try:
        async with asyncio.timeout(CALL_LIMIT_S):
            return await _Asking(call, where).speed(header)
    except TimeoutError:
        raise PeerError(f"{where}: the link was not measured within {CALL_LIMIT_S:g} s") from None
    except grpc.RpcError as error:
        raise from_rpc_error(error, where) from None
    finally:
        call.cancel()


class _Asking:
    def __init__(self, call: grpc.aio.StreamStreamCall[bytes, bytes], where: str) -> None:
        self._call = call
        self._where = where
        self._loop = asyncio.get_running_loop()

    async def speed(self, header: common_pb2.Header) -> Speed:
        await self._asked(header=header)
        trips = [await self._asked() for _ in range(ROUND_TRIPS)]
        round_trip_s = min(took_s for took_s, _, _ in trips)
        up_bytes_per_s = await self._up(round_trip_s)
        took_s, num_bytes, _ = await self._asked(down_bytes=MAX_BYTES)
        return Speed(round_trip_s, up_bytes_per_s, num_bytes / max(took_s - round_trip_s, 1e-6))

    async def _asked(self, **fields: Any) -> tuple[float, int, int]:
        """Seconds to the end of the answer, bytes in it, and bytes that the other side has received."""
        began, num_bytes = self._loop.time(), 0
        await self._say(answer=True, **fields)
        while isinstance(data := await self._call.read(), bytes):
            answer = _parsed(common_pb2.MeasureResponse, data)
            num_bytes += len(answer.data)
            if num_bytes > MAX_BYTES:
                raise InvalidMessage(f"{self._where}: it sends more than it was asked for")
            if answer.end:
                return self._loop.time() - began, num_bytes, answer.received_bytes
        raise PeerError(f"{self._where}: it ended the call")

    async def _up(self, round_trip_s: float) -> float:
        began, data = self._loop.time(), bytes(FRAME_BYTES)
        for _ in range(MAX_BYTES // FRAME_BYTES):
            if self._loop.time() - began > MAX_S:
                break
            await self._say(data=data)
        _, _, received_bytes = await self._asked()
        return received_bytes / max(self._loop.time() - began - round_trip_s, 1e-6)

    async def _say(self, **fields: Any) -> None:
        await self._call.write(common_pb2.MeasureRequest(**fields).SerializeToString())
