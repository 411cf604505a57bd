"""The question who has the state. It is no work of the disk: a fetch is queued when the coordinator has answered."""

from __future__ import annotations

import logging

from atoll.node.core import endings, events
from atoll.node.core.context import Context
from atoll.node.core.outputs import CancelFetch, FetchState, RollBack
from atoll.protocol import messages as m

FETCH_RETRY_S = 0.5
MAX_FETCH_BACKOFF_S = 8.0
MAX_FETCHES_AT_THE_END = 3
"""Of a state that the others may have taken with them."""


def find(ctx: Context) -> None:
    """Ask, unless it is asked, a fetch waits or runs, or it is asked again anyway: at admission, after a rollback."""
    site, disk = ctx.site, ctx.site.disk
    if site.sources_asked or not site.connected or not site.admitted:
        return  # the coordinator hears only sites that it has admitted
    if disk.outer is None and not site.has_model:
        return  # there is no room for it yet: asked when there is
    if disk.find(FetchState) is not None or disk.find(RollBack) is not None:
        return
    site.sources_asked = True
    site.retry_fetch_at = None
    outer = disk.outer
    ctx.send(
        m.FindSources(has_state=outer is not None, after_commit=outer.commit if outer else 0, lacks_commit=disk.lacks)
    )


def wanted(ctx: Context, event: events.SourcesWanted) -> None:
    """Asks for the fetch that runs; `catching_up.answered` tells it."""
    if ctx.site.disk.runs(FetchState):
        has_state, undialled = event.held is not None, event.undialled_site_ids
        ctx.send(m.FindSources(has_state=has_state, after_commit=event.held or 0, undialled_site_ids=undialled))


def forget(ctx: Context) -> None:
    """What was asked is not answered any more, or was answered just now."""
    ctx.site.sources_asked = False


def cancel_fetch(ctx: Context) -> None:
    """What was asked for, waits or is under way is of no use."""
    if ctx.site.disk.cancel_fetch():
        ctx.emit(CancelFetch())
    ctx.site.sources_asked = False
    ctx.site.retry_fetch_at = None


def fetched(ctx: Context) -> None:
    """The next fetch is the first one again."""
    ctx.site.fetch_failures = 0


def fetch_failed(ctx: Context, event: events.FetchFailed) -> None:
    """Asks again after a growing pause. The end of the run is not waited for any longer than a few fetches."""
    site = ctx.site
    if site.disk.end(FetchState) is None:
        return
    site.disk.broke_off(has_moved=event.has_moved)
    site.fetch_failures += 1
    if site.over and site.fetch_failures >= MAX_FETCHES_AT_THE_END:
        endings.exit(ctx, 0, site.over)
        return
    delay_s = min(FETCH_RETRY_S * 2.0**site.fetch_failures, MAX_FETCH_BACKOFF_S)
    site.retry_fetch_at = ctx.now + delay_s
    ctx.report(logging.WARNING, f"could not fetch the state ({event.reason}); again in {delay_s:g} s")


def retry_if_due(ctx: Context) -> None:
    """Asks again, once the pause after a failed fetch is over."""
    site = ctx.site
    if site.retry_fetch_at is not None and ctx.now >= site.retry_fetch_at:
        site.retry_fetch_at = None
        find(ctx)
