"""When the site leaves: at the end of the run, or because it was told to."""

from __future__ import annotations

import logging

from atoll.node.core import endings, saving
from atoll.node.core.context import Context
from atoll.node.core.events import LeaveAsked
from atoll.node.core.lanes.answers import in_sync
from atoll.node.core.outputs import RollBack
from atoll.protocol import messages as m
from atoll.protocol.errors import HostError
from atoll.protocol.exit_codes import ENDED_AT_ONCE


def finished(ctx: Context, message: m.Finished) -> None:
    """The run is over. The last model is saved if the site holds the last commit; it ends at once if it cannot have
    it any more. Void commits leave the disk first."""
    site, disk, commit = ctx.site, ctx.site.disk, message.commit
    site.finished = message
    if disk.find(RollBack) is not None:
        return
    if disk.outer is not None and disk.outer.commit == commit:
        if message.state_hash not in (b"", disk.outer.state_hash):
            saving.contradicted(ctx, message)
        elif not disk.final:
            disk.end_run(message.run_step, message.run_tokens)
            saving.save(ctx)
        return
    here = "" if disk.outer is None else f"; this site holds commit {disk.outer.commit}: another one has the model"
    site.over = f"the run is over at commit {commit}: {message.reason}{here}"
    next_is_here = disk.outer is not None and disk.outer.commit + 1 in site.commits
    if disk.applying is None and not (next_is_here and commit in site.commits):
        endings.exit(ctx, 0, site.over)


def finished_meanwhile(ctx: Context) -> bool:
    """The end of the run, heard while a commit was applied, a state fetched or the disk rolled back."""
    site = ctx.site
    if site.finished is None or site.disk.applying is not None or site.disk.find(RollBack) is not None:
        return False
    finished(ctx, site.finished)
    return True


def leave_asked(ctx: Context, event: LeaveAsked) -> None:
    """By a person: after the sync under way, or at once."""
    site = ctx.site
    if event.at_once:
        endings.depart(ctx, event.reason, ENDED_AT_ONCE)
    if event.at_once or site.leaving or site.disk.final:
        return
    endings.leave(ctx, event.reason)
    site.workers.restart_by(None)
    if site.version is not None:
        limit_s = ctx.limits.leave_s
        ctx.report(logging.INFO, f"leaving after the sync under way, at most {limit_s:g} s; again to leave now")


def is_overdue(ctx: Context) -> bool:
    """The sync did not end in time: the site leaves now."""
    site = ctx.site
    if site.leave_deadline is None or ctx.now < site.leave_deadline:
        return False
    endings.depart(ctx, f"{site.leaving} (the sync did not end in time)", 0)
    return True


def advance(ctx: Context) -> None:
    """Leave, if nobody counts on this site any more."""
    site, workers, disk = ctx.site, ctx.site.workers, ctx.site.disk
    # Workers that were not admitted are told nothing: the run was over before they joined.
    busy = workers.running and workers.laid_out
    if disk.final and not busy and site.saving is None and disk.applying is None:
        if site.saved_elsewhere:
            endings.depart(ctx, f"the run is complete; {site.saved_elsewhere}", HostError.exit_code)
        else:
            endings.depart(ctx, "the run is complete", 0)
    elif site.leaving and not disk.final and not in_sync(site) and (not workers.running or site.version is None):
        endings.depart(ctx, site.leaving, 0)
