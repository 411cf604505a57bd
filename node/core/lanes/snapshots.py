"""SNAPSHOT's life: the ranks write what they trained, it is sealed, a commit holds it, and they take that commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from atoll.node.core import endings, errors, leases
from atoll.node.core.context import Context
from atoll.node.core.disk import IllegalStep, Outer
from atoll.node.core.events import BoundaryAsked, ContributionsKept, SnapshotArrived, SnapshotSealed
from atoll.node.core.lanes.lane import Lane, Snapshot, SnapshotPhase, SnapshotStep
from atoll.node.core.lanes.local_copy import LocalCopy
from atoll.node.core.outputs import KeepContributions
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Commit, Open
from atoll.protocol.ranges import union
from atoll.protocol.sync_settings import LEASED_STEPS

TRANSITIONS = {
    (SnapshotPhase.FREE, SnapshotStep.WRITE): SnapshotPhase.WRITING,
    (SnapshotPhase.WRITING, SnapshotStep.SEAL): SnapshotPhase.SEALED,
    (SnapshotPhase.SEALED, SnapshotStep.CONSUME): SnapshotPhase.CONSUMED,
    **{(phase, SnapshotStep.FREE): SnapshotPhase.FREE for phase in SnapshotPhase},
}
MAX_EMPTY_IN_A_ROW = 3
"""Windows without a token, of a site that the run cannot do without."""


def _step(lane: Lane, step: SnapshotStep) -> SnapshotPhase:
    """The phase that follows. Raises IllegalStep, with the steps before, and changes nothing."""
    phase = lane.snapshot.phase
    then = TRANSITIONS.get((phase, step))
    if then is None:
        story = "; ".join(lane.story) or "nothing happened before"
        raise IllegalStep(f"the snapshot {step.value} while it is {phase.value}: {story}")
    lane.story.append(step.value)
    return then


def write(ctx: Context, lane: Lane, ask: BoundaryAsked) -> None:
    """The ranks are told to, at this boundary. Steps for an older window count for no overlap of a newer one."""
    site, outer = ctx.site, ctx.site.disk.outer
    for newer in site.sealed_beyond(lane.open) if lane.open is not None else ():
        overlap_steps = newer.snapshot.overlap_steps + ask.step - site.window_step
        newer.snapshot = replace(newer.snapshot, overlap_steps=overlap_steps)
    lane.snapshot = Snapshot(
        phase=_step(lane, SnapshotStep.WRITE),
        base_commit=outer.commit if outer is not None else 0,
        step=ask.step,
        seq=ask.seq,
        generation=ask.generation,
        overlap_steps=lane.open.overlap_steps if lane.open is not None else 0,
        others=union(*(other.snapshot.ranges for other in site.lanes if other.snapshot.is_sealed)),
    )


def seal(ctx: Context, lane: Lane, event: SnapshotSealed) -> None:
    """Requires that the ranks write it, and that `leases.sealed` has taken what they used."""
    data = ctx.site.data
    if event.tokens:
        ctx.site.num_empty_in_a_row = 0
    lane.snapshot = replace(
        lane.snapshot,
        phase=_step(lane, SnapshotStep.SEAL),
        report=event,
        ranges=leases.trained_on(ctx, lane.snapshot),
        data_epoch=data.epoch,
        sealed_at=ctx.now,
        is_arriving=event.is_arriving,
        error_commits=errors.sealed_with(ctx, lane.snapshot.base_commit),
    )


def arrive(ctx: Context, event: SnapshotArrived) -> Lane | None:
    """The lane whose snapshot is whole now; None if it was given up meanwhile."""
    lane = ctx.site.lanes[event.fragment]
    snapshot, arrived = lane.snapshot, (event.generation, event.step, event.seq)
    if not snapshot.is_arriving or (snapshot.generation, snapshot.step, snapshot.seq) != arrived:
        return None
    lane.snapshot = replace(snapshot, is_arriving=False)
    return lane


def keep(ctx: Context, lane: Lane) -> None:
    """With audits: what is to be contributed to the open sync is encoded, before the site is ready for it."""
    open_ = _sealed_for(ctx, lane)
    if open_ is None or not _is_to_be_kept(ctx, lane) or lane.snapshot.kept_for == open_.sync:
        return
    lane.snapshot = replace(lane.snapshot, kept_for=open_.sync, root=b"", signature=None)
    ctx.emit(KeepContributions(open_.sync, lane.fragment, open_.base_commit, lane.snapshot.error_commits))


def kept(ctx: Context, event: ContributionsKept) -> Lane:
    """What was encoded counts if it is of the snapshot that is sealed now; without a base it is of none that is."""
    lane = ctx.site.lanes[event.fragment]
    if lane.snapshot.is_sealed and lane.snapshot.kept_for == event.sync:
        lane.snapshot = replace(lane.snapshot, root=event.root, signature=event.signature)
    return lane


def _is_to_be_kept(ctx: Context, lane: Lane) -> bool:
    """Without tokens nothing is contributed."""
    return ctx.settings.sync.audits > 0 and lane.snapshot.tokens > 0


def ready_for(ctx: Context, lane: Lane) -> Open | None:
    """The open sync, if there is a snapshot for it, sealed and whole, and with audits kept."""
    open_, snapshot = _sealed_for(ctx, lane), lane.snapshot
    if open_ is not None and _is_to_be_kept(ctx, lane) and (snapshot.kept_for != open_.sync or not snapshot.root):
        return None
    return open_


def _sealed_for(ctx: Context, lane: Lane) -> Open | None:
    """The open sync, if there is a snapshot for it, sealed and whole: of the fragment as it was when the sync was
    opened."""
    outer, open_ = ctx.site.disk.outer, lane.open
    snapshot = lane.snapshot
    if not snapshot.is_sealed or snapshot.is_arriving or snapshot.is_lost or outer is None or open_ is None:
        return None
    return open_ if outer.has_base(lane.fragment, open_.base_commit) else None


def note_contribution(ctx: Context, commit: Commit) -> None:
    """Whether the sealed snapshot is in that commit, however the site comes to its state. A commit of the sync
    for which this site had sent what it then discarded may hold that, and holds nothing that was sealed since."""
    errors.note_contribution(ctx, commit)
    lane = ctx.site.lanes[commit.fragment]
    if commit.sync == lane.discarded_sync:
        return
    snapshot = lane.snapshot
    me = (ctx.site.site_id, ctx.identity.incarnation)
    contributors = [(c.site_id, c.incarnation) for c in commit.contributors]
    if snapshot.is_sealed and snapshot.base_commit < commit.commit and me in contributors:
        lane.snapshot = replace(snapshot, committed_in=commit.commit)
        if snapshot.committed_in != commit.commit:
            errors.advance(ctx, lane, commit.commit)


def consume(ctx: Context, lane: Lane) -> None:
    """The sealed snapshot is in the outer state now: what the ranks trained until it must not be sent again."""
    snapshot, workers = lane.snapshot, ctx.site.workers
    phase = _step(lane, SnapshotStep.CONSUME)
    errors.check(ctx, lane)
    lane.update_s.append(ctx.now - snapshot.sealed_at)
    leases.committed(ctx, snapshot)
    copies: Sequence[LocalCopy] = ()
    if snapshot.generation == workers.generation:
        copies = workers.copies_of(lane.fragment)
        workers.count_from(snapshot.step)
    for copy in copies:
        copy.consumed(snapshot.step)
    lane.snapshot = replace(snapshot, phase=phase) if is_to_be_merged(copies) else Snapshot()


def is_to_be_merged(copies: Iterable[LocalCopy]) -> bool:
    """A commit holds a snapshot, and the ranks have not taken it into all of these."""
    return any(copy.contributed is not None for copy in copies)


def free(lane: Lane) -> None:
    """What it holds counts no longer, or the ranks have taken the commit that holds it."""
    lane.snapshot = Snapshot(phase=_step(lane, SnapshotStep.FREE))


def lose(lane: Lane, *, is_sent: bool) -> None:
    """A host is gone with its part. What may be sent, or is in a commit, stays until another attempt is made."""
    snapshot = lane.snapshot
    if not snapshot.is_sealed:
        return
    if is_sent or snapshot.is_lost or snapshot.committed_in is not None:
        lane.snapshot = replace(snapshot, is_lost=True)
    else:
        free(lane)


def free_lost(lane: Lane) -> None:
    """No commit will hold a snapshot of which a host had gone with its part."""
    if lane.snapshot.is_sealed and lane.snapshot.is_lost:
        free(lane)


def is_outdated(lane: Lane, outer: Outer) -> bool:
    """Whether its snapshot was taken before the last commit of its fragment that is held."""
    return outer.touch(lane.fragment) > lane.snapshot.base_commit


def settle(ctx: Context, lane: Lane, outer: Outer) -> bool:
    """The site holds that state. A sealed snapshot that is in it is consumed, and stays where no commit has touched its
    fragment since. One that a later commit holds stays too: nobody may have that commit any more, then the run goes
    back. Any other has another base than the next sync of its fragment, and is given up; whether it was."""
    snapshot = lane.snapshot
    if not snapshot.is_sealed or not is_outdated(lane, outer) or is_committed_after(lane, outer.commit):
        return False
    if snapshot.committed_in is not None:
        consume(ctx, lane)
    else:
        free(lane)
    return snapshot.committed_in is None


def holds_nothing(ctx: Context) -> bool:
    """Whether a snapshot is sealed that has no tokens: where the nodes do the steps it is no gradient."""
    return any(lane.snapshot.is_sealed and not lane.snapshot.tokens for lane in ctx.site.lanes)


def drop_late(ctx: Context, *, is_empty: bool) -> None:
    """Where the nodes do the steps: a gradient that no commit holds, or that is being computed while one is applied, is
    of values that are gone. It counts no longer, and its samples are drawn again, unless they held no tokens
    (`is_empty`): else the site would draw them for ever. The next commit that holds the site lists those."""
    site = ctx.site
    late = [copy for copy in site.workers.copies if copy.contributed is None]
    if not ctx.settings.sync.steps_at_nodes or not late:
        return
    for lane in site.lanes:
        if lane.snapshot.phase is SnapshotPhase.WRITING:
            free(lane)
    for copy in late:
        copy.discard()
    if not is_empty:
        leases.discarded(ctx)


def release_empty(ctx: Context, lane: Lane) -> bool:
    """Too few sites had tokens: ranks whose snapshot has none train another window, for it would fail the next sync as
    well. False: that was so too often, the site ends."""
    site, snapshot = ctx.site, lane.snapshot
    if not snapshot.is_sealed or snapshot.tokens:
        return True
    free(lane)
    if snapshot.generation == site.workers.generation:
        site.workers.count_from(snapshot.step)
    site.num_empty_in_a_row += 1
    sync, most = ctx.settings.sync, MAX_EMPTY_IN_A_ROW
    if sync.steps_at_nodes:
        most = max(most, LEASED_STEPS // sync.window_steps(lane.fragment, snapshot.base_commit))
    if site.num_empty_in_a_row < most:
        return True
    text = (
        f"{site.num_empty_in_a_row} windows in a row had no tokens, and the run has too few sites without this one: "
        "give site.step(..., tokens=...) the number of tokens that the rank's own batch held"
    )
    endings.give_up(ctx, text, ConfigError.exit_code)
    return False


def is_committed_after(lane: Lane, last: int) -> bool:
    """Whether a commit after `last` holds it."""
    snapshot = lane.snapshot
    return snapshot.is_sealed and snapshot.committed_in is not None and snapshot.committed_in > last
