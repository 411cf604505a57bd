"""Commands for the coordinator's own machine: a Unix socket beside the store, for its owner only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from atoll.coordinator.commands import line_of
from atoll.coordinator.core.events import Answer
from atoll.protocol import line_socket
from atoll.protocol.errors import HostError
from atoll.protocol.line_socket import ANSWER_LIMIT_S, LineServer

GO_BACK_LIMIT_S = line_socket.LONGEST_S
"""Sites read snapshots and payloads, and write a state, before a rollback to an older commit is answered."""


def socket_path(store_path: Path) -> Path:
    return store_path.with_name(store_path.name + ".sock")


def admin_server(store_path: Path, command: Callable[[bytes, str], Awaitable[Answer]]) -> LineServer:
    """Beside the store, whose lock the caller holds. `command` does what a line says for the person that is named, and
    never raises for what it says."""

    async def answer(line: bytes, user: str) -> dict[str, str]:
        done = await command(line, f"{user} on the coordinator's machine")
        return {"problem": done.problem, "found": done.found}

    return LineServer(socket_path(store_path), answer)


def ask(store_path: Path, command: str, *, limit_s: float = ANSWER_LIMIT_S, **fields: object) -> str:
    """Returns once it is done: how the run stood before, if that is of interest (`Answer.found`).

    Raises HostError if no coordinator has this store, or it refuses: why.
    """
    path = socket_path(store_path)
    answer = line_socket.ask(path, line_of(command, **fields), "coordinator", limit_s=limit_s)
    if answer["problem"]:
        raise HostError(f"the coordinator at {path} refused: {answer['problem']}")
    return answer["found"]
