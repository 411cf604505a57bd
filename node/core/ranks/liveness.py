"""When a rank hangs: it has got no further for many times what a step takes at this site. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from atoll.node.core.ranks.status import WAITS_FOR_NODE, RankStatus

REMEMBERED = 128
"""Reports of step times, about one a second and rank."""
FACTOR = 8
"""A step may take so many times what is normal ..."""
SPREADS = 4
"""... which is the median and so many times the median distance from it."""

SLOW_START = (
    "; where loading takes longer, start the node with --start-limit-s, or call "
    'atoll.starting("loading", limit_s=...) before it'
)


class StepTimes:
    """How long the steps of this site's workers take, over all generations."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._normal_s: float | None = None  # asked for with every event

    def note(self, seconds: float) -> None:
        """Of one step, or the mean of the few since the last report."""
        self._seconds.append(seconds)
        median = statistics.median(self._seconds)
        self._normal_s = median + SPREADS * statistics.median(abs(s - median) for s in self._seconds)

    @property
    def normal_s(self) -> float | None:
        """None before the first step."""
        return self._normal_s

    def limit_s(self, floor_s: float) -> float:
        """After this long without a step a worker hangs."""
        return max(floor_s, FACTOR * (self.normal_s or 0.0))

    def __str__(self) -> str:
        return "" if self.normal_s is None else f"; its steps take up to {self.normal_s:.2g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Until when a rank must have got on."""

    rank: int
    deadline: float
    limit_s: float
    """From when it last got on."""
    doing: str
    text: str
    """For a person, once the deadline has passed."""


def first_to_hang(ranks: Iterable[RankStatus], times: StepTimes, floor_s: float, start_s: float) -> Watch | None:
    """The rank whose time is over first; None while all wait for the node, or one for samples: the others may wait for
    that one.

    `start_s` is for everything up to a rank's first step (imports, model, compilation). Later it has `floor_s`, or
    longer if that is normal for this site; a busy rank has at least the time it announced.
    """
    first: Watch | None = None
    for status in ranks:
        if status.draws_since is not None:
            return None
        if status.due in WAITS_FOR_NODE:
            continue
        limit_s = times.limit_s(floor_s) if status.step > 0 else start_s
        deadline, doing = status.moved_at + limit_s, status.due.value
        if status.busy:
            deadline, doing = max(deadline, status.busy_until), f"busy: {status.busy}"
        if first is None or deadline < first.deadline:
            limit_s = deadline - status.moved_at
            who = f"rank {status.rank} (pid {status.pid or 'unknown'})"
            text = f"{who} has got no further for {limit_s:.0f} s ({doing}, step {status.step}{times})"
            if status.step == 0:
                text += SLOW_START
            first = Watch(rank=status.rank, deadline=deadline, limit_s=limit_s, doing=doing, text=text)
    return first
