"""A Unix socket for its owner alone: a line is a request, a line of JSON the answer."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from atoll.protocol.errors import HostError

MAX_LINE_BYTES = 4096
"""Of a request."""
MAX_SOCKET_PATH_BYTES = 107  # the kernel's bound
ANSWER_LIMIT_S = 10.0
LONGEST_S = 3600.0
"""That an answer may take to be made."""


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for `path` that the kernel takes as a socket's address, however long the folder's name is."""
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        short = f"/proc/self/fd/{folder}/{path.name}"
        if len(os.fsencode(short)) > MAX_SOCKET_PATH_BYTES:
            raise HostError(f"{path}: the name is too long for a socket; choose a shorter one")
        yield short
    finally:
        os.close(folder)


class LineServer:
    """Answers on a socket of which the caller knows that nobody else does: one that is there is a leftover."""

    def __init__(self, path: Path, answer: Callable[[bytes, str], Awaitable[Mapping[str, str]]]) -> None:
        """`answer` is given a line and, in words, the user who says it; it never raises for what is said. A line that
        is too long is empty."""
        self.path = path
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises HostError if the socket cannot be made."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.unlink(missing_ok=True)
            with _short(self.path) as name:
                os.fchmod(listener.fileno(), 0o600)  # the mode that bind gives to the file
                listener.bind(name)
            self.path.chmod(0o600)
            self._server = await asyncio.start_unix_server(self._connected, sock=listener, limit=MAX_LINE_BYTES)
        except OSError as error:
            listener.close()
            raise HostError(f"cannot make the socket {self.path}: {error.strerror}; choose another place") from None

    async def close(self) -> None:
        """Whoever still waits for an answer gets none: what makes it may end after this."""
        if self._server is not None:
            self._server.close()
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)
            self.path.unlink(missing_ok=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                try:
                    line = await reader.readline()
                except ValueError:
                    line = b""
            async with asyncio.timeout(LONGEST_S):  # who asks gives up before, unless it is for that
                said = await self._answer(line, _user_of(writer))
            async with asyncio.timeout(ANSWER_LIMIT_S):
                writer.write(json.dumps(said).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, ConnectionError):
            pass  # the other side went away or said nothing
        finally:
            writer.close()


def _user_of(writer: asyncio.StreamWriter) -> str:
    """By the kernel's knowledge of whom the socket is of."""
    connection = writer.get_extra_info("socket")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def ask(path: Path, line: bytes, who: str, *, limit_s: float = ANSWER_LIMIT_S) -> dict[str, str]:
    """`who` answers there, in words. Raises HostError if nobody does."""
    path = path.absolute()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_LIMIT_S)
        try:
            with _short(path) as name:
                connection.connect(name)
            connection.sendall(line + b"\n")
            connection.settimeout(limit_s)
            with connection.makefile("rb") as file:
                answer: dict[str, str] = json.loads(file.readline())
                return answer
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise HostError(f"no {who} answers at {path} ({reason}): is it running on this machine?") from None
