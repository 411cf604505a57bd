"""Writing to a peer that may have stopped reading."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from atoll.protocol.errors import PeerError


class NotRead(PeerError):
    """The peer does not take what it asked for. A status would wait behind the blocked write: cancel the call."""


async def write_within(limit_s: float, write: Callable[[bytes], Awaitable[None]], frame: bytes, who: str) -> None:
    """Raises NotRead."""
    try:
        async with asyncio.timeout(limit_s):
            await write(frame)
    except TimeoutError:
        raise NotRead(f"{who} has taken no byte for {limit_s:.1f} s of what it asked for") from None
