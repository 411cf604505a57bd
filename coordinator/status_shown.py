"""The status that many ask for: however many they are, it is made twice a second at most, and anew when anything is
kept; for pages, which strangers may flood, that too has a pace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from atoll.coordinator import limits
from atoll.protocol.pace import Buckets


class StatusShown:
    def __init__(self, made: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._made = made
        self._loop = asyncio.get_running_loop()
        self._num_kept = 0
        self._shown: tuple[float, int, dict[str, Any]] | None = None  # when it was made, after how many decisions
        self._said: tuple[dict[str, Any], str] | None = None  # as text
        self._of_pages = Buckets[None](limits.STATUS_OF_PAGES, 1)
        self._asking = asyncio.Lock()

    def kept(self) -> None:
        """A decision was."""
        self._num_kept += 1

    async def recent(self) -> dict[str, Any]:
        """For pages: beyond their pace the one before, though something was kept since."""
        return await self._found(is_page=True)

    async def text(self) -> str:
        document = await self._found(is_page=False)
        if self._said is None or self._said[0] is not document:
            self._said = document, await asyncio.to_thread(json.dumps, document)
        return self._said[1]

    async def _found(self, *, is_page: bool) -> dict[str, Any]:
        async with self._asking:
            now = self._loop.time()
            if self._shown is not None:
                made_at, num_kept, document = self._shown
                is_new = num_kept == self._num_kept and now - made_at < limits.STATUS_AGE_S
                if is_new or (is_page and not self._of_pages.take(None, now)):
                    return document
            num_kept, document = self._num_kept, await self._made()
            # By now: a store that is stuck takes longer than its document is recent, and each would wait for its own.
            self._shown = self._loop.time(), num_kept, document
            return document
