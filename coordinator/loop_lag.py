"""How late the event loop comes to what is due: a clock in it that notes by how much it missed its tick.

A tick that comes late has kept away those that would have followed: they are noted as well, each with its own lateness.
Otherwise a stall of a second would be one sample among the hundred of every other second.
"""

from __future__ import annotations

import asyncio
import math

TICK_S = 0.01
LEAST_S = 1e-4
"""The first place; each of the next is a fifth larger."""
GROWTH = 1.2
NUM_PLACES = 80
"""The last one is for whatever is later than three minutes."""
MOST_TICKS_MISSED = 20_000


class LoopLag:
    """Since its start. Memory and work are bounded whatever happens to the loop."""

    def __init__(self) -> None:
        self._counts = [0] * NUM_PLACES
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
            self._counts[_place(late_s - missed * TICK_S)] += 1

    def within_s(self, share: float) -> float:
        """This share of ticks came at most so late; 0 if there was none."""
        wanted = share * sum(self._counts)
        seen = 0
        for place, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return min(LEAST_S * GROWTH**place, self.worst_s)
        return 0.0


def _place(late_s: float) -> int:
    if late_s <= LEAST_S:
        return 0
    return min(math.ceil(math.log(late_s / LEAST_S, GROWTH)), NUM_PLACES - 1)
