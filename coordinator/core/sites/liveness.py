"""How long the coordinator waits for a site: the timer and what follows read the same limits. Pure.

Sites that are connected, send heartbeats, and get no further have two limits, for two ways to hang. The workers of a
site hang: its node restarts them after the limit that it announces, and a node that has not done so much later hangs as
well. The node itself hangs: its heartbeats go on, from another part of it, and announce no limit, while the coordinator
owes it nothing.
"""

from __future__ import annotations

import logging
from enum import Enum
from math import inf
from typing import NamedTuple

from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site, Standing, Stream
from atoll.coordinator.core.sync.syncs import Sync
from atoll.protocol import messages as m

IDLE_STALLS = 4
"""So many stalls a site may neither train nor be ready, nor get on with its first state, without announcing a limit."""
SLOWEST_DISK_BYTES_PER_S = 32 << 20
"""While a node applies, publishes, saves or rolls back a large model it says nothing new either."""


class Missing(Enum):
    """What the coordinator waits for, in words for when it did not come."""

    HELLO = "no Hello for"
    WORDS = "silent for"
    ACKS = "sends, but has heard nothing for"
    STREAM = "its stream closed and it did not come back"
    WORKERS = "its workers hang"
    NODE = "its node hangs"


HANGS = (Missing.WORKERS, Missing.NODE)
"""The site is here, and is found out."""


class Limit(NamedTuple):
    """How long the coordinator waits, and what for."""

    at: float
    missing: Missing


def look(run: Run, *, back_until: float) -> float:
    """Notes since when each site is away or owes progress; when the first limit passes, of all streams and sites,
    offers that wait for their time among them. Sites that are away may come back until `back_until` at least."""
    goes_on, idle_s = may_go_on(run), idle_limit_s(run)
    first = min((limit_of_stream(run, stream).at for stream in run.members.streams.values()), default=inf)
    for site in run.members.sites.values():
        if site.waits_with is not None:
            first = min(first, site.conduct.admitted_again_at)
        if not site.live:
            continue
        if site.stream is None and site.away_until is None:
            site.is_away(max(run.now + run.limits.reconnect_grace_s, back_until))
        site.note_owing(owes_progress=_owes_progress(run, site, goes_on=goes_on), now=run.now)
        if (limit := limit_of_site(run, site, idle_s)) is not None:
            first = min(first, limit.at)
    return first


def limit_of_stream(run: Run, stream: Stream) -> Limit:
    """For a Hello; or of a session, in both directions."""
    lease_s, site, unacked_since = run.limits.lease_s, stream.site, stream.unacked_since
    if site is None or site.standing is Standing.OUT:
        return Limit(stream.waiting_since + lease_s, Missing.HELLO)
    if unacked_since is not None and unacked_since < site.heard_at:
        return Limit(unacked_since + lease_s, Missing.ACKS)
    return Limit(site.heard_at + lease_s, Missing.WORDS)


def may_go_on(run: Run) -> bool:
    """Whether nothing that the coordinator has yet to do holds up all sites."""
    return not (run.disputed or run.unreachable or run.going_back is not None or run.finished is not None)


def limit_of_site(run: Run, site: Site, idle_s: float) -> Limit | None:
    """Of a site that is in the run: to come back, or to get on. None while it waits for the coordinator or for other
    sites. `idle_s` is `idle_limit_s`."""
    if site.stream is None:
        return None if site.away_until is None else Limit(site.away_until, Missing.STREAM)
    if site.heartbeat.limit_s > 0:
        return Limit(site.progress_at + _announced_s(run, site) + 2 * run.limits.stall_s, Missing.WORKERS)
    if site.owes_since is None:
        return None
    return Limit(max(site.progress_at, site.owes_since) + idle_s, Missing.NODE)


def in_words(run: Run, site: Site | None, missing: Missing) -> str:
    """Why the site is lost, or the stream ends, once the limit has passed."""
    if site is not None and missing in HANGS:
        return _workers_hang(run, site) if missing is Missing.WORKERS else _node_hangs(run, site)
    return missing.value if missing is Missing.STREAM else f"{missing.value} {run.limits.lease_s:g} s"


def _announced_s(run: Run, site: Site) -> float:
    return min(site.heartbeat.limit_s, float(run.settings.max_busy_s))


def _workers_hang(run: Run, site: Site) -> str:
    heartbeat, limit_s = site.heartbeat, _announced_s(run, site)
    bound = "" if limit_s == heartbeat.limit_s else f", of {heartbeat.limit_s:.0f} s that it announced"
    what = f"{heartbeat.doing}, step {heartbeat.inner_step}; {limit_s:.0f} s are its limit{bound}"
    return f"{_unmoved(run, site)} its workers have got no further ({what}) and its node does not restart them"


def _node_hangs(run: Run, site: Site) -> str:
    heartbeat, what = site.heartbeat, "fetched nor made a state"
    if site.standing is Standing.MEMBER:
        owed = [str(sync.open.sync) for sync in run.lanes.values() if owes(run, site, sync)]
        what = f"trained nor been ready for sync {', '.join(owed)}"
    return f"{_unmoved(run, site)} it has neither {what} (phase {heartbeat.phase!r}, step {heartbeat.inner_step})"


def _unmoved(run: Run, site: Site) -> str:
    return f"it is connected, but for {run.now - site.progress_at:.0f} s"


def idle_limit_s(run: Run) -> float:
    """How long a site may work for a sync, or for its first state, without a sign of progress or a limit."""
    disk_s = 2 * run.state_bytes / SLOWEST_DISK_BYTES_PER_S  # read and written
    return min(IDLE_STALLS * run.limits.stall_s + disk_s, float(run.settings.max_busy_s))


def _owes_progress(run: Run, site: Site, *, goes_on: bool) -> bool:
    """Whether nothing that the coordinator or another site has yet to do holds this site up."""
    if not goes_on or site.waits_for_sources is not None:
        return False
    return site.standing is not Standing.MEMBER or any(owes(run, site, sync) for sync in run.lanes.values())


def owes(run: Run, site: Site, sync: Sync) -> bool:
    """Whether a member is not ready for the sync, may still contribute to it, and may train to the end of its window:
    not where that is beyond what it may train before another commit. A site that rests in the sync trains as far as may
    count, and then waits for a commit."""
    site_id = site.site_id
    is_ready = site_id in sync.ready and site.holds(sync.open.base_commit)
    if is_ready or site_id in sync.open.resting or sync.exclusions.is_void(site.start):
        return False
    awaited = (other for other in run.lanes.values() if site_id in other.ready)
    return all(other.end_step + other.open.overlap_steps >= sync.end_step for other in awaited)


def note_limit(run: Run, site: Site, message: m.Heartbeat) -> None:
    """Says that a site announces a longer limit than the run allows, before it is evicted for that."""
    most_s = run.settings.max_busy_s
    if site.live and message.limit_s > most_s >= site.heartbeat.limit_s:
        text = f"announces {message.limit_s:.0f} s without progress ({message.doing}); run.max_busy_s allows {most_s}"
        run.report(logging.WARNING, f"{site.label} {text}")
