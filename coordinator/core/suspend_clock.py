"""Time as this process lived it: a clock that stands still while the process is stopped. Pure.

A coordinator that was stopped (SIGSTOP, a virtual machine that is moved, a disk that hangs) finds all leases over, and
it is its own fault.
"""

from __future__ import annotations


class OwnTime:
    """`now` and what `outer` returns are on the caller's clock, everything else on this one."""

    def __init__(self, tolerance_s: float) -> None:
        self._tolerance_s = tolerance_s
        self._lost_s = 0.0

    def at(self, now: float) -> float:
        """Own time at `now` of the caller."""
        return now - self._lost_s

    def outer(self, own: float) -> float:
        """The caller's time at that own time."""
        return own + self._lost_s

    def advance(self, now: float, due: float | None) -> tuple[float, float]:
        """Own time, and how long the process stood still just before. `due`: it should have been called then."""
        own = self.at(now)
        if due is None or own - due <= self._tolerance_s:
            return own, 0.0
        self._lost_s += own - due
        return due, own - due
