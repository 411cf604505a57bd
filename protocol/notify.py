"""What systemd is told by a service of the type notify (sd_notify(3)); nothing where nobody listens."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress


def tell(*words: str) -> None:
    """Such as READY=1."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.connect(address)
        connection.sendall("\n".join(words).encode())


async def stay_watched() -> None:
    """Until it is cancelled: says that the event loop turns, as often as the watchdog of the service wants."""
    period_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
    while period_s > 0:
        tell("WATCHDOG=1")
        await asyncio.sleep(period_s / 3)
