"""Sites that are connected, send heartbeats, and get no further. Pure.

Two limits, for two ways to hang. The workers of a site hang: its node restarts them after the limit that it announces,
and a node that has not done so much later hangs as well. The node itself hangs: its heartbeats go on, from another part
of it, and announce no limit, while the coordinator owes it nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site, Standing
from atoll.protocol import messages as m

IDLE_STALLS = 4
"""So many stalls a site may neither train nor be ready, nor get on with its first state, without announcing a limit."""
SLOWEST_DISK_BYTES_PER_S = 32 << 20
"""While a node applies, publishes, saves or rolls back a large model it says nothing new either."""


@dataclass(frozen=True, slots=True)
class Hang:
    """When a site is evicted unless it gets on, and why it is then."""

    at: float
    why: str


def has_got_on(before: m.Heartbeat, now: m.Heartbeat) -> bool:
    """Whether the paths that do the work did any: phase, steps and chunk bytes, not signs of life."""

    def work(h: m.Heartbeat) -> tuple[str, str, int, int]:
        return h.phase, h.doing, h.inner_step, h.moved_bytes

    return work(before) != work(now)


def hang(run: Run, site: Site) -> Hang | None:
    """None while the site waits for the coordinator or for other sites."""
    if not site.live or site.stream is None:
        return None
    heartbeat = site.heartbeat
    if heartbeat.limit_s > 0:
        limit_s = min(heartbeat.limit_s, float(run.settings.max_busy_s))
        bound = "" if limit_s == heartbeat.limit_s else f", of {heartbeat.limit_s:.0f} s that it announced"
        what = f"{heartbeat.doing}, step {heartbeat.inner_step}; {limit_s:.0f} s are its limit{bound}"
        why = f"its workers have got no further ({what}) and its node does not restart them"
        return Hang(site.progress_at + limit_s + 2 * run.limits.stall_s, why)
    if not _owes_progress(run, site):
        return None
    since, what = max(site.progress_at, site.held_up_at), "fetched nor made a state"
    if site.standing is Standing.MEMBER:
        assert run.sync is not None
        what = f"trained nor been ready for sync {run.sync.open.sync}"
    why = f"it has neither {what} (phase {heartbeat.phase!r}, step {heartbeat.inner_step})"
    return Hang(since + idle_limit_s(run), why)


def note_held_up(run: Run, site: Site) -> None:
    """Its time counts from when it can go on, not from when it had to stop."""
    site.held_up_at = site.held_up_at if _owes_progress(run, site) else run.now


def idle_limit_s(run: Run) -> float:
    """How long a site may work for a sync, or for its first state, without a sign of progress or a limit."""
    disk_s = 2 * run.state_bytes / SLOWEST_DISK_BYTES_PER_S  # read and written
    return min(IDLE_STALLS * run.limits.stall_s + disk_s, float(run.settings.max_busy_s))


def _owes_progress(run: Run, site: Site) -> bool:
    """Whether nothing that the coordinator or another site has yet to do holds this site up."""
    if run.disputed or run.unreachable or run.going_back is not None or run.finished is not None:
        return False
    if site.waits_for_sources is not None:
        return False
    if site.standing is not Standing.MEMBER:
        return True
    sync = run.sync
    if sync is None:
        return False
    is_ready = site.site_id in sync.ready and site.applied == sync.open.base_commit
    return not is_ready and not sync.exclusions.is_void(site.start)


def note_limit(run: Run, site: Site, message: m.Heartbeat) -> None:
    """Says that a site announces a longer limit than the run allows, before it is evicted for that."""
    most_s = run.settings.max_busy_s
    if site.live and message.limit_s > most_s >= site.heartbeat.limit_s:
        text = f"announces {message.limit_s:.0f} s without progress ({message.doing}); run.max_busy_s allows {most_s}"
        run.report(logging.WARNING, f"{site.label} {text}")


def in_words(site: Site, found: Hang, now: float) -> str:
    return f"it is connected, but for {now - site.progress_at:.0f} s {found.why}"
