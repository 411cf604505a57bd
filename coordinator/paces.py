"""How fast messages are read: by whom they are from, whatever streams that one opens, and by their kind."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from atoll.coordinator import limits
from atoll.protocol.pace import Buckets

log = logging.getLogger("atoll.coordinator")


class Paces:
    def __init__(self) -> None:
        self.delayed: Counter[str] = Counter()
        """Messages that came too fast, by their kind."""
        self._of: dict[type, Buckets[str]] = {}

    async def in_its_time(self, who: str, kind: type) -> None:
        """Whoever sends too many of a kind waits, as it is not read meanwhile. Nothing is lost: an honest site that was
        held up for long says all that it has to say at once."""
        if kind not in self._of:
            pace = limits.PACES_OF_MESSAGES.get(kind, limits.PACE_OF_MESSAGES)
            self._of[kind] = Buckets(pace, limits.MAX_SOURCES)
        if (wait_s := self._of[kind].spend(who, asyncio.get_running_loop().time())) > 0:
            if not self.delayed[kind.__name__]:
                log.warning("%s sends %s faster than is heard: it has to wait", who, kind.__name__)
            self.delayed[kind.__name__] += 1
            await asyncio.sleep(wait_s)
