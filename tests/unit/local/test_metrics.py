"""A node's metrics over real HTTP on loopback."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from dataclasses import fields
from typing import Any

from atoll.node.daemon.metrics import MetricsServer, NodeFacts
from atoll.node.local_protocol import CheckpointCounts

VALUES: dict[str, Any] = {"int": 1, "float": 1.5, "bool": True, "str": "x"}
VALUES |= {"CheckpointCounts": CheckpointCounts(), "tuple[int, ...]": (1,)}


def test_facts_are_read_on_the_event_loop_where_they_change() -> None:
    """Elsewhere a scrape fails now and then, in the middle of a change."""
    read_on: list[int] = []

    def facts() -> NodeFacts:
        read_on.append(threading.get_ident())
        return NodeFacts(**{item.name: VALUES[str(item.type)] for item in fields(NodeFacts)})

    def scrape(address: str) -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    async def main() -> str:
        server = MetricsServer(facts)
        await server.start("127.0.0.1:0")
        try:
            return await asyncio.to_thread(scrape, server.address)
        finally:
            await server.close()

    assert "atoll_node_commit 1.0" in asyncio.run(main())
    assert set(read_on) == {threading.get_ident()}
