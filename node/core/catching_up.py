"""Bringing the outer state to the newest attested commit."""

from __future__ import annotations

import logging

from atoll.node.core import endings, events, saving, syncs
from atoll.node.core.context import Context
from atoll.node.core.events import CancelFetch, FetchState
from atoll.node.core.state import Outer, Snapshot, SnapshotPhase
from atoll.protocol import messages as m

FETCH_RETRY_S = 0.5
MAX_FETCH_BACKOFF_S = 8.0
MAX_FETCHES_AT_THE_END = 3
"""Of a state that the others may have taken with them."""


def hold(ctx: Context, outer: Outer) -> None:
    ctx.site.outer = outer
    ctx.site.lacks = 0
    ctx.site.is_disputed = ctx.site.is_checked = False  # what was, is another state
    ctx.send(m.Applied(commit=outer.commit, state_hash=outer.state_hash))


def find_sources(ctx: Context) -> None:
    site = ctx.site
    if site.fetching or site.looking_for_sources or not site.connected or not site.admitted:
        return  # admission asks again: the coordinator hears only sites that it has admitted
    if site.distrusting or site.rolling_back is not None:
        return  # asked when that is done
    site.looking_for_sources = True
    site.retry_fetch_at = None
    outer = site.outer
    ctx.send(
        m.FindSources(has_state=outer is not None, after_commit=outer.commit if outer else 0, lacks_commit=site.lacks)
    )


def sources(ctx: Context, message: m.Sources) -> None:
    site = ctx.site
    site.looking_for_sources = False
    if site.fetching or site.seeding or site.seed_asked or site.distrusting or site.rolling_back is not None:
        return
    for commit in message.commits:
        syncs.note_contribution(ctx, commit)
    outer_commit = site.outer.commit if site.outer is not None else -1
    newest = max([c.commit for c in message.commits] + [a.commit for a in message.attested], default=-1)
    if newest <= (outer_commit if site.applying is None else site.applying):
        return
    if site.applying is not None or syncs.publish_is_in_use(site):
        site.retry_fetch_at = ctx.now + FETCH_RETRY_S
        return
    if not message.donors or newest < 0:
        # The coordinator sends Sources again when there is a donor; the payloads may be in the site's own log.
        if site.outer is not None and site.lacks != outer_commit + 1:
            site.commits.update((c.commit, c) for c in message.commits if c.commit > outer_commit)
        return
    site.fetching = True
    ctx.emit(FetchState(message))


def cancel_fetch(ctx: Context) -> None:
    if ctx.site.fetching:
        ctx.emit(CancelFetch())
    ctx.site.fetching = ctx.site.looking_for_sources = False
    ctx.site.retry_fetch_at = None


def state_fetched(ctx: Context, event: events.StateFetched) -> None:
    site = ctx.site
    site.fetching = False
    site.fetch_failures = 0
    for commit in [c for c in site.commits if c <= event.commit]:
        del site.commits[commit]
    site.final = site.final or event.final
    syncs.give_up_exchange_before(ctx, event.commit)
    site.published = None  # it may have held another state of this commit
    if site.snapshot.phase is SnapshotPhase.SEALED:
        if site.snapshot.committed_in is not None:
            syncs.consume(ctx)
        else:
            site.snapshot = Snapshot()  # its base is not the latest commit any more; the ranks keep their progress
    hold(
        ctx,
        Outer(
            commit=event.commit,
            state_hash=event.state_hash,
            run_step=event.run_step,
            run_tokens=event.run_tokens,
        ),
    )
    ctx.report(logging.INFO, f"outer state complete and verified at commit {event.commit}")
    if event.final:
        saving.save(ctx)


def fetch_failed(ctx: Context, reason: str) -> None:
    site = ctx.site
    site.fetching = False
    site.fetch_failures += 1
    if site.over and site.fetch_failures >= MAX_FETCHES_AT_THE_END:
        endings.exit(ctx, 0, site.over)
        return
    delay_s = min(FETCH_RETRY_S * 2.0**site.fetch_failures, MAX_FETCH_BACKOFF_S)
    site.retry_fetch_at = ctx.now + delay_s
    ctx.report(logging.WARNING, f"could not fetch the state ({reason}); again in {delay_s:g} s")
