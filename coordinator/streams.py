"""Sessions as the coordinator's shell has them: messages in, bounded before they are parsed; messages out, encoded once
for all sites that get them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from atoll.coordinator import limits
from atoll.coordinator.core.events import Event, Garbled, Malformed, Received
from atoll.coordinator.paces import Paces
from atoll.protocol import differences, messages, sources_parts, wire
from atoll.protocol.differences import Told
from atoll.protocol.errors import DigestMismatch, InvalidMessage
from atoll.protocol.v1 import session_pb2

BODIES_KEPT = 16
"""Of messages sent last."""


class Stream:
    """One session: its outgoing queue, and what ends it."""

    def __init__(self, number: int, paces: Paces, site: str | None = None) -> None:
        """`site`: whose it is; None where nobody is known, and each stream has paces of its own."""
        self.number = number
        self._paces = paces
        self._who = f"stream {number}" if site is None else f"site {site}"
        self.outgoing: asyncio.Queue[tuple[wire.Body, bool] | None] = asyncio.Queue(limits.MAX_QUEUED_SENDS)
        self._queued_bytes = 0
        self.cut_off: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.slots = asyncio.Semaphore(limits.MAX_QUEUED_EVENTS)
        self.received_seq = 0
        self.sent_seq = 0
        self.told = differences.NOTHING
        self.deposits_to = 0  # as its Hello says
        # Of a message: what was said to the site makes larger ones due.
        self.most_bytes = limits.MAX_FIRST_MESSAGE_BYTES

    def expects(self, said: messages.CoordinatorMessage) -> None:
        match said:
            case messages.Welcome(site_id=0):
                self.most_bytes = max(self.most_bytes, limits.MAX_OFFER_BYTES)
            case messages.Welcome() | messages.SendManifest() | messages.Admitted():
                self.most_bytes = limits.MAX_MESSAGE_BYTES

    def put(self, body: wire.Body | None, *, is_counted: bool = True) -> None:
        """None ends the stream. The core counts what it sends, and judges by that what a site has heard: of what it
        sends in parts the last one alone is counted, and nothing of what it does not know of."""
        num_bytes = 0 if body is None else len(body.data)
        if self._queued_bytes + num_bytes > limits.MAX_QUEUED_BYTES:
            self.cut(f"{self._queued_bytes >> 20} MiB of messages wait for a site that does not read")
            return
        try:
            self.outgoing.put_nowait(None if body is None else (body, is_counted))
        except asyncio.QueueFull:
            self.cut(f"{limits.MAX_QUEUED_SENDS} messages wait for a site that does not read")
            return
        self._queued_bytes += num_bytes

    def cut(self, reason: str) -> None:
        if not self.cut_off.done():
            self.cut_off.set_result(reason)

    def say(self, message: messages.CoordinatorMessage, bodies: Bodies) -> None:
        """Queues it, shortened by what was told on this stream."""
        body = bodies.of(message, self.told)
        self.told = body.after
        self.expects(message)
        self.put(body.encoded)

    async def say_sources(self, sources: messages.Sources) -> None:
        """In parts, encoded in a thread: a long log of many sites is tens of megabytes."""
        for part in sources_parts.split(sources):
            body = await asyncio.to_thread(wire.response_body, part) if part.commits else wire.response_body(part)
            self.put(body, is_counted=not part.more)

    def deposit(self, deposits: messages.Deposits, bodies: Bodies) -> None:
        """Queues it, as what the shell says by itself."""
        self.put(bodies.of(deposits, self.told).encoded, is_counted=False)

    async def read(self, requests: AsyncIterator[bytes], happened: Callable[[Event], None]) -> str:
        """Until the site ends it: each message is an event. Why it ended."""
        try:
            async for data in requests:
                await self.slots.acquire()
                event = await self._event_of(data)
                kind = type(event.message if isinstance(event, Received) else event)
                await self._paces.in_its_time(self._who, kind)
                happened(event)
        except grpc.RpcError as error:
            return str(error) or type(error).__name__
        return "the site ended it"

    async def _event_of(self, data: bytes) -> Event:
        try:
            if len(data) > self.most_bytes:
                raise InvalidMessage(f"a message of {len(data)} bytes, at most {self.most_bytes} are due")
            if len(data) > limits.LARGE_MESSAGE_BYTES:
                envelope, header, message = await asyncio.to_thread(parse, data)
            else:
                envelope, header, message = parse(data)
        except DigestMismatch as error:
            return Garbled(self.number, str(error))
        except InvalidMessage as error:
            return Malformed(self.number, str(error))
        self.received_seq = envelope.seq
        return Received(self.number, header, message, envelope.ack)

    async def write(self, context: Any, header: messages.Header, coordinators: Callable[[], tuple[str, ...]]) -> str:
        """What is queued, until the end of it. `coordinators`: where the run is served, said again whenever it is
        another. Why it ended."""
        told: tuple[str, ...] = ()
        while (item := await self.outgoing.get()) is not None:
            body, is_counted = item
            self.sent_seq += is_counted
            before, told = told, coordinators()
            news = told if told != before else ()
            await context.write(wire.response_around(body, header, self.sent_seq, self.received_seq, news))
            self._queued_bytes -= len(body.data)
            self.outgoing.task_done()
        return "the coordinator ended it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A message as bytes, on streams on which `before` was told. Holds what it is known by."""

    message: messages.CoordinatorMessage
    before: Told
    after: Told
    encoded: wire.Body


class Bodies:
    """Messages as bytes. What goes to many sites is encoded once, though each is told other things in between: after a
    restart of the coordinator a thousand sites get their own Welcome, then the same commit and the same plan."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Body] = {}  # by identity, the last used at the end

    def of(self, message: messages.CoordinatorMessage, told: Told) -> Body:
        """On a stream on which this was told."""
        key = id(message), id(told)
        known = self._known.pop(key, None) or self._made(message, told)
        self._known[key] = known
        if len(self._known) > BODIES_KEPT:
            del self._known[next(iter(self._known))]
        return known

    def _made(self, message: messages.CoordinatorMessage, told: Told) -> Body:
        short, same = differences.shorten(message, told)
        after = differences.after(message, told)
        if after is not told:  # streams that were told the same in other ways have it in common from now on
            after = next((known.after for known in self._known.values() if known.after == after), after)
        return Body(message=message, before=told, after=after, encoded=wire.response_body(short, same))


def parse(data: bytes) -> tuple[session_pb2.SessionRequest, messages.Header, messages.SiteMessage]:
    """Raises InvalidMessage, DigestMismatch if the link changed it."""
    envelope = wire.parse(session_pb2.SessionRequest, data)
    header, message = wire.unpack(envelope)
    return envelope, header, message
