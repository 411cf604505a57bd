"""Pages for people and programs over HTTP or HTTPS, read-only, on the event loop: bounded connections, requests and
waits.

Whoever opens connections and says nothing takes no thread, no place for long, and no descriptor that others need: where
all places are taken, the connection that has been silent for longest ends. Connections have a pace, and handshakes of
TLS another one. So have requests of an address: those beyond it wait, and keep no other address waiting.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from prometheus_client import generate_latest
from prometheus_client.core import Metric

from atoll.protocol import addresses, http
from atoll.protocol.accepting import Accepting
from atoll.protocol.errors import HostError
from atoll.protocol.handshakes import MAX_ADDRESSES, Handshakes
from atoll.protocol.http import Answer, Request, plain_text
from atoll.protocol.pace import Buckets, Pace
from atoll.protocol.page_access import Access, ByName

log = logging.getLogger(__name__)

CONNECTIONS = Pace(at_once=256, per_s=64.0)
"""Of one address: as many as it has requests, of people and of machines. Each takes some 0.3 ms of the event loop, also
without a request."""
ACCEPTED = Pace(at_once=1024, per_s=250.0)
"""Connections that are taken from the kernel, of all addresses."""
MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 8 << 10
REQUEST_LIMIT_S = 5.0
"""For the whole request to come, and for its turn."""
REQUESTS = Pace(at_once=64, per_s=32.0)
"""Of one address. Each takes some 0.4 ms of the event loop; a browser asks four times in three seconds. All places are
waited for in two seconds, less than REQUEST_LIMIT_S."""
OF_MACHINES = ("/livez", "/healthz", "/readyz", "/metrics", "/sd")
"""Have the same pace once more: behind a proxy all viewers are one address, which may be that of Prometheus, too."""
ANSWER_LIMIT_S = 10.0
"""For the answer to be made, and again for it to be read."""
OPEN = ByName(())
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class _Collected:
    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def metrics(families: Iterable[Metric], headers: Mapping[str, str] | None = None) -> Answer:
    """In the text format of Prometheus."""
    return Answer(200, PROMETHEUS_TEXT, generate_latest(_Collected(families)), headers or {})


class Pages:
    """Serves what `answer(path)` gives to whom `access` lets in, one request a connection, until `close`."""

    def __init__(self, answer: Callable[[str], Awaitable[Answer]], access: Access = OPEN) -> None:
        self.address = ""
        self._answer = answer
        self._access = access
        self._accepting: Accepting | None = None
        # By what a connection does, the oldest first: no request is there yet, it waits for its turn, it is answered.
        self._silent: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._waiting: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._busy: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._came = Buckets[str](CONNECTIONS, MAX_ADDRESSES)
        self._accepted = Buckets[None](ACCEPTED, 1)
        self._handshakes = Handshakes()
        self._requests = Buckets[tuple[str, bool]](REQUESTS, MAX_ADDRESSES)

    async def start(self, listen: str, what: str) -> None:
        """Raises ConfigError, HostError; `what` names the pages in it."""
        host, port = addresses.parse_address(listen)
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            self._accepting = Accepting(listening, self._take, self._may_come, log)
        except OSError as error:
            listening.close()
            raise HostError(
                f"cannot listen on {listen} for {what}: {error.strerror}; choose another --http-listen, or an empty "
                "one to leave it out"
            ) from None
        self.address = addresses.join_address(host, listening.getsockname()[1])

    async def close(self) -> None:
        if self._accepting is None:
            return
        self._accepting.close()
        self._accepting = None
        for writer in (*self._silent, *self._waiting, *self._busy):
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _may_come(self) -> bool:
        return self._accepted.take(None, asyncio.get_running_loop().time())

    def _take(self, accepted: socket.socket, address: str) -> bool:
        source, loop = addresses.source_of(address), asyncio.get_running_loop()
        if not self._came.take(source, loop.time()):
            accepted.close()
            return False
        accepted.setblocking(False)
        connecting = loop.create_task(self._connect(accepted, source))
        self._tasks.add(connecting)
        connecting.add_done_callback(lambda task: self._connected(task, accepted))
        return True

    async def _connect(self, accepted: socket.socket, source: str) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self._protocol(source), accepted)

    def _connected(self, task: asyncio.Task[None], accepted: socket.socket) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is not None:  # by `close`, perhaps before it began; or it has gone
            accepted.close()

    def _protocol(self, source: str) -> asyncio.StreamReaderProtocol:
        reader = asyncio.StreamReader(limit=MAX_REQUEST_BYTES)
        kind = asyncio.StreamReaderProtocol if self._access.tls is None else _OverTls
        return kind(reader, partial(self._serve, source))

    async def _serve(self, source: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, now = asyncio.current_task(), asyncio.get_running_loop().time()
        assert task is not None
        if self._access.tls is not None and self._handshakes.begin(source, now) is None:
            writer.transport.abort()
            return
        self._tasks.add(task)
        self._silent[writer] = task
        if len(self._silent) + len(self._waiting) + len(self._busy) > MAX_CONNECTIONS:
            crowd = self._waiting or (self._silent if len(self._silent) > 1 else self._busy)
            crowd.pop(next(iter(crowd))).cancel()  # a turn is waited for though the other side has gone
        try:
            async with asyncio.timeout(REQUEST_LIMIT_S):
                # Here, so that whoever does not finish the handshake is counted.
                answering = writer if self._access.tls is None else await _encrypted(reader, writer, self._access.tls)
                request = await _read(reader)
                del self._silent[writer]
                self._waiting[writer] = task
                await self._turn((source, request is not None and request.path in OF_MACHINES))
            del self._waiting[writer]
            self._busy[writer] = task
            answering.write((await self._answered(request, source)).to_bytes())
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await answering.drain()
                answering.close()
                await answering.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a browser that went away, or somebody who says nothing: nobody's error
        except asyncio.CancelledError:
            pass  # by `close`, or it made room; asyncio's streams would log it as an error of ours
        finally:
            self._tasks.discard(task)
            for crowd in (self._silent, self._waiting, self._busy):
                crowd.pop(writer, None)
            writer.transport.abort()

    async def _turn(self, whose: tuple[str, bool]) -> None:
        """To be answered. What is not waited for to its end does not count."""
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(self._requests.spend(whose, loop.time()))
        except asyncio.CancelledError:
            self._requests.give_back(whose, loop.time())
            raise

    async def _answered(self, request: Request | None, source: str) -> Answer:
        if request is None:
            return plain_text(400, "not a request")
        if (refusal := self._access.refusal(request)) is not None:
            return refusal
        self._handshakes.let_in(source)
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                return await self._answer(request.path)
        except TimeoutError:
            return plain_text(503, f"no answer within {ANSWER_LIMIT_S:g} s")


class _OverTls(asyncio.StreamReaderProtocol):
    """TLS has no half of a connection that stays open."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


async def _encrypted(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: ssl.SSLContext
) -> asyncio.StreamWriter:
    """What is written to from now on; `writer` stays the connection itself. (`StreamWriter.start_tls` of Python 3.11
    leaves a writer without a transport where the other side goes away.) Raises OSError."""
    loop, protocol = asyncio.get_running_loop(), writer.transport.get_protocol()
    made = await loop.start_tls(writer.transport, protocol, tls, server_side=True)
    if made is None:
        raise ConnectionAbortedError("it went away in the handshake")
    return asyncio.StreamWriter(made, protocol, reader, loop)


async def _read(reader: asyncio.StreamReader) -> Request | None:
    """None for what is no request, or has too long a body."""
    request = http.read_head(await reader.readuntil(b"\r\n\r\n"))
    if request is None or (num_bytes := http.body_bytes(request)) < 0:
        return None
    return replace(request, body=await reader.readexactly(num_bytes))
