"""Who will be ready in time, from what each site's steps took before; and how long the others wait for it. Pure.

A site that is slower than most is not waited for: it receives, trains on, and contributes when it is ready.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

REMEMBERED = 8
"""Windows of each site."""
SPREADS = 2
SLACK = 0.1
"""Of what a window takes: so much longer the others wait."""
MAX_MISSED = 1
"""Who has missed more syncs in a row is taken when it is ready, and not waited for."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long those who are ready wait."""

    until: float
    late: frozenset[int]
    """Not for these."""


class Stragglers:
    """Of each site, the seconds of one step in its last windows, and how many syncs it has missed in a row."""

    def __init__(self) -> None:
        self._windows: dict[int, deque[float]] = {}
        self._step_s: dict[int, float] = {}  # median and spread of them
        self._missed: dict[int, int] = {}

    def note_ready(self, site_id: int, num_steps: int, train_s: float) -> None:
        if num_steps <= 0 or train_s <= 0:
            return  # a snapshot that is taken again, or a script without a loss, says nothing about it
        windows = self._windows.setdefault(site_id, deque(maxlen=REMEMBERED))
        windows.append(train_s / num_steps)
        median = statistics.median(windows)
        self._step_s[site_id] = median + SPREADS * statistics.median(abs(s - median) for s in windows)

    def note_commit(self, contributors: Collection[int], expected: Iterable[int]) -> None:
        for site_id in contributors:
            self._missed.pop(site_id, None)
        for site_id in expected:
            if site_id not in contributors:
                self._missed[site_id] = self._missed.get(site_id, 0) + 1

    def forget(self, site_id: int) -> None:
        """It has left: much may be different when it is back."""
        self._windows.pop(site_id, None)
        self._step_s.pop(site_id, None)
        self._missed.pop(site_id, None)

    def window_s(self, site_id: int, num_steps: int) -> float | None:
        """How long so many steps take there; None if nothing is known."""
        step_s = self._step_s.get(site_id)
        return None if step_s is None else num_steps * step_s

    def typical_s(self, site_ids: Collection[int], num_steps: int) -> float | None:
        """The median over sites; None if less than half of them are known."""
        known = [w for i in site_ids if (w := self.window_s(i, num_steps)) is not None]
        return statistics.median(known) if known and 2 * len(known) >= len(site_ids) else None

    def patience(
        self,
        waiting: Collection[int],
        members: Collection[int],
        *,
        num_steps: int,
        opened_at: float,
        first_ready_at: float,
        least_slack_s: float,
        most_s: float,
    ) -> Patience:
        """For those of `members` who are `waiting` to be ready. `most_s` after the first is the end in any case, and
        the only one for a site of which nothing is known."""
        fallback = first_ready_at + most_s
        typical_s = self.typical_s(members, num_steps)
        if typical_s is None:
            return Patience(fallback, frozenset())
        slack_s = max(SLACK * typical_s, least_slack_s)
        late = frozenset(i for i in waiting if self._is_late(i, num_steps, typical_s + slack_s))
        worth_it = [i for i in waiting if i not in late]
        if not worth_it:
            return Patience(first_ready_at, late)
        if any(i not in self._step_s for i in worth_it):
            return Patience(fallback, late)
        return Patience(min(fallback, max(first_ready_at, opened_at + typical_s) + slack_s), late)

    def _is_late(self, site_id: int, num_steps: int, limit_s: float) -> bool:
        missed = self._missed.get(site_id, 0)
        if missed:
            return missed > MAX_MISSED  # it went on training, and its node plans to be ready for this sync
        window_s = self.window_s(site_id, num_steps)
        return window_s is not None and window_s > limit_s
