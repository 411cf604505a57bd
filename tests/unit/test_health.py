"""Whether a coordinator or a node works, and what systemd is told."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.coordinator import service
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.core.core import Core
from atoll.coordinator.core.events import StopAsked
from atoll.coordinator.service import CoordinatorServer
from atoll.node.core import events as e
from atoll.node.daemon import health
from atoll.protocol import line_socket, notify
from atoll.protocol import messages as m
from atoll.protocol.settings import RunSettings, settings_to_json
from tests.harness.coordinator_story import Story, some_settings
from tests.harness.memory_store import MemoryStore
from tests.harness.site_questions import a_node_core

SETTINGS = RunSettings(run_id="run", steps=40, time_limits="local")


# --- a node


def node_says(tmp_path: Path, core: Any, line: bytes = health.ASKED) -> dict[str, str]:
    async def main() -> dict[str, str]:
        server = health.health_server(tmp_path, lambda: health.obstacles_of(core))
        await server.start()
        try:
            return await asyncio.to_thread(line_socket.ask, health.socket_path(tmp_path), line, "node")
        finally:
            await server.close()

    return asyncio.run(main())


def test_a_node_is_ready_when_it_is_in_the_run(tmp_path: Path) -> None:
    core = a_node_core(SETTINGS, 100.0)
    assert node_says(tmp_path, core) == {"problem": "", "found": "there is no session with the coordinator"}
    core.handle(e.SessionOpened(), 100.0)
    core.handle(e.Received(1, m.Welcome(settings_json=settings_to_json(SETTINGS))), 100.0)
    assert "is not in the run yet" in node_says(tmp_path, core)["found"]
    workers = SimpleNamespace(restart_at=None, crashes_in_a_row=0)
    ready: Any = SimpleNamespace(site=SimpleNamespace(welcomed=True, site_id=3, workers=workers), phase="training")
    assert node_says(tmp_path, ready)["found"] == ""
    workers.restart_at, workers.crashes_in_a_row = 7.0, 2
    assert "workers crashed 2 times in a row" in node_says(tmp_path, ready)["found"]


def test_a_node_answers_nothing_else(tmp_path: Path) -> None:
    assert "health alone" in node_says(tmp_path, a_node_core(SETTINGS, 100.0), b"stop")["problem"]


# --- a coordinator


def test_a_coordinator_is_ready_with_a_quorum_and_a_store_that_takes_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        config = CoordinatorConfig(store_path=tmp_path / "run.db", listen="127.0.0.1:0", http_listen="")
        server = CoordinatorServer(config, some_settings(min_sites=2, quorum=2), MemoryStore())

        async def found() -> str:
            return (await server.command(b'{"command": "health"}', "?")).found

        assert await found() == "2 more sites are needed for a quorum"
        monkeypatch.setattr(Core, "missing_for_quorum", lambda _: 1)
        assert await found() == "1 more site is needed for a quorum"
        monkeypatch.setattr(server, "_keeping_since", asyncio.get_running_loop().time() - 7)
        assert "the store has kept a decision waiting for 7 s" in await found()
        monkeypatch.setattr(service, "STORE_PATIENCE_S", 60.0)
        assert "store" not in await found()

    asyncio.run(main())


def test_sites_without_a_stream_and_runs_that_are_over_need_no_quorum() -> None:
    story = Story(some_settings(min_sites=2, quorum=2))
    story.start("a", "b")
    assert story.missing_for_quorum() == 0
    story.drop("b")
    assert story.missing_for_quorum() == 1
    over = Story(some_settings(min_sites=2, quorum=2))
    assert over.missing_for_quorum() == 2
    over.happens(StopAsked("enough"))
    assert over.missing_for_quorum() == 0


# --- systemd


class Systemd:
    """Its end of the socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(10)

    def __enter__(self) -> Systemd:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def hears(self) -> str:
        return self._socket.recv(1024).decode()


def test_systemd_is_told_what_it_listens_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notify.tell("READY=1")  # to nobody
    with Systemd(tmp_path / "notify") as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify.tell("READY=1", "STATUS=run x")
        assert systemd.hears() == "READY=1\nSTATUS=run x"
    notify.tell("READY=1")  # it has gone


def test_the_watchdog_hears_of_a_loop_that_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        await notify.stay_watched()  # nobody wants it: it ends
        monkeypatch.setenv("WATCHDOG_USEC", "30000")
        watched = asyncio.create_task(notify.stay_watched())
        assert [await asyncio.to_thread(systemd.hears) for _ in range(3)] == ["WATCHDOG=1"] * 3
        watched.cancel()

    with Systemd(tmp_path / "notify") as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        asyncio.run(main())
