"""Commits as a site lives them: heard, kept until their payloads are here, and applied in the order of their numbers.

A commit ends the sync of its own fragment alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from atoll.node.core import endings, events, holding, saving, sources
from atoll.node.core.context import Context
from atoll.node.core.disk import Outer
from atoll.node.core.lanes import exchanges, own_word, snapshots, syncs
from atoll.node.core.outputs import ApplyCommit, DropSync
from atoll.protocol import messages as m
from atoll.protocol.errors import StateError
from atoll.protocol.plans import influences


def committed(ctx: Context, commit: m.Commit) -> None:
    """Kept until it is applied; those before it are asked for if they are not here. One that contradicts what this
    site said of itself ends the site."""
    site, outer, lane = ctx.site, ctx.site.disk.outer, ctx.site.lanes[commit.fragment]
    if outer is not None and commit.commit <= outer.commit:
        return
    exchange = exchanges.current(ctx, commit)
    if exchange is not None and (wrong := own_word.wrong_in_commit(ctx, lane, exchange, commit)):
        endings.give_up(ctx, wrong, StateError.exit_code)
        return
    site.commits[commit.commit] = commit
    if exchange is not None and len(exchange.plan.contributors) == len(commit.contributors):
        # The weights may have been missed: from now on peers have to get on. They may be gone for good.
        exchanges.weigh(ctx, lane, exchange, tuple(c.tokens for c in commit.contributors), None)
        exchanges.influence(ctx, lane, exchange, influences(commit))
    snapshots.note_contribution(ctx, commit)
    if commit.next is not None:
        syncs.note_opening(ctx, commit.next)
    if outer is not None and commit.commit > outer.commit + 1 and commit.commit - 1 not in site.commits:
        sources.find(ctx)


def keep(ctx: Context, commits: Iterable[m.Commit]) -> None:
    """They are tried from this site's own log."""
    ctx.site.commits.update((commit.commit, commit) for commit in commits)


def forget(ctx: Context, last: int | None = None) -> None:
    """Those up to `last`, or all."""
    for commit in [c for c in ctx.site.commits if last is None or c <= last]:
        del ctx.site.commits[commit]


def apply_next(ctx: Context) -> None:
    """The next commit, if it is here and its payloads are, or nobody is bringing them any more."""
    site, disk = ctx.site, ctx.site.disk
    if disk.outer is None or disk.running is not None or disk.queue or site.sources_asked or site.publish_is_in_use:
        return
    commit = site.commits.get(disk.outer.commit + 1)
    if commit is None:
        return
    exchange = exchanges.current(ctx, commit)
    if exchange is not None and exchange.is_under_way:
        return
    ctx.emit(disk.begin(ApplyCommit(commit, lets_go=site.nobody_reads(commit.commit))))


def apply_failed(ctx: Context, event: events.ApplyFailed) -> None:
    """The commit comes again with its payloads, from the donors. One that is void is lacking to nobody."""
    site, disk = ctx.site, ctx.site.disk
    if disk.end(ApplyCommit) is None or disk.is_void:
        return
    disk.broke_off(has_moved=event.has_moved)
    site.commits.pop(event.commit, None)
    disk.lack(event.commit)
    if site.over and not site.admitted:
        endings.exit(ctx, 0, site.over)
        return
    ctx.report(logging.WARNING, f"commit {event.commit} cannot be applied from the log ({event.reason}); fetching it")
    sources.forget(ctx)  # what was asked meanwhile did not say what is lacking
    sources.find(ctx)


def applied(ctx: Context, event: events.CommitApplied) -> None:
    """The site holds the commit, unless it became void meanwhile."""
    site, disk = ctx.site, ctx.site.disk
    if disk.end(ApplyCommit) is None or disk.is_void:
        return
    commit, before = site.commits.pop(event.commit), disk.outer
    assert before is not None
    outer = Outer(
        commit=event.commit,
        state_hash=event.state_hash,
        run_step=commit.run_step,
        run_tokens=commit.run_tokens,
        touched=before.touched_by(commit.commit, commit.fragment, ctx.settings.sync.fragments),
    )
    site.change(commit.changed_json)
    site.contributors = tuple(c.site_id for c in commit.contributors)
    is_empty = snapshots.holds_nothing(ctx)
    for lane in site.lanes:
        if snapshots.settle(ctx, lane, outer):
            site.workers.missed()
    site.workers.reach(outer)
    snapshots.drop_late(ctx, is_empty=is_empty)
    exchanges.applied(ctx, commit)
    ctx.emit(DropSync(commit.sync))
    syncs.ended(ctx, commit.sync)
    if commit.next is not None:
        syncs.go_on_for(ctx, commit.next)
    holding.hold(ctx, outer, final=commit.final)
    saving.keep_best(ctx, commit)  # before the next one takes the place of an older one
    if commit.final or (ctx.settings.save_every and commit.commit % ctx.settings.save_every == 0):
        saving.save(ctx)
