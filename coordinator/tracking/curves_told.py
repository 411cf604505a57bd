"""What is new on the curves of /curves.json, for each tool that is told of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from atoll.coordinator.core.curves import TRAINING_LOSS
from atoll.coordinator.tracking.feed import Feed
from atoll.coordinator.tracking.tracker import RUN, Point

EVERY_S = 10.0
UNKNOWN_S = 0.0
"""The time of a commit that is not among the newest, whose times are kept. Its loss is told with the oldest time that
any curve has."""


class Tracking:
    """Tells feeds each point once. Of a curve that was cut, as the run went back, what follows is new."""

    def __init__(self, feeds: Sequence[Feed], curves: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._feeds, self._curves = feeds, curves
        self._seen: set[tuple[str, int, float]] | None = None  # curve, step and value, of the last look

    def document(self) -> list[dict[str, Any]]:
        """For people."""
        return [feed.document() for feed in self._feeds]

    async def run(self) -> None:
        """Until it is cancelled."""
        for feed in self._feeds:
            feed.start()
        while True:
            await self.tell()
            await asyncio.sleep(EVERY_S)

    async def close(self, running: asyncio.Task[None]) -> None:
        """What came since is told yet."""
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await self.tell()
        await asyncio.gather(*(asyncio.to_thread(feed.close) for feed in self._feeds))

    async def tell(self) -> None:
        """All that is new is on its way."""
        document = await self._curves()
        await asyncio.to_thread(self._find, document)

    def _find(self, document: Mapping[str, Any]) -> None:
        points = list(_points(document))
        oldest_s = min((point.time_s for point in points if point.time_s != UNKNOWN_S), default=None)
        if oldest_s is None:
            return  # nothing can be put on an axis of time yet
        seen, self._seen = self._seen, {(point.name, point.step, point.value) for point in points}
        for feed in self._feeds:
            new = [p for p in points if (feed.lacks(p) if seen is None else (p.name, p.step, p.value) not in seen)]
            feed.put([p._replace(time_s=oldest_s) if p.time_s == UNKNOWN_S else p for p in new])


def _points(document: Mapping[str, Any]) -> Iterator[Point]:
    for step, run_tokens, time_s, value in document["run"]:
        yield Point(RUN, TRAINING_LOSS, step, run_tokens, UNKNOWN_S if time_s is None else time_s, value)
    for curve in document["sites"]:
        tag = f"{curve['name']}{' of the outer parameters' if curve['of_outer'] else ''}"
        for step, run_tokens, time_s, value in curve["points"]:
            yield Point(f"sites/{curve['site']}", tag, step, run_tokens, time_s, value)
