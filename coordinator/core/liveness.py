"""Sites that are connected, send heartbeats, and get no further. Pure."""

from __future__ import annotations

from atoll.coordinator.core.membership import Site
from atoll.protocol import messages as m
from atoll.protocol.time_limits import TimeLimits


def has_got_on(before: m.Heartbeat, now: m.Heartbeat) -> bool:
    """Whether the paths that do the work did any: phase, steps and chunk bytes, not signs of life."""

    def work(h: m.Heartbeat) -> tuple[str, str, int, int]:
        return h.phase, h.doing, h.inner_step, h.moved_bytes

    return work(before) != work(now)


def hangs_at(site: Site, limits: TimeLimits) -> float | None:
    """When a site whose workers get no further is evicted; None if they wait, or the site does something else.

    The node restarts them itself after the limit that it says. One that has not done so much later hangs as well.
    """
    if not site.live or site.heartbeat.limit_s <= 0:
        return None
    return site.progress_at + site.heartbeat.limit_s + 2 * limits.stall_s


def hangs_because(site: Site, now: float) -> str:
    heartbeat = site.heartbeat
    return (
        f"it is connected, but its workers have got no further for {now - site.progress_at:.0f} s ({heartbeat.doing}, "
        f"step {heartbeat.inner_step}; {heartbeat.limit_s:.0f} s are its limit) and its node does not restart them"
    )
