"""Pages for people and programs over HTTP or HTTPS, read-only, on the event loop: bounded connections, requests and
waits.

Whoever opens connections and says nothing takes no thread, no place for long, and no descriptor that others need: where
all places are taken, the connection that has been silent for longest ends. Handshakes of TLS have a pace.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from prometheus_client import generate_latest
from prometheus_client.core import Metric

from atoll.protocol import addresses, http
from atoll.protocol.errors import HostError
from atoll.protocol.handshakes import Handshakes
from atoll.protocol.http import Answer, Request, plain_text
from atoll.protocol.page_access import Access, ByName

MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 8 << 10
REQUEST_LIMIT_S = 5.0
"""For the whole request to come."""
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
        self._server: asyncio.Server | None = None
        self._silent: dict[asyncio.StreamWriter, None] = {}  # no request yet; the oldest first
        self._busy: dict[asyncio.StreamWriter, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes = Handshakes()

    async def start(self, listen: str, what: str) -> None:
        """Raises ConfigError, HostError; `what` names the pages in it."""
        host, port = addresses.parse_address(listen)
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            self._server = await asyncio.get_running_loop().create_server(self._protocol, sock=listening)
        except OSError as error:
            listening.close()
            raise HostError(
                f"cannot listen on {listen} for {what}: {error.strerror}; choose another --http-listen, or an empty "
                "one to leave it out"
            ) from None
        self.address = addresses.join_address(host, listening.getsockname()[1])

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for writer in (*self._silent, *self._busy):
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        reader = asyncio.StreamReader(limit=MAX_REQUEST_BYTES)
        kind = asyncio.StreamReaderProtocol if self._access.tls is None else _OverTls
        return kind(reader, self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        source, now = addresses.source_of(writer.get_extra_info("peername")[0]), asyncio.get_running_loop().time()
        if self._access.tls is not None and self._handshakes.begin(source, now) is None:
            writer.transport.abort()
            return
        self._tasks.add(task)
        self._silent[writer] = None
        if len(self._silent) + len(self._busy) > MAX_CONNECTIONS:
            crowd = self._silent if len(self._silent) > 1 else self._busy
            oldest = next(iter(crowd))
            del crowd[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(REQUEST_LIMIT_S):
                # Here, so that whoever does not finish the handshake is counted.
                answering = writer if self._access.tls is None else await _encrypted(reader, writer, self._access.tls)
                request = await _read(reader)
            if writer not in self._silent:
                return  # it had to make room
            del self._silent[writer]
            self._busy[writer] = None
            answering.write((await self._answered(request, source)).to_bytes())
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await answering.drain()
                answering.close()
                await answering.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a browser that went away, or somebody who says nothing: nobody's error
        except asyncio.CancelledError:
            pass  # by `close`; asyncio's streams would log it as an error of ours
        finally:
            self._tasks.discard(task)
            self._silent.pop(writer, None)
            self._busy.pop(writer, None)
            writer.transport.abort()

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
