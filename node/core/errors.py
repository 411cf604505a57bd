"""Error feedback: which commit has advanced this site's error of each fragment, and when it counts no more.

A commit that holds the sealed snapshot advances it, before anything takes the base away: the job waits in the queue
before the apply or the fetch. What cannot be advanced, or is of void progress, is dropped, and said. A snapshot keeps
what it was sealed with: its contribution never changes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from atoll.node.core import events
from atoll.node.core.context import Context
from atoll.node.core.host_events import HostErrors
from atoll.node.core.lanes.lane import Lane
from atoll.node.core.outputs import AdvanceErrors
from atoll.protocol.messages import Commit, Welcome


def welcomed(ctx: Context, message: Welcome) -> None:
    """The run's settings are known. What an earlier start has left of a fragment counts if its last contribution that
    is in a commit has left it. A commit that this start did not hear of, and that holds it, may still be listed."""
    site, sync = ctx.site, ctx.settings.sync
    if not sync.error_feedback:
        return
    none, last = (0,) * sync.fragments, message.error_commits
    held = site.held_errors or none
    wanted = last if len(last) == sync.fragments else none  # an older coordinator says nothing
    if site.error_commits:
        site.errors_in_doubt = {f for f, at in enumerate(site.error_commits) if at not in (0, wanted[f])}
        return
    site.error_commits = tuple(of if at == of else 0 for at, of in zip(held, wanted, strict=True))
    site.error_shares = (0.0,) * sync.fragments
    if lost := [f for f, at in enumerate(held) if (at != 0 or wanted[f]) and not site.error_commits[f]]:
        _drop(ctx, lost, "what an earlier start left is not of this site's last contribution, or not whole")
    _compare_with_hosts(ctx)


def host_came(ctx: Context, event: HostErrors) -> None:
    """Another host of the site has errors of its own chunks, which are to be of the same commits."""
    ctx.site.errors_of_hosts.append(event.commits)
    _compare_with_hosts(ctx)


def _compare_with_hosts(ctx: Context) -> None:
    """Once it is known which commits count. What a host holds changes with its site's from then on."""
    site = ctx.site
    if not site.error_commits:
        return
    of_hosts, site.errors_of_hosts = site.errors_of_hosts, []
    running = site.disk.running
    # Another host may have advanced its errors before host 0.
    advancing = running.commit if isinstance(running, AdvanceErrors) else 0
    for commits in of_hosts:
        held = commits if len(commits) == len(site.error_commits) else (0,) * len(site.error_commits)
        if lost := [f for f, at in enumerate(site.error_commits) if at and held[f] not in (at, advancing or at)]:
            _drop(ctx, lost, "what a host of this site holds of it is not of the same commit, or not whole")


def note_contribution(ctx: Context, commit: Commit) -> None:
    """The contribution is one of an earlier start, and had that start's error in it: no error can be advanced by it."""
    me, covered = ctx.site.site_id, ctx.settings.sync.fragments_in(commit.fragment)
    is_of_others = all(c.site_id != me or c.incarnation == ctx.identity.incarnation for c in commit.contributors)
    leaves_none = ctx.settings.sync.moves_variance(commit.commit - 1)  # of gradients
    if is_of_others or leaves_none or not ctx.site.error_commits:
        return
    if lost := [f for f in covered if 0 < ctx.site.error_commits[f] < commit.commit]:
        _drop(ctx, lost, f"commit {commit.commit} holds what this site trained before it was started again")


def sealed_with(ctx: Context, base_commit: int) -> tuple[int, ...]:
    """What is added to a contribution on that base: nothing to gradients, which are another quantity."""
    site = ctx.site
    return (0,) * len(site.error_commits) if ctx.settings.sync.moves_variance(base_commit) else site.error_commits


def said(ctx: Context, lane: Lane) -> tuple[int, ...]:
    """Of the lane's fragments, in the Ready of its sealed snapshot."""
    errors = lane.snapshot.error_commits
    return tuple(errors[f] for f in ctx.settings.sync.fragments_in(lane.fragment)) if errors else ()


def advance(ctx: Context, lane: Lane, commit: int) -> None:
    """That commit holds the lane's sealed snapshot, which is on its base still."""
    site, snapshot = ctx.site, lane.snapshot
    if snapshot.error_commits and not ctx.settings.sync.moves_variance(snapshot.base_commit):
        site.disk.add(AdvanceErrors(commit, lane.fragment, snapshot.base_commit, snapshot.error_commits))


def advanced(ctx: Context, event: events.ErrorsAdvanced) -> None:
    """The next contribution has it, unless it was dropped meanwhile."""
    site = ctx.site
    job, is_void = site.disk.end(AdvanceErrors), site.advance_is_void
    site.advance_is_void = False
    if job is None or is_void:
        return
    covered = ctx.settings.sync.fragments_in(job.fragment)
    if event.problem is not None:
        site.not_advanced_by[job.fragment] = job.commit
        _drop(ctx, covered, event.problem)
    else:
        site.errors_in_doubt.difference_update(covered)
        site.error_commits = tuple(job.commit if f in covered else at for f, at in enumerate(site.error_commits))
        site.error_shares = tuple(event.share if f in covered else was for f, was in enumerate(site.error_shares))


def check(ctx: Context, lane: Lane) -> None:
    """The lane's snapshot is consumed: if its commit has not advanced the error, the base is gone by now."""
    if ctx.settings.sync.moves_variance(lane.snapshot.base_commit):
        return  # of gradients nothing is left over
    errors, commit = ctx.site.error_commits, lane.snapshot.committed_in
    covered = ctx.settings.sync.fragments_in(lane.fragment)
    if errors and commit != ctx.site.not_advanced_by.get(lane.fragment) and any(errors[f] != commit for f in covered):
        _drop(
            ctx,
            covered,
            f"the state came to commit {commit}, which holds this site's contribution, before that could be computed",
        )
        ctx.site.disk.forget(AdvanceErrors, lane.fragment)


def given_up(ctx: Context, lane: Lane, commit: int) -> None:
    """The lane's snapshot, which no commit that was heard of holds: its base is gone by a fetch of that commit."""
    if lost := ctx.site.errors_in_doubt.intersection(ctx.settings.sync.fragments_in(lane.fragment)):
        text = f"this site has not heard of each commit up to {commit}, and one of them may hold its contribution"
        _drop(ctx, lost, text)


def went_back(ctx: Context, commit: int) -> None:
    """The run goes on from `commit`: later errors are void. Also at a start: errors may be ahead of the state found."""
    ctx.site.not_advanced_by.clear()  # another commit will have that number
    if lost := [f for f, at in enumerate(ctx.site.error_commits) if at > commit]:
        _drop(ctx, lost, f"the run went back to commit {commit}")


def discard(ctx: Context) -> None:
    """What this site trained counts no longer, and all that was left of it."""
    site = ctx.site
    if any(site.error_commits):
        _drop(ctx, range(len(site.error_commits)), "what this site trained counts no longer")
    site.disk.forget(AdvanceErrors)
    site.advance_is_void = site.disk.runs(AdvanceErrors)


def _drop(ctx: Context, fragments: Collection[int], reason: str) -> None:
    """What a contribution has left over is lost with what was there before."""
    site = ctx.site
    site.num_errors_dropped += 1
    site.errors_in_doubt.difference_update(fragments)
    lost = max(site.error_shares[f] for f in fragments)
    how_much = f"; {lost:.2f} of the norm of what was to be sent last is lost" if lost else ""
    site.error_commits = tuple(0 if f in fragments else at for f, at in enumerate(site.error_commits))
    site.error_shares = tuple(0.0 if f in fragments else was for f, was in enumerate(site.error_shares))
    ctx.report(logging.WARNING, f"error feedback is dropped, and begins anew: {reason}{how_much}")
