"""The sync of a fragment outside of its exchange: it is opened, this site is ready for it, it is abandoned."""

from __future__ import annotations

import logging

from atoll.node.core import errors, leases, sources
from atoll.node.core.context import Context
from atoll.node.core.events import ContributionsKept
from atoll.node.core.lanes import exchanges, snapshots
from atoll.node.core.lanes.lane import Lane
from atoll.node.core.outputs import RollBack
from atoll.protocol import messages as m


def opened(ctx: Context, message: m.Open) -> None:
    """The site goes on for this sync. Says Ready if a snapshot for it is sealed; asks for a base that it lacks."""
    site, disk, lane = ctx.site, ctx.site.disk, ctx.site.lanes[message.fragment]
    note_opening(ctx, message)
    lane.open = message
    outer = disk.outer
    if outer is not None and message.base_commit <= outer.commit:
        # Nothing else says it of a state that was found on the disk. The windows of later syncs are beyond it.
        if not outer.run_step and all(other.open is None for other in site.lanes if other is not lane):
            disk.count(message.run_step, message.run_tokens)
    elif outer is not None and disk.applying is None and message.base_commit not in site.commits:
        sources.find(ctx)
    ready(ctx, lane)


def note_opening(ctx: Context, message: m.Open) -> None:
    """How long a window of the run takes."""
    site = ctx.site
    if message.sync == site.newest_sync + 1 and site.newest_sync:
        site.window_s = ctx.now - site.opened_at
    if message.sync > site.newest_sync:
        site.newest_sync, site.opened_at = message.sync, ctx.now


def go_on_for(ctx: Context, following: m.Open) -> None:
    """The commit is applied that the sync follows; it may have been abandoned meanwhile, and a newer one be open."""
    lane = ctx.site.lanes[following.fragment]
    if lane.open is None or following.sync > lane.open.sync:
        lane.open = following


def ended(ctx: Context, sync: int) -> None:
    """By a commit that is applied, or without one."""
    for lane in ctx.site.lanes:
        if lane.open is not None and lane.open.sync == sync:
            lane.open = None


def forget_open(ctx: Context) -> None:
    """The coordinator opens the next sync of each fragment for this site anew."""
    for lane in ctx.site.lanes:
        lane.open = None


def ready(ctx: Context, lane: Lane) -> None:
    """Said of a sealed snapshot, again on a new stream, and again with other peers that cannot be dialled. A plan that
    was made ahead begins then."""
    snapshots.keep(ctx, lane)
    site, report, open_ = ctx.site, lane.snapshot.report, snapshots.ready_for(ctx, lane)
    if open_ is None or report is None:
        return
    if site.disk.find(RollBack) is not None:
        return  # said when that is done: it removes attempts from the log, also one that was begun meanwhile
    ctx.send(
        m.Ready(
            sync=open_.sync,
            tokens=report.tokens,
            num_steps=report.num_steps,
            mean_loss=report.mean_loss,
            train_s=report.train_s,
            ranges=lane.snapshot.ranges,
            unreachable_site_ids=site.unreachable_site_ids,
            error_commits=errors.said(ctx, lane),
            rates=report.rates,
            of_shards=report.of_shards,
            contributions_root=lane.snapshot.root,
            signature=lane.snapshot.signature,
        )
    )
    exchanges.begin_ahead(ctx, lane)


def contributions_kept(ctx: Context, event: ContributionsKept) -> None:
    """With audits: the site is ready now."""
    ready(ctx, snapshots.kept(ctx, event))


def ready_again(ctx: Context) -> None:
    """For the sync of each fragment."""
    for lane in ctx.site.lanes:
        ready(ctx, lane)


def abandoned(ctx: Context, message: m.Abandoned) -> None:
    """Gives the exchange up, and goes on for the sync that follows, which is of the same fragment."""
    ctx.report(logging.WARNING, f"sync {message.sync} was abandoned: {message.reason}")
    for lane in ctx.site.lanes:
        if lane.exchange is not None and lane.exchange.plan.sync == message.sync:
            exchanges.give_up(ctx, lane)
        if lane.open is not None and lane.open.sync == message.sync:
            snapshots.free_lost(lane)
    following = message.next
    ended(ctx, message.sync)
    if following is None:
        return  # it was the last of the run
    if not message.without_tokens or snapshots.release_empty(ctx, ctx.site.lanes[following.fragment]):
        opened(ctx, following)


def discard_local(ctx: Context) -> None:
    """What the ranks have trained counts no longer: their next values replace it."""
    for lane in ctx.site.lanes:
        lane.discarded_sync = lane.sent_for
        exchanges.discard(ctx, lane)
        snapshots.free(lane)
    for copy in ctx.site.workers.copies:
        copy.discard()
    errors.discard(ctx)
    leases.discarded(ctx)
