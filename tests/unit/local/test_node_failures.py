"""What goes wrong inside a node ends it, with the reason: it is never taken for the failure of whoever spoke to it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from atoll.node.core import events as e
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.discover import Run
from atoll.node.daemon.home import Home
from atoll.node.daemon.journal import Journal
from atoll.node.daemon.local_server import Greeting
from atoll.node.daemon.node import Node
from atoll.node.exchange.dialer import Dialer
from atoll.node.exchange.hub import Hub
from atoll.node.worker.client import LocalClient
from atoll.protocol.errors import HostError
from atoll.protocol.settings import RunSettings, settings_to_json

SETTINGS = RunSettings(run_id="run", time_limits="local")
NOBODY = "127.0.0.1:1"
GREETING = Greeting(settings_json="{}", site_name="a", data_paths=(), run_seed=1, resumed=False)


def ended_by(happen: Callable[[Node], Awaitable[None]], folder: Path) -> tuple[int, str]:
    """How a node ends to which that happened."""

    async def scenario() -> tuple[int, str]:
        home = Home(folder / "home")
        journal = Journal(home.folder / "journal.jsonl")
        hub = Hub(run_id="run", incarnation=home.incarnation, dialer=Dialer(None))
        node = Node(
            config=NodeConfig(coordinator=NOBODY, name="a", command=("true",), launcher="exec"),
            run=Run(SETTINGS, settings_to_json(SETTINGS)),
            home=home,
            plane=None,
            hub=hub,
            address="127.0.0.1:2",
            journal=journal,
        )
        started = asyncio.Event()
        home.note_socket_folder = lambda _: started.set()  # type: ignore[method-assign,assignment]
        running = asyncio.create_task(node.run())
        await started.wait()
        await happen(node)
        result = await running
        await hub.close()
        node.close()
        journal.close()
        home.close()
        return result

    return asyncio.run(scenario())


def is_full(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of its journal, from now on."""
    write = os.write
    journal = node.journal._descriptor

    def full(descriptor: int, data: bytes) -> int:
        if descriptor == journal:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)


def test_a_journal_that_cannot_be_written_ends_the_node_and_not_the_connection_of_the_rank_that_spoke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off: list[BaseException] = []

    async def happen(node: Node) -> None:
        node.local_server.begin(1, 1, GREETING)
        client = await asyncio.to_thread(LocalClient.connect, node.local_server.path, 1, 0)
        await asyncio.to_thread(client.hello, 1, 0)
        is_full(node, monkeypatch)
        await asyncio.to_thread(client.fatal, "nonfinite", "the loss is not finite")
        await asyncio.wait([node._result])
        cut_off.extend(t.exception() for t in node.local_server._tasks if t.done() and t.exception())  # type: ignore[misc]
        assert node.local_server._open, "the rank is still connected: it did nothing wrong"
        client.close()

    code, text = ended_by(happen, tmp_path)
    assert code == HostError.exit_code
    assert "journal.jsonl: no space is left" in text
    assert not cut_off


def test_a_journal_that_cannot_be_written_ends_the_node_whoever_brings_the_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def happen(node: Node) -> None:
        is_full(node, monkeypatch)
        node.handle(e.ExchangeBroken(sync=1, attempt=1, term=1, peer_site_id=2, sending=False, phase="", text="gone"))

    code, text = ended_by(happen, tmp_path)
    assert code == HostError.exit_code
    assert "journal.jsonl: no space is left" in text


@pytest.mark.parametrize("part", ["watchdog", "data", "server", "launcher", "prober"])
def test_a_task_that_fails_ends_the_node_with_its_words(part: str, tmp_path: Path) -> None:
    async def fails(*_: object) -> None:
        raise ZeroDivisionError("of a task")

    async def happen(node: Node) -> None:
        match part:
            case "watchdog":
                node.local_server.watch = lambda limits: 1 // 0  # type: ignore[method-assign,return-value,assignment]
                node._spawn(node._watch_workers())
            case "data":
                node._task(fails(), e.FetchFailed)
            case "server":
                node.local_server._spawn(fails())
            case "launcher":
                assert node._launcher is not None
                node._launcher._watch = fails  # type: ignore[method-assign,assignment]
                await node._launcher.start(1, node.local_server.path)
            case "prober":
                task = asyncio.create_task(fails())
                task.add_done_callback(node.prober._ended)

    code, text = ended_by(happen, tmp_path)
    assert code == HostError.exit_code
    assert "ZeroDivisionError" in text


def test_the_journal_of_a_long_run_takes_bounded_space_and_loses_no_line_of_the_last_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, max_bytes=1000)
    for number in range(100):
        journal.write("commit", commit=number)
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2000
    journal.close()
    journal = Journal(path, max_bytes=1000)  # a start goes on where the one before ended
    journal.write("commit", commit=100)
    journal.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["journal.jsonl", "journal.jsonl.1"]
    text = "".join((tmp_path / name).read_text() for name in ("journal.jsonl.1", "journal.jsonl"))
    numbers = [json.loads(line)["commit"] for line in text.splitlines()]
    assert numbers == list(range(numbers[0], 101))
    assert len(numbers) > 15


def test_a_journal_with_one_line_beyond_its_bound_keeps_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", max_bytes=10)
    for text in ("first", "second"):
        journal.write("report", text=text * 10)
    journal.close()
    assert "second" in (tmp_path / "journal.jsonl").read_text()
    assert "first" in (tmp_path / "journal.jsonl.1").read_text()
