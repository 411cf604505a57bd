"""A site that hears of calls at a relay, and leads each to its own port."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import NoReturn

from atoll.node.relay import greeting, outgoing, words
from atoll.node.relay.greeting import Stream
from atoll.node.relay.outgoing import Route
from atoll.node.relay.splice import Splice
from atoll.protocol.addresses import parse_address
from atoll.protocol.errors import InvalidMessage, RefusedError
from atoll.protocol.machine import Machine
from atoll.protocol.trust.security import MutualTls

log = logging.getLogger("atoll.node")

PING_EVERY_S = 15.0
"""Shorter than what a NAT forgets a connection after."""
SILENCE_LIMIT_S = 30.0
"""Of the relay, which answers each ping."""
FIRST_WAIT_S, MOST_WAIT_S = 0.1, 5.0
"""Before it is tried again; doubled from one to the other. A relay that leaves at once again is no reason to hurry."""
MAX_COMING = 64
"""Calls at a time that are being led here; a relay that says more is not followed."""


class Attached:
    """`run` until it is cancelled. Lives in one event loop; what it shows may be read from another."""

    def __init__(self, tls: MutualTls, route: Route, machine: Machine, *, start: int, to: str, max_calls: int) -> None:
        """`start`: of this node. `to`: its own port, to which as many as `max_calls` are led at a time."""
        self.is_attached = False
        self.problem = "it was not reached yet"
        """Why it is not."""
        self._tls = tls
        self._route = route
        self._start = start
        self._to = parse_address(to)
        self._machine = machine
        self._max_calls = max_calls
        self._warned = ""
        self._coming: set[asyncio.Task[None]] = set()
        self._splices: set[Splice] = set()

    async def run(self) -> None:
        wait_s, loop = FIRST_WAIT_S, asyncio.get_running_loop()
        try:
            while True:
                began = loop.time()
                problem = await self._once()
                if self.is_attached and loop.time() - began > MOST_WAIT_S:
                    wait_s = FIRST_WAIT_S
                if problem != self.problem:
                    log.warning("not attached to the relay at %s: %s", self._route.relay, problem)
                self.problem, self.is_attached = problem, False
                await asyncio.sleep(wait_s * self._machine.random.uniform(0.5, 1.0))
                wait_s = min(2.0 * wait_s, MOST_WAIT_S)
        finally:
            self.is_attached = False
            for task in self._coming:
                task.cancel()
            for splice in list(self._splices):
                splice.abort()

    async def _once(self) -> str:
        """Why it ended."""
        try:
            async with asyncio.timeout(outgoing.CONNECT_LIMIT_S):
                stream, answer = await outgoing.speak(self._tls, self._route, words.Attach(self._start))
            try:
                if not isinstance(answer, words.Attached):
                    raise InvalidMessage(f"it answers with {type(answer).__name__}")
                self.is_attached, self.problem = True, ""
                log.info("attached to the relay at %s", self._route.relay)
                await self._listen(stream)
            finally:
                stream[1].transport.abort()
        except (OSError, RefusedError) as error:
            return str(error) or "it does not answer"

    async def _listen(self, stream: Stream) -> NoReturn:
        """Raises OSError, InvalidMessage; never ends otherwise."""
        pinging = asyncio.create_task(_ping(stream[1]))
        try:
            while True:
                async with asyncio.timeout(SILENCE_LIMIT_S):
                    word = await greeting.read_word(stream[0])
                match word:
                    case words.Ticket():
                        self._begin(word)
                    case words.Told(text=text):
                        self._warn(f"says: {text}")
                    case words.Refused(text=text):
                        raise RefusedError(text)
                    case words.Pong():
                        pass
                    case _:
                        raise InvalidMessage(f"it says {type(word).__name__}")
        finally:
            pinging.cancel()

    def _begin(self, ticket: words.Ticket) -> None:
        if len(self._coming) >= MAX_COMING or len(self._splices) >= self._max_calls:
            self._warn("leads more calls here than are taken")
            return
        task = asyncio.create_task(self._lead(ticket))
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)

    async def _lead(self, ticket: words.Ticket) -> None:
        """A call to the node's port."""
        try:
            async with asyncio.timeout(outgoing.CONNECT_LIMIT_S):
                outer = await outgoing.with_ticket(self._route, ticket)
                try:
                    inner = await _own_port(self._to)
                except BaseException:
                    outer.close()
                    raise
            splice = Splice(outer, inner, ended=lambda: self._splices.discard(splice))
            self._splices.add(splice)
        except OSError as error:
            self._warn(f"leads calls here that come to nothing: {error or 'too slow'}")

    def _warn(self, text: str) -> None:
        """Once, if it is said again and again."""
        if text != self._warned:
            log.warning("the relay at %s %s", self._route.relay, text)
        self._warned = text


async def _own_port(place: tuple[str, int]) -> socket.socket:
    inner = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, socket.SOCK_STREAM)
    inner.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(inner, place)
    except BaseException:
        inner.close()
        raise
    return inner


async def _ping(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(PING_EVERY_S)
        writer.write(words.to_line(words.Ping()))
