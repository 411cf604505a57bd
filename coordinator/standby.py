"""A coordinator that stands by: what it says until it leads."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from contextlib import AsyncExitStack

from atoll.coordinator.admin import admin_server
from atoll.coordinator.commands import HealthAsked, read
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.core.events import Answer
from atoll.coordinator.lease import Leading
from atoll.coordinator.web import standby_pages
from atoll.protocol import notify
from atoll.protocol.errors import ConfigError, HostError
from atoll.protocol.page_access import Access


def only_here(config: CoordinatorConfig, stack: AsyncExitStack) -> None:
    """No other coordinator of this machine has the same socket. Raises HostError."""
    path = config.store_path.with_name(config.store_path.name + ".lock")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HostError(f"{path} is held by another coordinator: give this one a folder of its own") from None
    except OSError as error:
        raise HostError(f"{path}: {error.strerror}") from None


async def stands_by(
    leading: Leading,
    config: CoordinatorConfig,
    run_id: str,
    page_access: Callable[[], Access],
    asked: asyncio.Event,
    *,
    say: Callable[[str], None],
) -> bool:
    """Until nobody leads, with a socket and a page that say so; no site is heard. False if it is to end before."""
    if await leading.is_free():
        return True

    async def answer(line: bytes, by: str) -> Answer:
        try:
            is_health = isinstance(read(line, by), HealthAsked)
        except ConfigError as error:
            return Answer(0, f"not a request: {error}")
        return Answer(0, "", leading.state) if is_health else Answer(0, f"{leading.state}; ask that one")

    async with AsyncExitStack() as stack:
        admin = admin_server(config.store_path, answer)
        await admin.start()
        stack.push_async_callback(admin.close)
        if config.http_listen:
            page = standby_pages(lambda: leading.state, page_access())
            await page.start(config.http_listen, "the status page")
            stack.push_async_callback(page.close)
        watched = asyncio.create_task(notify.stay_watched())
        stack.callback(watched.cancel)
        notify.tell("READY=1", f"STATUS=run {run_id}: stands by")
        say(f"run {run_id}: {leading.state}")
        return await leading.wait(asked)
