"""Connections as they come to a socket that listens, for as long as it is to listen."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator

log = logging.getLogger("atoll.relay")

ACCEPT_AGAIN_S = 0.1
"""After an error of this machine: there may be no descriptors."""


async def connections(listening: socket.socket) -> AsyncIterator[socket.socket]:
    """Each that comes. An error is said once, and is over when the next one comes."""
    loop, is_said = asyncio.get_running_loop(), False
    while True:
        try:
            connection, _ = await loop.sock_accept(listening)
        except OSError as error:
            if not is_said:
                log.warning("no connection is taken: %s", error.strerror)
            is_said = True
            await asyncio.sleep(ACCEPT_AGAIN_S)
            continue
        is_said = False
        yield connection
