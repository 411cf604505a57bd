"""Pages for people and programs over HTTP, read-only, on the event loop: bounded connections, requests and waits.

Whoever opens connections and says nothing takes no thread, no place for long, and no descriptor that others need: where
all places are taken, the connection that has been silent for longest ends.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import generate_latest
from prometheus_client.core import Metric

from atoll.protocol import addresses
from atoll.protocol.errors import HostError

MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 8 << 10
REQUEST_LIMIT_S = 5.0
"""For the whole request to come."""
ANSWER_LIMIT_S = 10.0
"""For the answer to be made, and again for it to be read."""
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
PLAIN = "text/plain; charset=utf-8"
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    kind: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def text(code: int, line: str) -> Answer:
    return Answer(code, PLAIN, line.encode() + b"\n")


@dataclass(frozen=True, slots=True)
class _Collected:
    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def metrics(families: Iterable[Metric], headers: Mapping[str, str] | None = None) -> Answer:
    """In the text format of Prometheus."""
    return Answer(200, PROMETHEUS_TEXT, generate_latest(_Collected(families)), headers or {})


class Pages:
    """Serves what `answer(path)` gives, one request a connection, until `close`."""

    def __init__(self, answer: Callable[[str], Awaitable[Answer]]) -> None:
        self.address = ""
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._silent: dict[asyncio.StreamWriter, None] = {}  # no request yet; the oldest first
        self._busy: dict[asyncio.StreamWriter, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, listen: str, what: str) -> None:
        """Raises ConfigError, HostError; `what` names the pages in it."""
        host, port = addresses.parse_address(listen)
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            self._server = await asyncio.start_server(self._serve, sock=listening, limit=MAX_REQUEST_BYTES)
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

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._silent[writer] = None
        if len(self._silent) + len(self._busy) > MAX_CONNECTIONS:
            crowd = self._silent if len(self._silent) > 1 else self._busy
            oldest = next(iter(crowd))
            del crowd[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(REQUEST_LIMIT_S):
                request = await reader.readuntil(b"\r\n\r\n")
            if writer not in self._silent:
                return  # it had to make room
            del self._silent[writer]
            self._busy[writer] = None
            writer.write(_bytes_of(await self._answered(request)))
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a browser that went away, or somebody who says nothing: nobody's error
        except asyncio.CancelledError:
            pass  # by `close`; asyncio's streams would log it as an error of ours
        finally:
            self._tasks.discard(task)
            self._silent.pop(writer, None)
            self._busy.pop(writer, None)
            writer.transport.abort()

    async def _answered(self, request: bytes) -> Answer:
        words = request.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return text(400, "not a request")
        if words[0] != b"GET":
            return text(405, "pages can be read only")
        path = words[1].split(b"?", 1)[0].decode("ascii", "replace")
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                return await self._answer(path)
        except TimeoutError:
            return text(503, f"no answer within {ANSWER_LIMIT_S:g} s")


def _bytes_of(answer: Answer) -> bytes:
    headers = {
        "Content-Type": answer.kind,
        "Content-Length": str(len(answer.body)),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Connection": "close",
        **answer.headers,
    }
    lines = [f"HTTP/1.1 {answer.code} {REASONS[answer.code]}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + answer.body
