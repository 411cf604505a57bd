"""/curves.json: the curves of a run and of its sites, and what its newest syncs took, for the page."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from atoll.coordinator.core.core import Core
from atoll.coordinator.core.view.document import CurveView

AGE_S = 1.0
"""At most, of what is shown."""


class CurvesShown:
    """Made again when it is asked for, at most once a second, and not while a decision is being kept."""

    def __init__(self, core: Core, deciding: asyncio.Lock, times: Mapping[int, float]) -> None:
        """`times`: of commits, seconds since 1970."""
        self._core, self._deciding, self._times = core, deciding, times
        self._loop = asyncio.get_running_loop()
        self._made_at, self._document = -AGE_S, self._make()

    async def recent(self) -> dict[str, Any]:
        """The document. While the store is stuck, the one before."""
        if self._loop.time() - self._made_at >= AGE_S and not self._deciding.locked():
            self._made_at, self._document = self._loop.time(), self._make()
        return self._document

    def _make(self) -> dict[str, Any]:
        run = [(step, tokens, self._times.get(commit), loss) for commit, step, tokens, loss in self._core.losses()]
        return {
            "run": run,
            "sites": [_document(view) for view in self._core.curves()],
            "phases": [{"sync": sync, "sites": of_sites} for sync, of_sites in self._core.phases()],
        }


def _document(view: CurveView) -> dict[str, Any]:
    """Its points as they are: `asdict` would copy each of them, in the event loop, which is half a second of a run's
    130,000."""
    return {field.name: getattr(view, field.name) for field in fields(view)}
