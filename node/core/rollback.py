"""The run went back to an earlier commit: what this site has of the later ones is void."""

from __future__ import annotations

import logging

from atoll.node.core import catching_up, divergence, events, leases, saving, syncs
from atoll.node.core.context import Context
from atoll.node.core.events import DropSync, RebuildCommit, RollBack
from atoll.node.core.state import Outer, SnapshotPhase
from atoll.protocol import messages as m


def rebuild_asked(ctx: Context, message: m.RebuildCommit) -> None:
    """Nothing of what this site holds is given up for it: the run may not go back after all."""
    site = ctx.site
    if site.outer is None or site.distrusting or site.rolling_back is not None:
        ctx.send(m.CommitRebuilt(commit=message.commit, text="it holds no state"))
        return
    ctx.emit(RebuildCommit(commit=message.commit, state_hash=message.state_hash, last_commit=message.last_commit))


def rebuilt(ctx: Context, event: events.CommitRebuilt) -> None:
    if event.state_hash:
        ctx.report(logging.INFO, f"commit {event.commit} is on this disk, with hash {event.state_hash.hex()[:12]}")
    else:
        ctx.report(logging.WARNING, f"commit {event.commit} cannot be put together here: {event.text}")
    ctx.send(
        m.CommitRebuilt(
            commit=event.commit,
            state_hash=event.state_hash,
            has_oldest=event.oldest is not None,
            oldest_commit=event.oldest or 0,
            text=event.text[:1024],
        )
    )


def rolled_back(ctx: Context, message: m.RolledBack) -> None:
    site, commit = ctx.site, message.commit
    if message.branch <= site.branch:
        return
    ctx.report(logging.ERROR, f"the run went back to commit {commit}: {message.reason}")
    site.branch = message.branch
    if site.rolling_back is not None:  # the disk may still be as it was before that one
        commit = min(commit, site.rolling_back.commit)
    if site.exchange is not None:
        sync = site.exchange.plan.sync
        syncs.cancel_exchange(ctx)
        ctx.emit(DropSync(sync))
    catching_up.cancel_fetch(ctx)
    saving.void_after(ctx, commit)
    site.commits.clear()
    site.open = None
    site.lacks = 0
    snapshot = site.snapshot
    is_void = (
        snapshot.phase is SnapshotPhase.SEALED and snapshot.committed_in is not None and snapshot.committed_in > commit
    )
    if site.outer is not None and site.outer.commit > commit:
        site.outer = None
        site.final = False
        is_void = True
    if is_void:  # the samples are open again, for others too
        leases.voided(ctx)
        syncs.discard_local(ctx)
    site.rolling_back = RollBack(commit, message.branch)


def begin_if_idle(ctx: Context) -> None:
    """Once nothing works on the outer state any more."""
    site = ctx.site
    if site.rolling_back is None or site.rolling_back_begun:
        return
    busy = site.applying is not None or site.seed_asked
    if not busy and not syncs.publish_is_in_use(site):
        site.rolling_back_begun = True
        site.published = None
        ctx.emit(site.rolling_back)


def done(ctx: Context, event: events.DiskRolledBack) -> bool:
    """Whether the coordinator must hear anew what this site holds."""
    site = ctx.site
    site.rolling_back_begun = False
    if site.rolling_back is None or event.branch != site.rolling_back.branch:
        return False  # it went back once more meanwhile
    site.rolling_back = None
    divergence.went_back(ctx)
    before = (site.outer.commit, site.outer.state_hash) if site.outer is not None else None
    if event.held == before:
        if before is None or (site.commits and before[0] + 1 not in site.commits):
            catching_up.find_sources(ctx)  # put off until now
        syncs.ready(ctx)
        return False
    if site.outer is not None:
        leases.voided(ctx)
        syncs.discard_local(ctx)
    site.outer = None
    if event.held is not None:
        commit, state_hash = event.held
        site.outer = Outer(commit=commit, state_hash=state_hash, run_step=0, run_tokens=0)
    return True
