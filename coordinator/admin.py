"""Commands for the coordinator's own machine: a Unix socket beside the store, for its owner only.

A request is one line (commands.py); so is the answer, in JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.coordinator.commands import MAX_LINE_BYTES, line_of
from atoll.coordinator.core.events import Answer
from atoll.protocol.errors import HostError

MAX_SOCKET_PATH_BYTES = 107  # the kernel's bound
ANSWER_LIMIT_S = 10.0
GO_BACK_LIMIT_S = 3600.0
"""Sites read snapshots and payloads, and write a state, before a rollback to an older commit is answered."""


def socket_path(store_path: Path) -> Path:
    return store_path.with_name(store_path.name + ".sock")


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
            raise HostError(f"{path}: the store's name is too long for a socket beside it; choose a shorter --store")
        yield short
    finally:
        os.close(folder)


class AdminServer:
    """Answers on the socket beside the store, whose lock the caller holds: a socket that is there is a leftover."""

    def __init__(self, store_path: Path, command: Callable[[bytes, str], Awaitable[Answer]]) -> None:
        """`command` does what a line says for the person that is named, and never raises for what it says."""
        self.path = socket_path(store_path)
        self._command = command
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Raises HostError if the socket cannot be made."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.unlink(missing_ok=True)
            with _short(self.path) as name:
                os.fchmod(listener.fileno(), 0o600)  # the mode that bind gives to the file
                listener.bind(name)
            self.path.chmod(0o600)
            self._server = await asyncio.start_unix_server(self._answer, sock=listener, limit=MAX_LINE_BYTES)
        except OSError as error:
            listener.close()
            raise HostError(f"cannot make the socket {self.path}: {error.strerror}; choose another --store") from None

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self.path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                try:
                    line = await reader.readline()
                except ValueError:
                    line = b""  # longer than any command
            async with asyncio.timeout(GO_BACK_LIMIT_S):  # who asks gives up before, unless it is for that
                answer = await self._command(line, _user_of(writer))
            async with asyncio.timeout(ANSWER_LIMIT_S):
                said = {"problem": answer.problem, "found": answer.found}
                writer.write(json.dumps(said).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, ConnectionError):
            pass  # the other side went away or said nothing
        finally:
            writer.close()


def _user_of(writer: asyncio.StreamWriter) -> str:
    """In words, by the kernel's knowledge of whom the socket is of."""
    connection = writer.get_extra_info("socket")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = f"user {uid}"
    return f"{name} on the coordinator's machine"


def ask(store_path: Path, command: str, *, limit_s: float = ANSWER_LIMIT_S, **fields: object) -> str:
    """Returns once it is done: how the run stood before, if that is of interest (`Answer.found`).

    Raises HostError if no coordinator has this store, or it refuses: why.
    """
    path = socket_path(store_path.absolute())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_LIMIT_S)
        try:
            with _short(path) as name:
                connection.connect(name)
            connection.sendall(line_of(command, **fields) + b"\n")
            connection.settimeout(limit_s)
            with connection.makefile("rb") as file:
                answer: dict[str, str] = json.loads(file.readline())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise HostError(
                f"no coordinator answers at {path} ({reason}): is it running on this machine, with this store?"
            ) from None
    if answer["problem"]:
        raise HostError(f"the coordinator at {path} refused: {answer['problem']}")
    return answer["found"]
