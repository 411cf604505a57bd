"""How fast a site may send to others, all that it sends taken together: what its owner gives of the uplink. Pure.

A token bucket of little depth: time that was not used, as while a frame is written, is made up for within `DEPTH_S`,
and gives no burst beyond that.
"""

from __future__ import annotations

DEPTH_S = 0.25


class UploadCap:
    def __init__(self, bytes_per_s: float, now: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._next_at = now
        self.num_bytes = 0
        """That were let through."""
        self.waited_s = 0.0
        """That frames had to wait, each behind those before it."""

    def delay_s(self, now: float) -> float:
        """Until the next frame may be sent."""
        return max(0.0, self._next_at - now)

    def send(self, num_bytes: int, now: float) -> None:
        """A frame, when its delay was over."""
        self._next_at = max(self._next_at, now - DEPTH_S) + num_bytes / self.bytes_per_s
        self.num_bytes += num_bytes
