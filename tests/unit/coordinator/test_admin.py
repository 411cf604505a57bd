"""What people ask of a run on its socket, as it reaches the core."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from atoll.coordinator.admin import AdminServer, request_eviction, request_return, request_stop
from atoll.protocol import messages as m
from atoll.protocol import wire
from atoll.protocol.messages import RefusedKind


class Asked:
    """A run that only notes what it is asked."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def ask_to_stop(self, reason: str) -> None:
        self.words.append(reason)

    def ask_to_roll_back(self, reason: str) -> None:
        self.words.append(reason)

    async def go_back(self, commit: int, reason: str) -> str:
        self.words.append(reason)
        return ""

    async def evict(self, name: str, reason: str, *, keep_out: bool) -> str:
        self.words += [name, reason]
        return ""

    async def let_in(self, name: str) -> str:
        self.words.append(name)
        return ""

    async def reset(self, reason: str) -> str:
        self.words.append(reason)
        return ""

    async def document(self) -> dict[str, Any]:
        return {"state": "training", "finished": False, "unreachable": ""}


def test_what_is_no_text_reaches_the_run_as_escapes(tmp_path: Path) -> None:
    """A terminal of another encoding typed it. Kept and sent as it is, it would end the coordinator, each time that it
    is started."""
    run, store = Asked(), tmp_path / "run.db"
    typed = b"caf\xe9".decode(errors="surrogateescape")

    def ask() -> None:
        request_stop(store, typed)
        request_return(store, 3, typed)
        request_eviction(store, typed, typed, keep_out=True)

    async def main() -> None:
        server = AdminServer(store, server=run)
        await server.start()
        try:
            await asyncio.to_thread(ask)
        finally:
            await server.close()

    asyncio.run(main())
    assert run.words == ["caf\\udce9"] * 4
    for words in run.words:
        wire.response_body(m.Refused(kind=RefusedKind.KEPT_OUT, text=words))
