"""The node's stream to the coordinator: connect, notice silence, connect again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc

from atoll.node.tasks import end
from atoll.protocol import differences, sources_parts, transport, wire
from atoll.protocol import messages as m
from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.machine import Machine
from atoll.protocol.text import clean
from atoll.protocol.time_limits import TimeLimits
from atoll.protocol.traces import Metadata
from atoll.protocol.trust.invites import check_addresses
from atoll.protocol.v1 import session_pb2

SESSION_METHOD = "/atoll.protocol.v1.CoordinatorService/Session"
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 2.0
FIRST_CONNECT_S = 1.0
MAX_ROUND_S = 1.0
"""Where there are several addresses: the first limit for one, and between two rounds of all."""


@dataclass(eq=False, kw_only=True)
class Session:
    """Runs until `close`. What it calls is called on the event loop."""

    addresses: Sequence[str]
    """Of those that may serve the run; one of them does. Each is tried in its turn."""
    handshake: Callable[[], transport.Handshake | None] = lambda: None
    """Of the next connection; None for plain text."""
    limits: TimeLimits
    machine: Machine
    opened: Callable[[], None]
    lost: Callable[[str], None]
    received: Callable[[m.Header, m.CoordinatorMessage], None]
    header: Callable[[], m.Header]
    metadata: Callable[[], Metadata | None] = lambda: None
    """Of the next stream."""

    def __post_init__(self) -> None:
        self.num_refused_messages = 0
        self.num_streams = 0
        self._outgoing: asyncio.Queue[tuple[m.SiteMessage, int] | None] = asyncio.Queue()
        self._seq = 0
        self._received_seq = 0
        self._closing = False
        self._is_open = False
        self._is_welcomed = False  # on this stream, or the last one
        self._known = list(self.addresses)
        self._tried = 0  # one after the other

    def send(self, message: m.SiteMessage) -> None:
        """Dropped while there is no stream: Hello must be the first message of the next one."""
        if self._is_open:
            # What was heard when this was said, not when it went.
            self._outgoing.put_nowait((message, self._received_seq))

    async def close(self) -> None:
        """Send what is queued, then end the stream."""
        self._closing = True
        self._outgoing.put_nowait(None)

    async def run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._closing:
            reason = await self._one_stream()
            if self._is_welcomed:
                backoff_s = FIRST_BACKOFF_S
                self._tried %= len(self._known)
            self.lost(reason)
            if self._closing:
                return
            self._tried += 1
            if not self._is_welcomed and self._tried % len(self._known):
                continue  # the next one may serve the run
            await self._pause(backoff_s * self.machine.random.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S if len(self._known) == 1 else MAX_ROUND_S)

    async def _pause(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)

    async def _one_stream(self) -> str:
        """Why it ended."""
        self._is_welcomed = False
        self._outgoing = asyncio.Queue()
        self._seq = self._received_seq = 0
        address = self.address
        channel = self.machine.network.open_channel(
            address, handshake=self.handshake(), max_message_bytes=transport.MAX_SESSION_MESSAGE_BYTES
        )
        reading: asyncio.Task[str] | None = None
        try:
            try:
                async with asyncio.timeout(self._connect_s):
                    if not await self._is_ready(channel):
                        return f"{address} refuses connections"
            except TimeoutError:
                return f"{address} does not answer"
            # Bytes: what cannot be read is this module's to judge.
            method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(SESSION_METHOD)
            broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            call = method(self._requests(broken), metadata=self.metadata())
            self._is_open = True
            self.num_streams += 1
            self.opened()
            reading = asyncio.create_task(self._read(call))
            await asyncio.wait([reading, broken], return_when=asyncio.FIRST_COMPLETED)
            return broken.result() if broken.done() else reading.result()
        finally:
            self._is_open = False
            if reading is not None:
                await end([reading])
            self._outgoing.put_nowait(None)  # ends `_requests`, which grpc leaves waiting when a stream breaks
            await channel.close()

    @property
    def address(self) -> str:
        """Where the coordinator is, or is looked for."""
        return self._known[self._tried % len(self._known)]

    @property
    def _connect_s(self) -> float:
        """One that lost its machine holds up the others at first for a short time: it may be that all are slow."""
        num_rounds = self._tried // len(self._known)
        limit_s = self.limits.connect_s
        return limit_s if len(self._known) == 1 else min(limit_s, FIRST_CONNECT_S * 2.0 ** min(num_rounds, 8))

    @property
    def _silence_s(self) -> float:
        """Of a coordinator that is gone, or hangs: where another one may have its place, two heartbeats are enough."""
        return self.limits.lease_s if len(self._known) == 1 else 2 * self.limits.heartbeat_s

    async def _is_ready(self, channel: grpc.aio.Channel) -> bool:
        """False as soon as it is known that nobody listens, where somebody else may. One alone is dialled again and
        again by gRPC itself."""
        if len(self._known) == 1:
            await channel.channel_ready()
            return True
        while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                return False
            await channel.wait_for_state_change(state)
        return True

    def _learn(self, coordinators: Sequence[str]) -> None:
        """What serves the run says who else may. Raises InvalidMessage."""
        if not coordinators:
            return
        try:
            check_addresses(coordinators)
        except ConfigError as error:
            raise InvalidMessage(str(error)) from None
        here = self.address
        self._known = list(dict.fromkeys((here, *self.addresses, *coordinators)))
        self._tried = 0

    async def _requests(self, broken: asyncio.Future[str]) -> AsyncIterator[bytes]:
        """`broken` hears of a message that cannot be made: grpc would take that for the end of the stream."""
        outgoing = self._outgoing
        while (item := await outgoing.get()) is not None:
            message, ack = item
            self._seq += 1
            try:
                request = wire.to_bytes(wire.request(message, self.header(), self._seq, ack))
            except Exception as error:
                if not broken.done():
                    broken.set_exception(error)
                return
            yield request

    async def _read(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> str:
        """A session that hears nothing for a lease is cut off, whatever the socket says."""
        told, sources = differences.NOTHING, sources_parts.Parts()
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    data = await call.read()
                if not isinstance(data, bytes):
                    return "the coordinator ended the session"
                envelope = wire.parse(session_pb2.SessionResponse, data)
                header, short = wire.unpack(envelope)
                message = differences.complete(short, wire.left_out(envelope), told)
                told = differences.after(message, told)
                self._received_seq = envelope.seq
                self._learn(envelope.coordinators)
                if isinstance(message, m.Sources):
                    whole = sources.add(message)
                    if whole is None:
                        continue
                    message = whole
            except TimeoutError:
                return f"heard nothing for {self._silence_s:g} s"
            except InvalidMessage as error:
                # What it said is lost; after the next Hello the coordinator says again what is pending.
                self.num_refused_messages += 1
                return f"a message that cannot be read: {error}"
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.PERMISSION_DENIED:
                    return error.details() or str(error.code())
                # At the door, before anything is heard of a Hello: it was banned, or its key replaced, meanwhile.
                text = clean(error.details() or "the coordinator does not let this site in")
                self.received(self.header(), m.Refused(kind=m.RefusedKind.BANNED, text=text))
                return text
            # Outside: what a handler raises is not the stream's.
            if isinstance(message, m.Welcome) and header.run_id == self.header().run_id:
                self._is_welcomed = True
            self.received(header, message)
