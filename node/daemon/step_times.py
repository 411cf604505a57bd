"""What is normal for this site's workers: how long their steps take, over all generations. Pure."""

from __future__ import annotations

import statistics
from collections import deque

REMEMBERED = 128
"""Reports of step times, about one a second and rank."""
FACTOR = 8
"""A step may take so many times what is normal ..."""
SPREADS = 4
"""... which is the median and so many times the median distance from it."""


class StepTimes:
    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def note(self, seconds: float) -> None:
        """Of one step, or the mean of the few since the last report."""
        self._seconds.append(seconds)

    @property
    def normal_s(self) -> float | None:
        """None before the first step."""
        if not self._seconds:
            return None
        median = statistics.median(self._seconds)
        return median + SPREADS * statistics.median(abs(s - median) for s in self._seconds)

    def limit_s(self, floor_s: float) -> float:
        """After this long without a step a worker hangs."""
        return max(floor_s, FACTOR * (self.normal_s or 0.0))
