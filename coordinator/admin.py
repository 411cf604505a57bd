"""Commands for the coordinator's own machine: a Unix socket beside the store, for its owner only.

A request is one line of JSON, `{"command": "stop", "reason": "..."}`, or "rollback" (with "to": a commit that sites
have passed), "evict" or "let-in" (with "name"), or "reset"; so is the answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from atoll.protocol.errors import HostError
from atoll.protocol.text import clean

MAX_LINE_BYTES = 4096
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


class Administered(Protocol):
    """What people may ask of a run. Those that answer say why it cannot be done; empty: it is."""

    def ask_to_stop(self, reason: str) -> None: ...

    def ask_to_roll_back(self, reason: str) -> None: ...

    async def go_back(self, commit: int, reason: str) -> str: ...

    async def evict(self, name: str, reason: str, *, keep_out: bool) -> str: ...

    async def let_in(self, name: str) -> str: ...

    async def reset(self, reason: str) -> str: ...

    async def document(self) -> dict[str, Any]: ...


class AdminServer:
    """Answers on the socket beside the store, whose lock the caller holds: a socket that is there is a leftover."""

    def __init__(
        self,
        store_path: Path,
        *,
        server: Administered,
    ) -> None:
        self.path = socket_path(store_path)
        self._run = server
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
            try:
                async with asyncio.timeout(ANSWER_LIMIT_S):
                    request = json.loads(await reader.readline())
                async with asyncio.timeout(GO_BACK_LIMIT_S if _goes_back(request) else ANSWER_LIMIT_S):
                    answer = await self._execute(request)
            except (ValueError, asyncio.LimitOverrunError) as error:
                answer = {"ok": False, "error": f"not a line of JSON: {error}"}
            async with asyncio.timeout(ANSWER_LIMIT_S):
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, ConnectionError):
            pass  # the other side went away or said nothing
        finally:
            writer.close()

    async def _execute(self, request: Any) -> dict[str, Any]:
        command = request.get("command") if isinstance(request, dict) else None
        if command == "stop":
            status = await self._run.document()
            self._run.ask_to_stop(_reason(request, "atoll stop"))
            return {"ok": True, "over": status["state"] if status["finished"] else ""}
        if _goes_back(request):
            problem = await self._run.go_back(request["to"], _reason(request, "atoll rollback --to"))
            return {"ok": not problem, "error": problem}
        if command == "rollback":
            unreachable = (await self._run.document())["unreachable"]
            if not unreachable:
                return {
                    "ok": False,
                    "error": "no need to: the newest commit is held, or may still be reached",
                }
            self._run.ask_to_roll_back(_reason(request, "atoll rollback"))
            return {"ok": True, "was": unreachable}
        if command in ("evict", "let-in", "reset"):
            problem = await self._change_members(command, request)
            return {"ok": not problem, "error": problem}
        known = "stop, rollback, evict, let-in, reset and status"
        return {"ok": False, "error": f"unknown command {command!r}; there are {known}"}

    async def _change_members(self, command: str, request: dict[str, Any]) -> str:
        name, reason = clean(str(request.get("name") or ""))[:64], _reason(request, f"atoll {command}")
        if command == "reset":
            return await self._run.reset(reason)
        if command == "let-in":
            return await self._run.let_in(name)
        return await self._run.evict(name, reason, keep_out=bool(request.get("keep_out")))


def _reason(request: dict[str, Any], default: str) -> str:
    """As it can be kept and sent: a terminal of another encoding types what is no text."""
    return clean(str(request.get("reason") or default))[:1024]


def _goes_back(request: Any) -> bool:
    return isinstance(request, dict) and request.get("command") == "rollback" and isinstance(request.get("to"), int)


def _ask(store_path: Path, request: dict[str, Any], limit_s: float = ANSWER_LIMIT_S) -> dict[str, Any]:
    path = socket_path(store_path.absolute())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_LIMIT_S)
        try:
            with _short(path) as name:
                connection.connect(name)
            connection.sendall(json.dumps(request).encode() + b"\n")
            connection.settimeout(limit_s)
            with connection.makefile("rb") as file:
                answer: dict[str, Any] = json.loads(file.readline())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise HostError(
                f"no coordinator answers at {path} ({reason}): is it running on this machine, with this store?"
            ) from None
    if not answer.get("ok"):
        raise HostError(f"the coordinator at {path} refused: {answer.get('error')}")
    return answer


def request_stop(store_path: Path, reason: str = "atoll stop") -> str:
    """Ends the run with the sync that is open; how it ended if it is over already, else empty.

    Raises HostError if no coordinator has this store.
    """
    over: str = _ask(store_path, {"command": "stop", "reason": reason})["over"]
    return over


def request_rollback(store_path: Path, reason: str = "atoll rollback") -> str:
    """Gives up the commits that nobody who is here can reach; what the run was waiting for.

    Raises HostError if no coordinator has this store, or somebody who is here can reach the newest commit.
    """
    was: str = _ask(store_path, {"command": "rollback", "reason": reason})["was"]
    return was


def request_return(store_path: Path, commit: int, reason: str = "atoll rollback --to") -> None:
    """The run goes back to `commit`, which sites have passed; returns once that is decided.

    Raises HostError if no coordinator has this store, or the run does not go back: why.
    """
    _ask(store_path, {"command": "rollback", "to": commit, "reason": reason}, GO_BACK_LIMIT_S)


def request_eviction(store_path: Path, name: str, reason: str = "", *, keep_out: bool = False) -> None:
    """The site is evicted; with `keep_out` it cannot come back. Raises HostError if that cannot be done: why."""
    _ask(store_path, {"command": "evict", "name": name, "reason": reason, "keep_out": keep_out})


def request_admission(store_path: Path, name: str) -> None:
    """A site that was kept out may come in again. Raises HostError if that cannot be done: why."""
    _ask(store_path, {"command": "let-in", "name": name})


def request_reset(store_path: Path, reason: str = "") -> None:
    """Model and starting state are taken back. Raises HostError if that cannot be done: why."""
    _ask(store_path, {"command": "reset", "reason": reason})
