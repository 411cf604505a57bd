"""When a site may send its next frame in an exchange that has time: evenly, so that the last byte is sent as the time
ends. Pure.

A token bucket without depth: time that was not used gives no burst. The rate follows from what is left to send and the
time that is left, so a delay of any kind is made up for.
"""

from __future__ import annotations

MAX_SPARE_MS = (1 << 32) - 1


class Pacing:
    """Of one attempt. All that the site sends shares it, whichever stream carries it."""

    def __init__(self, *, num_bytes: int, spread_s: float, least_bytes_per_s: float, now: float) -> None:
        """`num_bytes`: the most that is to be sent. `spread_s`: in this time, or sooner at `least_bytes_per_s`; 0: as
        fast as it goes."""
        self._left_bytes = num_bytes
        self._least_bytes_per_s = least_bytes_per_s
        self._ends_at = now + spread_s
        self._next_at = now

    def spare_ms(self, now: float) -> int:
        """How long no contributor that is known of needs payloads; 0: one waits."""
        return int(min(max(0.0, self._ends_at - now) * 1000, MAX_SPARE_MS))

    def hurry(self, spare_ms: int, now: float) -> None:
        """A contributor can do without payloads for no longer than this."""
        self._ends_at = min(self._ends_at, now + spare_ms / 1000)

    def delay_s(self, now: float) -> float:
        """Until the next frame may be sent."""
        return max(0.0, min(self._next_at, self._ends_at) - now)

    def sent(self, num_bytes: int, now: float) -> None:
        """A frame, when its delay was over."""
        if now < self._ends_at:
            rate = max(self._left_bytes / (self._ends_at - now), self._least_bytes_per_s)
            self._next_at = max(self._next_at, now) + num_bytes / rate
        self._left_bytes = max(self._left_bytes - num_bytes, 0)
