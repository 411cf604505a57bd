"""How long the coordinator waits for a site: the timer and what follows read the same limits. Pure.

Sites that are connected, send heartbeats, and get no further have two limits, for two ways to hang. The workers of a
site hang: its node restarts them after the limit that it announces, and a node that has not done so much later hangs as
well. The node itself hangs: its heartbeats go on, from another part of it, and announce no limit, while the coordinator
owes it nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site, Standing, Stream
from atoll.coordinator.core.sync.syncs import Sync
from atoll.protocol import messages as m

IDLE_STALLS = 4
"""So many stalls a site may neither train nor be ready, nor get on with its first state, without announcing a limit."""
SLOWEST_DISK_BYTES_PER_S = 32 << 20
"""While a node applies, publishes, saves or rolls back a large model it says nothing new either."""


class Limit(NamedTuple):
    """How long the coordinator waits, and what for."""

    at: float
    why: Callable[[], str]
    """Why the site is lost or the stream ends then. The words are made when it has passed, as each look makes limits of
    every site."""
    is_hang: bool = False
    """The site is here, and is found out."""
    closes: str = ""
    """Why its stream ends as well."""


def passed(now: float, limits: Sequence[Limit]) -> Limit | None:
    """The first one that has."""
    return next((limit for limit in limits if now >= limit.at), None)


def next_limit(run: Run) -> float | None:
    """When the first one passes, of all streams and sites; offers that wait for their time among them."""
    members, goes_on = run.members, may_go_on(run)
    of_streams = (limit.at for stream in members.streams.values() for limit in limits_of_stream(run, stream))
    of_sites = (limit.at for site in members.live() for limit in limits_of_site(run, site, goes_on=goes_on))
    of_offers = (site.conduct.admitted_again_at for site in members.sites.values() if site.waits_with is not None)
    return min((*of_streams, *of_sites, *of_offers), default=None)


def limits_of_stream(run: Run, stream: Stream) -> tuple[Limit, ...]:
    """For a Hello; or of a session, in both directions."""
    lease_s, site = run.limits.lease_s, stream.site
    if site is None or site.standing is Standing.OUT:
        return (Limit(stream.waiting_since + lease_s, lambda: f"no Hello for {lease_s:g} s"),)
    silent = Limit(site.heard_at + lease_s, lambda: f"silent for {lease_s:g} s")
    if stream.unacked_since is not None:
        at = stream.unacked_since + lease_s
        deaf = Limit(at, lambda: f"sends, but has heard nothing for {lease_s:g} s", closes="the site does not hear")
        return silent, deaf
    return (silent,)


def may_go_on(run: Run) -> bool:
    """Whether nothing that the coordinator has yet to do holds up all sites."""
    return not (run.disputed or run.unreachable or run.going_back is not None or run.finished is not None)


def limits_of_site(run: Run, site: Site, *, goes_on: bool) -> tuple[Limit, ...]:
    """Of a site that is in the run: to come back, or to get on, where the run `goes_on`."""
    if site.stream is None:
        why = "its stream closed and it did not come back"
        return () if site.away_until is None else (Limit(site.away_until, lambda: why),)
    if site.heartbeat.limit_s > 0:
        at = site.progress_at + _announced_s(run, site) + 2 * run.limits.stall_s
        return (Limit(at, lambda: _workers_hang(run, site), is_hang=True),)
    if not _owes_progress(run, site, goes_on=goes_on):
        return ()  # it waits for the coordinator or for other sites
    since = max(site.progress_at, site.held_up_at)
    return (Limit(since + idle_limit_s(run), lambda: _node_hangs(run, site), is_hang=True),)


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


def note_held_up(run: Run, site: Site, *, goes_on: bool) -> None:
    """Its time counts from when it can go on, not from when it had to stop."""
    site.held_up_at = site.held_up_at if _owes_progress(run, site, goes_on=goes_on) else run.now


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
    not where that is beyond what it may train before another commit. Nor does a site that rests in the sync get any
    further while it waits for another one."""
    is_ready = site.site_id in sync.ready and site.holds(sync.open.base_commit)
    if is_ready or sync.exclusions.is_void(site.start):
        return False
    awaited = [s for s in run.lanes.values() if site.site_id in s.ready]
    if awaited and site.site_id in sync.open.resting:
        return False
    return all(s.end_step + s.open.overlap_steps >= sync.end_step for s in awaited)


def note_limit(run: Run, site: Site, message: m.Heartbeat) -> None:
    """Says that a site announces a longer limit than the run allows, before it is evicted for that."""
    most_s = run.settings.max_busy_s
    if site.live and message.limit_s > most_s >= site.heartbeat.limit_s:
        text = f"announces {message.limit_s:.0f} s without progress ({message.doing}); run.max_busy_s allows {most_s}"
        run.report(logging.WARNING, f"{site.label} {text}")
