"""A coordinator with certificates in this process, and whom it has invited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from atoll.coordinator.authority import Authority
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.core.asked import InviteAsked
from atoll.coordinator.service import CoordinatorServer
from atoll.protocol import transport
from atoll.protocol.machine import Machine
from atoll.protocol.trust.invites import from_text
from atoll.protocol.trust.security import MutualTls
from tests.harness.coordinator_story import some_settings
from tests.harness.load_sites import joined
from tests.harness.memory_store import MemoryStore


@asynccontextmanager
async def secured(folder: Path, **config: Any) -> AsyncIterator[CoordinatorServer]:
    """Of run "run"."""
    values: dict[str, Any] = {"store_path": folder / "run.db", "listen": "127.0.0.1:0"}
    authority = Authority.opened(folder / "trust", "run", Machine())
    server = CoordinatorServer(
        CoordinatorConfig(**values | config),
        some_settings(run_id="run", min_sites=2),
        MemoryStore(),
        authority=authority,
        security=MutualTls("run", authority.shown()),
    )
    await server.start()
    running = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        await server.stop()
        await running


async def invited(server: CoordinatorServer, name: str, role: str = "site") -> transport.Handshake:
    """Somebody who has used a new invite."""
    answer = await server.ask(InviteAsked(role=role, name=name))
    return await joined(from_text(answer.found))


def channel_to(server: CoordinatorServer, handshake: transport.Handshake) -> grpc.aio.Channel:
    return transport.open_channel(
        server.address, handshake=handshake, max_message_bytes=transport.MAX_SESSION_MESSAGE_BYTES
    )
