"""What a node shows of itself. Progress in heartbeats is work that was done, and no sign of life; metrics are read over
real HTTP on loopback."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from atoll.node.core import events as e
from atoll.node.core.site import SiteCore
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.journal import Journal
from atoll.node.daemon.observer import Observer
from atoll.node.exchange.peers.counters import Counters
from atoll.node.local_protocol import LOCAL_VERSION, LocalHello, Progress, Said
from atoll.protocol import messages as m
from atoll.protocol.errors import RefusedError
from atoll.protocol.settings import RunSettings, settings_to_json
from tests.harness.site_questions import a_node_core

SETTINGS = RunSettings(run_id="run", steps=40, time_limits="local")
ERRORS = SimpleNamespace(num_dropped=3)


@contextmanager
def observer_of(core: SiteCore, hub: Any, folder: Path) -> Iterator[Observer]:
    config = NodeConfig(coordinator="127.0.0.1:1", name="a")
    with closing(Journal(folder / "journal.jsonl")) as journal:
        yield Observer(config=config, core=core, hub=hub, journal=journal, num_refused=lambda: 2)


def test_progress_counts_work_and_no_heartbeat(tmp_path: Path) -> None:
    async def scenario() -> None:
        core, counters = a_node_core(SETTINGS, 100.0), Counters()
        shown = {"waits_for": lambda: ([2], []), "retained_bytes": 0, "average_errors": ERRORS}
        hub: Any = SimpleNamespace(counters=counters, **shown)
        with observer_of(core, hub, tmp_path) as observer:

            def progress() -> int:
                return observer.heartbeat().progress

            first = progress()
            assert progress() == first, "the same again"
            core.handle(e.SessionOpened(), 100.0)
            core.handle(e.Received(1, m.Welcome(settings_json=settings_to_json(SETTINGS))), 100.0)
            assert progress() == first + 1, "workers are started"

            def says(said: Said, now: float) -> None:
                core.handle(e.RankSaid(generation=1, rank=0, said=said), now)

            says(LocalHello(world_size=1, pid=5, protocol_version=LOCAL_VERSION), 101.0)
            assert progress() == first + 2, "a rank has come on"
            says(Progress(step=3, steps_per_s=10.0), 102.0)
            assert progress() == first + 3, "it has done steps"
            says(Progress(step=3, steps_per_s=20.0), 103.0)
            counters.sent_bytes += 1000
            assert progress() == first + 3, "the same steps, and bytes that got nobody on"
            counters.moved_bytes += 1000
            assert progress() == first + 4, "a peer has what it lacked"
            observer.num_written = lambda: 7
            assert progress() == first + 5, "a slow disk has taken some of a commit"
            assert progress() == first + 5
            assert observer.heartbeat().waits_for_contributions == (2,)

    asyncio.run(scenario())


def test_metrics_are_read_on_the_event_loop_where_they_change(tmp_path: Path) -> None:
    """Elsewhere a scrape fails now and then, in the middle of a change."""
    read_on: list[int] = []

    def waits_for() -> tuple[list[int], list[int]]:
        read_on.append(threading.get_ident())
        return [], []

    def scrape(address: str) -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    async def main() -> str:
        core, counters = a_node_core(SETTINGS, 100.0), Counters(sent_bytes=7, reconnects=4)
        counters.refuse(RefusedError("no"))
        shown = {"waits_for": waits_for, "retained_bytes": 5, "average_errors": ERRORS}
        hub = SimpleNamespace(counters=counters, uplink=SimpleNamespace(cap=None), **shown)
        with observer_of(core, hub, tmp_path) as observer:
            server = observer.pages()
            await server.start("127.0.0.1:0", "metrics")
            try:
                return await asyncio.to_thread(scrape, server.address)
            finally:
                await server.close()

    text = asyncio.run(main())
    for line in (
        "atoll_node_commit -1.0",
        "atoll_node_sent_bytes_total 7.0",
        "atoll_node_refused_messages_total 3.0",
        "atoll_node_reconnects_total 4.0",
        "atoll_node_retained_bytes 5.0",
        "atoll_node_average_errors_dropped_total 3.0",
    ):
        assert f"\n{line}\n" in text
    assert set(read_on) == {threading.get_ident()}
