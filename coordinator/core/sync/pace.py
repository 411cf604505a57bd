"""How long syncs took: from one commit to the next, and the exchanges of each site. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

REMEMBERED = 8
"""Commits of the run, and exchanges of each site."""


class Pace:
    def __init__(self) -> None:
        self._committed_at: float | None = None
        self._periods: deque[float] = deque(maxlen=REMEMBERED)
        self._exchanges: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def note_commit(self, site_ids: Sequence[int], exchange_s: float, now: float) -> None:
        """There is a commit: its exchange, of these sites, took so long."""
        if self._committed_at is not None:
            self._periods.append(now - self._committed_at)
        self._committed_at = now
        for site_id in site_ids:
            self._exchanges[site_id].append(exchange_s)

    @property
    def period_s(self) -> float | None:
        """The median; None before the second commit."""
        return statistics.median(self._periods) if self._periods else None

    def longest_exchange_s(self, site_ids: Sequence[int]) -> float | None:
        """None if one of them was in none yet: its link may be slower than all that was seen."""
        if not self._exchanges.keys() >= set(site_ids):
            return None
        return max(max(self._exchanges[site_id]) for site_id in site_ids)
