"""Who will be ready in time, from what each site's steps took before; and how long the others wait for it. Pure.

A site that is slower than most is not waited for: it receives, trains on, and contributes when it is ready. Where sites
exchange at every step, what comes late is void, so it is waited for again at times: else it never would contribute.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

REMEMBERED = 8
"""Windows of each site."""
SPREADS = 2
PATIENT_SHARE = 1 / 16
"""Of their time, at most, the others wait again for a site that they waited for in vain; half of it the next time."""
MOST_TIMES = 32
"""In vain; more are as many."""
SLACK = 0.1
"""Of what a window takes: so much longer the others wait."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long those who are ready wait."""

    until: float
    late: frozenset[int]
    """Not for these."""


class Window(NamedTuple):
    """What one sync waits for, and how much longer than usual at least."""

    num_steps: int
    opened_at: float
    least_slack_s: float


class _InVain(NamedTuple):
    times: int
    until: float
    """So long it is not waited for."""


class Stragglers:
    """Of each site: the seconds of one step in its last windows, since when it trains from its base, and whether it was
    waited for in vain."""

    def __init__(self, *, is_late_void: bool = False) -> None:
        """`is_late_void`: what a site trained for one sync counts in no other one."""
        self._is_late_void = is_late_void
        self._windows: dict[int, deque[float]] = {}
        self._step_s: dict[int, float] = {}  # median and spread of them
        self._based_at: dict[int, float] = {}  # when its last contribution was through, and the next window opened
        self._in_vain: dict[int, _InVain] = {}

    def note_ready(self, site_id: int, num_steps: int, train_s: float) -> None:
        """So many steps took the site so long."""
        if num_steps <= 0 or train_s <= 0:
            return  # a snapshot that is taken again, or a script without a loss, says nothing about it
        windows = self._windows.setdefault(site_id, deque(maxlen=REMEMBERED))
        windows.append(train_s / num_steps)
        median = statistics.median(windows)
        self._step_s[site_id] = median + SPREADS * statistics.median(abs(s - median) for s in windows)

    def note_commit(
        self, contributors: Collection[int], waited_for: Iterable[int], waited_s: float, now: float
    ) -> None:
        """Whoever was waited for in vain, so long, may hang."""
        for site_id in waited_for:
            before = self._in_vain[site_id].times if site_id in self._in_vain else 0
            times = min(before + 1, MOST_TIMES)
            without_s = waited_s / PATIENT_SHARE * 2.0 ** (times - 1) if self._is_late_void else math.inf
            self._in_vain[site_id] = _InVain(times, now + without_s)
        for site_id in contributors:
            self._in_vain.pop(site_id, None)

    def note_opening(self, contributors: Collection[int], now: float) -> None:
        """The next sync is open: contributors to the one before train for it."""
        for site_id in contributors:
            self._based_at[site_id] = now

    def forget(self, site_id: int) -> None:
        """It has left: much may be different when it is back."""
        self._windows.pop(site_id, None)
        self._step_s.pop(site_id, None)
        self._based_at.pop(site_id, None)
        self._in_vain.pop(site_id, None)

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
        window: Window,
        *,
        first_ready_at: float,
        most_s: float,
    ) -> Patience:
        """For those of `members` who are `waiting` to be ready. `most_s` after the first is the end in any case, and
        the only one for a site of which nothing is known."""
        fallback = first_ready_at + most_s
        members = [i for i in members if i not in self._in_vain]  # else those who never come would be most of them
        typical_s = self.typical_s(members, window.num_steps)
        if typical_s is None:
            return Patience(fallback, frozenset())
        late = self.late(waiting, members, window)
        worth_it = [i for i in waiting if i not in late]
        if not worth_it:
            return Patience(first_ready_at, late)
        if any(i not in self._step_s and i not in self._in_vain for i in worth_it):
            return Patience(fallback, late)
        slack_s = max(SLACK * typical_s, window.least_slack_s)
        return Patience(min(fallback, max(first_ready_at, window.opened_at + typical_s) + slack_s), late)

    def late(self, sites: Collection[int], members: Collection[int], window: Window) -> frozenset[int]:
        """Those of `sites` who are slower than most of `members`, or may hang."""
        typical_s = self.typical_s(members, window.num_steps)
        if typical_s is None:
            return frozenset()
        until = window.opened_at + typical_s + max(SLACK * typical_s, window.least_slack_s)
        may_hang = {i for i, known in self._in_vain.items() if window.opened_at < known.until}
        return frozenset(i for i in sites if i in may_hang or self._ready_at(i, window) > until)

    def _ready_at(self, site_id: int, window: Window) -> float:
        """A site that missed syncs has trained on since its base. When its own window is over, its node plans to be
        ready for the sync that is open then."""
        return self._based_at.get(site_id, window.opened_at) + (self.window_s(site_id, window.num_steps) or 0.0)
