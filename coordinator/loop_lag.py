"""How late the event loop comes to what is due: a clock in it that notes by how much it missed its tick.

A tick that comes late has kept away those that would have followed: they are noted as well, each with its own lateness.
Otherwise a stall of a second would be one sample among the hundred of every other second.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left

TICK_S = 0.01
LEAST_S = 1e-4
GROWTH = 1.2
PLACES_S = [*(LEAST_S * GROWTH**i for i in range(79)), math.inf]
"""Each place is a fifth larger than the one before; the last one is for whatever is later than two minutes."""
MOST_TICKS_MISSED = 20_000


class LoopLag:
    """Since its start. Memory and work are bounded whatever happens to the loop."""

    def __init__(self) -> None:
        self._counts = [0] * len(PLACES_S)
        self.worst_s = 0.0

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self.note(loop.time() - due)

    def note(self, late_s: float) -> None:
        self.worst_s = max(self.worst_s, late_s)
        for missed in range(min(int(max(late_s, 0.0) / TICK_S), MOST_TICKS_MISSED) + 1):
            self._counts[bisect_left(PLACES_S, late_s - missed * TICK_S)] += 1

    def within_s(self, share: float) -> float:
        """This share of ticks came at most so late; 0 if there was none."""
        wanted = share * sum(self._counts)
        seen = 0
        for place, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return min(PLACES_S[place], self.worst_s)
        return 0.0
