"""The disk on which the coordinator's store is, for people. It is measured in a thread, as it may be stuck, and whoever
asks hears what was found last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from atoll.protocol.resources import Resources

EVERY_S = 10.0


class StoreDisk:
    def __init__(self, folder: Path, measure: Callable[[Path], Resources]) -> None:
        self._folder = folder
        self._measure = measure
        self._found = Resources()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._found = await asyncio.to_thread(self._measure, self._folder)
            await asyncio.sleep(EVERY_S)

    def document(self) -> dict[str, int] | None:
        """None if it is not known."""
        found = self._found
        if not found.disk_total_bytes:
            return None
        return {"free_bytes": found.disk_free_bytes, "total_bytes": found.disk_total_bytes}
