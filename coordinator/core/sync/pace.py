"""How long syncs took: from one commit to the next, and the exchanges of each site. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

REMEMBERED = 8
"""Commits of the run, and exchanges of each site."""


class Pace:
    def __init__(self, num_in_flight: int) -> None:
        """Of so many syncs that are in flight at once commits may come together: a period is the mean of as many."""
        self._committed_at: deque[float] = deque(maxlen=num_in_flight)
        self._periods: deque[float] = deque(maxlen=REMEMBERED)
        self._exchanges: defaultdict[int, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def note_commit(self, site_ids: Sequence[int], sync_bytes: int, exchange_s: float, now: float) -> None:
        """There is a commit: its exchange, of these sites, took so long."""
        if len(self._committed_at) == self._committed_at.maxlen:
            self._periods.append((now - self._committed_at[0]) / len(self._committed_at))
        self._committed_at.append(now)
        for site_id in site_ids:
            self._exchanges[site_id].append((exchange_s, max(1, sync_bytes)))

    @property
    def period_s(self) -> float | None:
        """The median; None until there are enough commits."""
        return statistics.median(self._periods) if self._periods else None

    def longest_exchange_s(self, site_ids: Sequence[int], sync_bytes: int) -> float | None:
        """Of a sync of so many bytes, by the exchanges of smaller ones in proportion. None if one of them was in none
        yet: its link may be slower than all that was seen."""
        if not self._exchanges.keys() >= set(site_ids):
            return None
        exchanges = (exchange for site_id in site_ids for exchange in self._exchanges[site_id])
        return max(took_s * max(1.0, sync_bytes / num_bytes) for took_s, num_bytes in exchanges)
