"""The run went back to an earlier commit: what this site has of the later ones is void."""

from __future__ import annotations

import logging

from atoll.node.core import commits, divergence, errors, events, leases, saving, sources
from atoll.node.core.context import Context
from atoll.node.core.lanes import exchanges, snapshots, syncs
from atoll.node.core.outputs import DistrustState, Fulfil, RollBack
from atoll.protocol import messages as m


def rebuild_asked(ctx: Context, message: m.RebuildCommit) -> None:
    """Nothing of what this site holds is given up for it: the run may not go back after all."""
    disk = ctx.site.disk
    if disk.outer is None or disk.find(RollBack) is not None:
        ctx.send(m.CommitRebuilt(commit=message.commit, text="it holds no state"))
        return
    ctx.emit(Fulfil(message))


def rolled_back(ctx: Context, message: m.RolledBack) -> None:
    """Gives up exchanges, the fetch and what is of void commits, and queues the rollback of the disk. The sync that is
    opened then may be of any fragment: where there are several, no snapshot is kept for it."""
    disk = ctx.site.disk
    if message.branch <= disk.branch:
        return
    ctx.report(logging.ERROR, f"the run went back to commit {message.commit}: {message.reason}")
    for lane in ctx.site.lanes:
        exchanges.give_up(ctx, lane)
    sources.cancel_fetch(ctx)
    held = disk.outer
    commit = disk.go_back(message.commit, message.branch)
    saving.void_after(ctx, commit)
    errors.went_back(ctx, commit)
    commits.forget(ctx)
    syncs.forget_open(ctx)
    sealed = [lane for lane in ctx.site.lanes if lane.snapshot.is_sealed]
    is_void = any(snapshots.is_committed_after(lane, commit) for lane in sealed)
    if disk.outer is not held or is_void or (sealed and ctx.settings.sync.fragments > 1):
        leases.voided(ctx)  # the samples are open again, for others too
        syncs.discard_local(ctx)


def done(ctx: Context, event: events.DiskRolledBack) -> bool:
    """Whether the coordinator must hear anew what this site holds."""
    site, disk = ctx.site, ctx.site.disk
    if disk.end(RollBack) is None or disk.find(RollBack) is not None:
        return False  # it went back once more meanwhile
    divergence.went_back(ctx)
    left = event.held if disk.find(DistrustState) is None else None  # what is to be checked is not held
    before = (disk.outer.commit, disk.outer.state_hash) if disk.outer is not None else None
    if left == before:
        if before is None or (site.commits and before[0] + 1 not in site.commits):
            sources.find(ctx)  # put off until now
        syncs.ready_again(ctx)
        return False
    if before is not None:
        leases.voided(ctx)
        syncs.discard_local(ctx)
    disk.left(left)
    return True
