"""Error feedback: which commit has advanced this site's error of each fragment, and when it counts no more.

A commit that holds the sealed snapshot advances it, before anything takes the base away: the job waits in the queue
before the apply or the fetch. What cannot be advanced, or is of void progress, is dropped, and said.
"""

from __future__ import annotations

import logging

from atoll.node.core import events
from atoll.node.core.context import Context
from atoll.node.core.lanes.lane import Lane
from atoll.node.core.outputs import AdvanceErrors


def welcomed(ctx: Context) -> None:
    """The run's settings are known, and this start of the node has no error yet."""
    site, sync = ctx.site, ctx.settings.sync
    if sync.error_feedback and not site.error_commits:
        site.error_commits = (0,) * sync.fragments


def said(ctx: Context, lane: Lane) -> tuple[int, ...]:
    """Of the lane's fragments, in Ready."""
    errors = ctx.site.error_commits
    return tuple(errors[f] for f in ctx.settings.sync.fragments_in(lane.fragment)) if errors else ()


def advance(ctx: Context, lane: Lane, commit: int) -> None:
    """That commit holds the lane's sealed snapshot, which is on the base still."""
    site = ctx.site
    if site.error_commits:
        job = AdvanceErrors(commit, lane.fragment, lane.snapshot.base_commit, site.error_commits)
        if job not in site.disk.jobs:
            site.disk.add(job)


def advanced(ctx: Context, event: events.ErrorsAdvanced) -> None:
    """The next contribution has it, unless it was dropped meanwhile."""
    site = ctx.site
    job = site.disk.end(AdvanceErrors)
    if job is None or job.error_commits != site.error_commits:
        return
    if event.problem:
        drop(ctx, event.problem)
        return
    covered = ctx.settings.sync.fragments_in(job.fragment)
    site.error_commits = tuple(job.commit if f in covered else at for f, at in enumerate(site.error_commits))


def check(ctx: Context, lane: Lane) -> None:
    """The lane's snapshot is consumed: if its commit could not advance the error, that is in the state already."""
    errors, commit = ctx.site.error_commits, lane.snapshot.committed_in
    if errors and any(errors[f] != commit for f in ctx.settings.sync.fragments_in(lane.fragment)):
        drop(ctx, f"the state came to commit {commit} before it was known to hold this site's contribution")


def drop(ctx: Context, reason: str) -> None:
    """All of it."""
    site = ctx.site
    if any(site.error_commits):
        site.num_errors_dropped += 1
        ctx.report(logging.WARNING, f"error feedback is dropped, and begins anew: {reason}")
    site.error_commits = (0,) * len(site.error_commits)
    site.disk.forget(AdvanceErrors)
