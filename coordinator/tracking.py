"""A run for tools that draw curves: what they are told, and when. One tool so far (tensorboard.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from atoll.protocol.errors import HostError

log = logging.getLogger("atoll.coordinator")
EVERY_S = 10.0
RUN = "run"
"""The run's own series; sites have theirs. A run id or a site's name has no slash: `sites/NAME` is no other one."""


class Tracker(Protocol):
    def write(self, series: str, tag: str, step: int, time_s: float, value: float) -> None:
        """A point of a curve, with a higher step than the one before of that series and tag. Raises HostError."""

    def flush(self) -> None:
        """What was written can be read by others now. Raises HostError."""


class Tracking:
    """Tells a tracker what is new on the curves of /curves.json."""

    def __init__(self, tracker: Tracker, curves: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._tracker, self._curves = tracker, curves
        self._told: dict[tuple[str, str], int] = {}  # the last step

    async def run(self) -> None:
        """Until it is cancelled. A tool that cannot be told is no reason to end a run."""
        problem = ""
        while True:
            try:
                await self.tell()
                problem = ""
            except HostError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.warning("curves are left out for whoever tracks the run: %s", problem)
            await asyncio.sleep(EVERY_S)

    async def close(self, running: asyncio.Task[None]) -> None:
        """What came since is told yet."""
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        with suppress(HostError):
            await self.tell()

    async def tell(self) -> None:
        """All that is new. Raises HostError."""
        document = await self._curves()
        await asyncio.to_thread(self._write, document)

    def _write(self, document: Mapping[str, Any]) -> None:
        self._write_curve(RUN, "training loss", document["run"])
        for curve in document["sites"]:
            tag = f"{curve['name']}{' of the outer parameters' if curve['of_outer'] else ''}"
            self._write_curve(f"sites/{curve['site']}", tag, curve["points"])
        self._tracker.flush()

    def _write_curve(self, series: str, tag: str, points: Any) -> None:
        for step, _, time_s, value in points:
            if step > self._told.get((series, tag), -1):
                self._told[series, tag] = step
                self._tracker.write(series, tag, step, time_s or 0.0, value)
