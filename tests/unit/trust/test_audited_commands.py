"""What the coordinator's shell does for an operator or refuses, without its core, is in the audit log as well."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator import service
from atoll.coordinator.authority import Authority
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.core.asked import BanAsked, InviteAsked
from atoll.coordinator.core.records import InviteRecord
from atoll.coordinator.noting import TOLD_TO_END
from atoll.coordinator.service import CoordinatorServer
from atoll.coordinator.sqlite_store import SqliteStore
from atoll.protocol.errors import HostError, PeerError, RefusedError
from atoll.protocol.machine import Machine
from atoll.protocol.trust.invites import from_text
from atoll.protocol.trust.security import PLAIN, MutualTls
from tests.harness.coordinator_story import some_settings
from tests.harness.load_sites import joined
from tests.harness.sites import until

LIMIT_S = 60.0
OTTO = "operator otto (key 01)"


@asynccontextmanager
async def coordinator(folder: Path, *, is_plain: bool = False) -> AsyncIterator[CoordinatorServer]:
    config = CoordinatorConfig(store_path=folder / "run.db", listen="127.0.0.1:0")
    authority = None if is_plain else Authority.opened(folder / "trust", "run", Machine())
    tls = PLAIN if authority is None else MutualTls("run", authority.shown())
    store = SqliteStore(config.store_path)
    server = CoordinatorServer(config, some_settings(run_id="run"), store, authority=authority, security=tls)
    await server.start()
    running = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        await server.stop()
        await running
        store.close()


async def entries(server: CoordinatorServer) -> list[tuple[str, str, str]]:
    answer = await server.command(b'{"command": "audit"}', OTTO)
    return [(entry["by"], entry["what"], entry["outcome"]) for entry in json.loads(answer.found)]


async def asks(server: CoordinatorServer, *, is_here: bool = True, **command: Any) -> str:
    return (await server.command(json.dumps(command).encode(), OTTO, is_here=is_here)).problem


def test_a_copy_of_the_store_is_in_the_log_whether_it_was_made_or_not(tmp_path: Path) -> None:
    copy = str(tmp_path / "copy.db")

    async def main() -> None:
        async with coordinator(tmp_path) as server:
            assert await asks(server, command="backup", path=copy, is_here=False)
            assert await asks(server, command="backup", path=copy) == ""
            again = await asks(server, command="backup", path=copy)
            assert "is there already" in again
            assert await entries(server) == [
                (OTTO, f'backup path="{copy}"', "refused: that is for its own machine alone"),
                (OTTO, f'backup path="{copy}"', "commit 0"),
                (OTTO, f'backup path="{copy}"', f"refused: {again}"),
            ]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ({"command": "rotate", "step": "sign"}, 'rotate step="sign"'),
        (
            {"command": "invite", "role": "site", "name": "x", "addresses": ["0.0.0.0:1"]},
            'invite role="site" name="x" addresses=["0.0.0.0:1"]',
        ),
        ({"command": "dance"}, r'line "{\"command\": \"dance\"}"'),
    ],
)
def test_what_the_shell_refuses_is_in_the_log(tmp_path: Path, command: dict[str, Any], what: str) -> None:
    async def main() -> None:
        async with coordinator(tmp_path) as server:
            problem = await asks(server, **command)
            assert problem
            assert await entries(server) == [(OTTO, what, f"refused: {problem}")]

    asyncio.run(main())


def test_a_copy_that_is_made_while_the_coordinator_ends_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is kept any more, so that goes to the coordinator's log: whoever asked waited for ever."""
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(*asked: Any) -> int:
        begun.set()
        await goes_on.wait()
        return 3

    monkeypatch.setattr(service, "backup", slow)

    async def main() -> None:
        async with coordinator(tmp_path) as server:
            line = json.dumps({"command": "backup", "path": str(tmp_path / "copy.db")}).encode()
            asked = asyncio.create_task(server.command(line, OTTO))
            await begun.wait()
            await server.stop()
            goes_on.set()
            async with asyncio.timeout(LIMIT_S):
                assert (await asked).found == "commit 3"

    asyncio.run(main())
    assert f"not in the audit log: {OTTO}: backup path=" in caplog.text


def test_in_plain_text_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with coordinator(tmp_path, is_plain=True) as server:
            problem = await asks(server, command="invite", role="site", name="x")
            assert await entries(server) == [(OTTO, 'invite role="site" name="x"', f"refused: {problem}")]

    asyncio.run(main())


def test_who_looks_is_not_in_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with coordinator(tmp_path) as server:
            for command in ("status", "health", "audit"):
                assert await asks(server, command=command) == ""
            assert await entries(server) == []

    asyncio.run(main())


def test_that_a_step_of_a_rotation_failed_is_said_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the log before it is done."""

    def full(authority: Authority, step: str) -> None:
        raise HostError("No space left on device")

    monkeypatch.setattr(Authority, "after", full)

    async def main() -> None:
        async with coordinator(tmp_path) as server:
            assert await asks(server, command="rotate", step="make") == "No space left on device"
            (_, asked, _), failed = await entries(server)
            assert failed == (OTTO, asked, "failed: No space left on device")

    asyncio.run(main())


def test_that_an_invite_was_not_made_is_said_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def expired(authority: Authority, *asked: Any) -> None:
        raise HostError("the root has expired")

    monkeypatch.setattr(Authority, "invite", expired)

    async def main() -> None:
        async with coordinator(tmp_path) as server:
            assert await asks(server, command="invite", role="site", name="x") == "the root has expired"
            (_, asked, done), failed = await entries(server)
            assert (done, failed) == ("done", (OTTO, asked, "failed: the root has expired"))

    asyncio.run(main())


def test_what_is_asked_of_a_coordinator_that_has_ended_is_answered(tmp_path: Path) -> None:
    """Nothing is decided any more: it waited for ever."""

    async def main() -> None:
        async with coordinator(tmp_path) as server:
            await server.stop()
            async with asyncio.timeout(LIMIT_S):
                assert (await server.ask(BanAsked(name="berlin", reason=""))).problem == TOLD_TO_END
                assert await asks(server, command="invite", role="site", name="x") == TOLD_TO_END

    asyncio.run(main())


def test_who_uses_an_invite_is_in_the_log_with_its_key_and_address(tmp_path: Path) -> None:
    async def main() -> None:
        async with coordinator(tmp_path) as server:
            answer = await server.ask(InviteAsked(role="site", name="berlin"))
            invite = from_text(answer.found)
            await joined(invite)
            with pytest.raises(RefusedError, match="by another key") as raised:
                await joined(invite)
            used, refused = await entries(server)
            assert used[:2] == (f"whoever has invite {invite.invite_id}", "join site berlin")
            key, address = used[2].removeprefix("key ").split(" from ")
            assert f"({key[:16]}, in the run's audit log)" in str(raised.value)
            assert address == "127.0.0.1"
            assert re.fullmatch("refused key [0-9a-f]{64} from 127.0.0.1: it was used by another key", refused[2])

    asyncio.run(main())


def test_who_joins_while_the_coordinator_ends_asks_again(tmp_path: Path) -> None:
    """With the same key, by which the invite may have been used: whoever is refused throws the key away."""

    async def main() -> None:
        async with coordinator(tmp_path) as server:
            answer = await server.ask(InviteAsked(role="site", name="berlin"))
            async with server._deciding:
                joins = asyncio.create_task(joined(from_text(answer.found)))
                await until(lambda: bool(server._asked))
                ends = asyncio.create_task(server.stop())
                with pytest.raises(PeerError, match="told to end before that was decided"):
                    await joins
            await ends

    asyncio.run(main())
    store = SqliteStore(tmp_path / "run.db")
    (known,) = store.begin(some_settings(run_id="run"), "").all(InviteRecord)
    store.close()
    assert known.key_digest, "it was decided after all"
