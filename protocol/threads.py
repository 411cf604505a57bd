"""Work in a thread that changes what a lock protects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

log = logging.getLogger("atoll")
T = TypeVar("T")


async def run_to_its_end(work: Callable[[], T], pool: Executor | None = None) -> T:
    """`work` in a thread, which cannot be stopped: who is cancelled waits for it, keeps its locks, and ends then."""
    working = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            try:
                await asyncio.wait([working])
            except asyncio.CancelledError:
                continue  # cancelled again: it is still writing
        if not working.cancelled() and (error := working.exception()) is not None:
            log.warning("cancelled, and failed: %s", error)
        raise
