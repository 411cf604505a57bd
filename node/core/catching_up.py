"""Bringing the outer state to the newest attested commit."""

from __future__ import annotations

import logging

from atoll.node.core import commits, errors, events, holding, saving, sources
from atoll.node.core.context import Context
from atoll.node.core.disk import Outer, newest
from atoll.node.core.lanes import exchanges, snapshots
from atoll.node.core.outputs import FetchState, RollBack, TellFetch
from atoll.protocol import messages as m


def answered(ctx: Context, message: m.Sources) -> None:
    """Tells the fetch that runs; a commit that it brings may hold this site's contribution. Without one, queues a fetch
    if a donor has something newer; without a donor the site tries the payloads of its own log."""
    site, disk = ctx.site, ctx.site.disk
    sources.forget(ctx)
    if disk.find(RollBack) is None:
        for commit in message.commits:
            snapshots.note_contribution(ctx, commit)
    if disk.runs(FetchState):
        ctx.emit(TellFetch(message))
        return
    if site.seeding or disk.find(RollBack) is not None:
        return
    held = disk.outer.commit if disk.outer is not None else -1
    reached = held if disk.outer is None or disk.applying is None else disk.applying
    if newest(message) <= reached:
        return
    if message.donors:
        disk.add(FetchState(message))
    elif disk.outer is not None and disk.lacks != held + 1:
        # The coordinator sends Sources again when there is a donor; the payloads may be in the site's own log.
        commits.keep(ctx, (c for c in message.commits if c.commit > held))


def state_fetched(ctx: Context, event: events.StateFetched) -> None:
    """The site holds it. A sealed snapshot that no commit holds, of a fragment that one has touched, has another base
    and is given up: the ranks keep their progress."""
    site, disk = ctx.site, ctx.site.disk
    if disk.end(FetchState) is None:
        return
    sources.fetched(ctx)
    commits.forget(ctx, event.commit)
    outer = Outer(
        commit=event.commit,
        state_hash=event.state_hash,
        run_step=event.run_step,
        run_tokens=event.run_tokens,
        touched=event.touched,
    )
    is_empty = snapshots.holds_nothing(ctx)
    for lane in site.lanes:
        if lane.exchange is not None and outer.touch(lane.fragment) > lane.exchange.plan.base_commit:
            exchanges.give_up(ctx, lane)
        if snapshots.settle(ctx, lane, outer):
            errors.given_up(ctx, lane, outer.commit)
    site.workers.reach(outer)
    snapshots.drop_late(ctx, is_empty=is_empty)
    disk.unpublish()  # it may have held another state of this commit
    holding.hold(ctx, outer, final=disk.final or event.final)
    ctx.report(logging.INFO, f"outer state complete and verified at commit {event.commit}")
    if event.final:
        saving.save(ctx)
