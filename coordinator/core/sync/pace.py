"""How long a sync takes, from one commit to the next. Pure."""

from __future__ import annotations

import statistics
from collections import deque

REMEMBERED = 8
"""Commits."""


class Pace:
    def __init__(self) -> None:
        self._committed_at: float | None = None
        self._periods: deque[float] = deque(maxlen=REMEMBERED)

    def note_commit(self, now: float) -> None:
        """There is a commit."""
        if self._committed_at is not None:
            self._periods.append(now - self._committed_at)
        self._committed_at = now

    @property
    def period_s(self) -> float | None:
        """The median; None before the second commit."""
        return statistics.median(self._periods) if self._periods else None
