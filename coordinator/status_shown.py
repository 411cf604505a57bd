"""The status that many ask for: however many they are, it is made twice a second at most, and anew when anything is
kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from atoll.coordinator import limits


class StatusShown:
    def __init__(self, made: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._made = made
        self._loop = asyncio.get_running_loop()
        self._num_kept = 0
        self._shown: tuple[float, dict[str, Any]] | None = None  # when it was made
        self._said: tuple[dict[str, Any], str] | None = None  # as text
        self._asking = asyncio.Lock()

    def kept(self) -> None:
        """A decision was."""
        self._num_kept, self._shown = self._num_kept + 1, None

    async def recent(self) -> dict[str, Any]:
        async with self._asking:
            now, num_kept = self._loop.time(), self._num_kept
            if self._shown is None or now - self._shown[0] >= limits.STATUS_AGE_S:
                document = await self._made()
                if num_kept != self._num_kept:
                    return document
                self._shown = now, document
            return self._shown[1]

    async def text(self) -> str:
        document = await self.recent()
        if self._said is None or self._said[0] is not document:
            self._said = document, await asyncio.to_thread(json.dumps, document)
        return self._said[1]
