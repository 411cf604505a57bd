"""Whether a peer makes progress: chunk bytes by two clocks. Pure.

Only bytes that were lacking count, and of those that come again and again no more than `Worth` says. Signs of life,
empty messages, openings and what was sent before do not.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_STALLS = 2
WORTH_TIMES = 4
"""Streams break, and what was on its way comes again. Beyond so many times what there is, a peer does it on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How slow a peer may be."""

    stall_s: float
    """Some byte within this ..."""
    slowest_bytes_per_s: float
    """... and this rate over a window, shared among the peers that are served at once."""

    @property
    def window_s(self) -> float:
        return WINDOW_STALLS * self.stall_s

    def slowest_share(self, share: int) -> float:
        """Bytes a second that are enough of one of so many peers that share a link, over many windows."""
        # Bytes come in whole messages, up to a stall apart: the last of a window may fall into the next.
        return self.slowest_bytes_per_s * (self.window_s - self.stall_s) / self.window_s / max(share, 1)


class Worth:
    """What of the bytes that go to a peer, or come from it, is progress: a chunk that never becomes whole could be
    begun for ever, and one that was given be asked for again."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes`: the most that there is."""
        self._left = WORTH_TIMES * num_bytes

    def of(self, num_bytes: int) -> int:
        counted = min(num_bytes, self._left)
        self._left -= counted
        return counted


class Progress:
    """Of one peer in one direction. `now` may come from any clock that stands still while the peer is not to blame."""

    def __init__(self, pace: Pace, now: float, share: int) -> None:
        """`share`: how many such peers share this site's link."""
        self._pace = pace
        self._min_bytes = pace.slowest_share(share) * pace.window_s
        self._moved_at = self._window_at = now
        self._window_bytes = 0

    def restart(self, now: float) -> None:
        """What was before is not held against the peer."""
        self._moved_at = self._window_at = now
        self._window_bytes = 0

    def moved(self, num_bytes: int, now: float) -> None:
        if num_bytes > 0:
            self._moved_at = now
            self._window_bytes += num_bytes

    def problem(self, now: float) -> str:
        """In words; empty if there is none. To be asked several times a window while the peer owes something."""
        pace = self._pace
        if now - self._moved_at > pace.stall_s:
            return f"no byte for {pace.stall_s:.1f} s"
        if now - self._window_at >= pace.window_s:
            if self._window_bytes < self._min_bytes:
                return (
                    f"only {self._window_bytes} bytes in {now - self._window_at:.1f} s, at least "
                    f"{self._min_bytes:.0f} are progress"
                )
            self._window_at, self._window_bytes = now, 0
        return ""
