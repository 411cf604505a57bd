"""What a node's heartbeats say of its progress: work that was done, and no sign of life."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from atoll.node.core import events as e
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.journal import Journal
from atoll.node.daemon.observer import Observer
from atoll.node.exchange.peers.counters import Counters
from atoll.protocol import messages as m
from atoll.protocol.settings import RunSettings, settings_to_json
from tests.harness.site_questions import a_node_core

SETTINGS = RunSettings(run_id="run", steps=40, time_limits="local")


def test_progress_counts_work_and_no_heartbeat(tmp_path: Path) -> None:
    async def scenario() -> None:
        core, counters = a_node_core(SETTINGS, 100.0), Counters()
        hub: Any = SimpleNamespace(counters=counters, waits_for=lambda: ([2], []), retained_bytes=0)
        config, journal = NodeConfig(coordinator="127.0.0.1:1", name="a"), Journal(tmp_path / "journal.jsonl")
        observer = Observer(config=config, core=core, hub=hub, journal=journal, num_refused=int)

        def progress() -> int:
            return observer.heartbeat().progress

        first = progress()
        assert progress() == first, "the same again"
        core.handle(e.SessionOpened(), 100.0)
        core.handle(e.Received(1, m.Welcome(settings_json=settings_to_json(SETTINGS))), 100.0)
        assert progress() == first + 1, "workers are started"
        group = core.ranks.group
        assert group is not None
        group.hello(0, 5, 101.0)
        assert progress() == first + 2, "a rank has come on"
        group.progress(0, 3, 10.0, 102.0)
        assert progress() == first + 3, "it has done steps"
        group.progress(0, 3, 20.0, 103.0)
        counters.sent_bytes += 1000
        assert progress() == first + 3, "the same steps, and bytes that got nobody on"
        counters.moved_bytes += 1000
        assert progress() == first + 4, "a peer has what it lacked"
        assert observer.heartbeat().waits_for_contributions == (2,)
        journal.close()

    asyncio.run(scenario())
