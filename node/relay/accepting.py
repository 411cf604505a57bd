"""Connections as they come to a socket that listens, for as long as it is to listen."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

log = logging.getLogger("atoll.relay")

ACCEPT_AGAIN_S = 0.1
"""After an error of this machine: there may be no descriptors."""


async def readable(connection: socket.socket) -> None:
    """Once something is there, or the end."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[None] = loop.create_future()

    def is_readable() -> None:
        if not found.done():
            found.set_result(None)

    loop.add_reader(connection, is_readable)
    try:
        await found
    finally:
        loop.remove_reader(connection)


async def connections(listening: socket.socket) -> AsyncIterator[socket.socket]:
    """Each that comes, which does not block. An error is said once, and is over when the next one comes."""
    is_said = False
    while True:
        await readable(listening)
        try:
            connection, _ = listening.accept()  # here: loop.sock_accept loses one that comes as it is cancelled
        except BlockingIOError:
            continue
        except OSError as error:
            if not is_said:
                log.warning("no connection is taken: %s", error.strerror)
            is_said = True
            await asyncio.sleep(ACCEPT_AGAIN_S)
            continue
        is_said = False
        connection.setblocking(False)
        yield connection


def begin(work: Callable[[socket.socket], Coroutine[Any, Any, None]], connection: socket.socket) -> asyncio.Task[None]:
    """A task that has the connection. If it is cancelled before its first step, the connection is closed."""
    is_begun = False

    async def run() -> None:
        nonlocal is_begun
        is_begun = True
        await work(connection)

    def over(task: asyncio.Task[None]) -> None:
        if not is_begun:
            connection.close()

    task = asyncio.get_running_loop().create_task(run())
    task.add_done_callback(over)
    return task
