"""The coordinator as a process: store, gRPC, status page, admin socket; until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import AsyncExitStack
from typing import Any

from atoll.coordinator.admin import AdminServer
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.service import CoordinatorServer
from atoll.coordinator.sqlite_store import SqliteStore
from atoll.coordinator.web import StatusPage
from atoll.protocol.settings import RunSettings


async def serve(
    config: CoordinatorConfig, settings: RunSettings, *, resume_parent: dict[str, Any] | None = None
) -> None:
    """Serves one run; returns after SIGTERM or SIGINT. Prints one line when it listens.

    `resume_parent`: run_id, commit, run_step and run_tokens of the saved model that commit 0 is made of.
    Raises ConfigError, HostError or StateError: what, where, what to do.
    """
    parent_json = json.dumps(resume_parent, sort_keys=True) if resume_parent else ""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        store = SqliteStore(config.store_path)
        stack.callback(store.close)
        server = CoordinatorServer(config, settings, store, parent_json)
        await server.start()
        stack.push_async_callback(server.stop)
        admin = AdminServer(
            config.store_path,
            stop=server.ask_to_stop,
            roll_back=server.ask_to_roll_back,
            go_back=server.go_back,
            document=server.document,
        )
        await admin.start()
        stack.push_async_callback(admin.close)
        where = ""
        if config.http_listen:
            page = StatusPage(config.http_listen, server.document, loop)
            stack.push_async_callback(page.close)
            where = f" (status page http://{page.address}/)"
        running = asyncio.create_task(server.run())
        asked = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked.set)
            stack.callback(loop.remove_signal_handler, number)
        sys.stdout.write(f"run {settings.run_id}: listening on {server.address}{where}\n")
        sys.stdout.flush()
        waiting = asyncio.create_task(asked.wait())
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if running.done():
            running.result()  # only an error ends it before it is asked to
            return
        await server.stop()
        await running
        sys.stdout.write(f"run {settings.run_id}: stopped; all of it is in {config.store_path}\n")
