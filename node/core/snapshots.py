"""SNAPSHOT's life: the ranks write what they trained, it is sealed, a commit holds it, and they take that commit."""

from __future__ import annotations

from dataclasses import replace

from atoll.node.core import endings, leases
from atoll.node.core.context import Context
from atoll.node.core.disk import IllegalStep
from atoll.node.core.events import BoundaryAsked, SnapshotSealed
from atoll.node.core.state import Snapshot, SnapshotPhase, SnapshotStep
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Commit
from atoll.protocol.ranges import union

TRANSITIONS = {
    (SnapshotPhase.FREE, SnapshotStep.WRITE): SnapshotPhase.WRITING,
    (SnapshotPhase.WRITING, SnapshotStep.SEAL): SnapshotPhase.SEALED,
    (SnapshotPhase.SEALED, SnapshotStep.CONSUME): SnapshotPhase.CONSUMED,
    **{(phase, SnapshotStep.FREE): SnapshotPhase.FREE for phase in SnapshotPhase},
}
MAX_EMPTY_IN_A_ROW = 3
"""Windows without a token, of a site that the run cannot do without."""


def _step(ctx: Context, step: SnapshotStep) -> SnapshotPhase:
    """The phase that follows. Raises IllegalStep, with the steps before, and changes nothing."""
    site, phase = ctx.site, ctx.site.snapshot.phase
    then = TRANSITIONS.get((phase, step))
    if then is None:
        story = "; ".join(site.snapshot_story) or "nothing happened before"
        raise IllegalStep(f"the snapshot {step.value} while it is {phase.value}: {story}")
    site.snapshot_story.append(step.value)
    return then


def write(ctx: Context, ask: BoundaryAsked) -> None:
    """The ranks are told to, at this boundary."""
    outer = ctx.site.disk.outer
    ctx.site.snapshot = Snapshot(
        phase=_step(ctx, SnapshotStep.WRITE),
        base_commit=outer.commit if outer is not None else 0,
        step=ask.step,
        generation=ask.generation,
    )


def seal(ctx: Context, event: SnapshotSealed) -> None:
    """Requires that the ranks write it, and that `leases.sealed` has taken what they used."""
    data = ctx.site.data
    if event.tokens:
        ctx.site.num_empty_in_a_row = 0
    ctx.site.snapshot = replace(
        ctx.site.snapshot,
        phase=_step(ctx, SnapshotStep.SEAL),
        report=event,
        ranges=union(data.between(data.first, data.used)),
        data_epoch=data.epoch,
    )


def note_contribution(ctx: Context, commit: Commit) -> None:
    """Whether the sealed snapshot is in that commit, however the site comes to its state."""
    snapshot = ctx.site.snapshot
    me = (ctx.site.site_id, ctx.identity.incarnation)
    contributors = [(c.site_id, c.incarnation) for c in commit.contributors]
    if snapshot.is_sealed and snapshot.base_commit == commit.commit - 1 and me in contributors:
        ctx.site.snapshot = replace(snapshot, committed_in=commit.commit)


def consume(ctx: Context) -> None:
    """The sealed snapshot is in the outer state now: what the ranks trained until it must not be sent again."""
    site, snapshot, workers = ctx.site, ctx.site.snapshot, ctx.site.workers
    phase = _step(ctx, SnapshotStep.CONSUME)
    leases.committed(ctx, snapshot)
    workers.consumed(is_theirs=snapshot.generation == workers.generation)
    site.snapshot = replace(snapshot, phase=phase) if workers.contributed else Snapshot()


def free(ctx: Context) -> None:
    """What it holds counts no longer, or the ranks have taken the commit that holds it."""
    ctx.site.snapshot = Snapshot(phase=_step(ctx, SnapshotStep.FREE))


def release_empty(ctx: Context) -> bool:
    """Too few sites had tokens: ranks whose snapshot has none train another window, for it would fail the next sync as
    well. False: that was so too often, the site ends."""
    site, snapshot = ctx.site, ctx.site.snapshot
    if not snapshot.is_sealed or snapshot.tokens:
        return True
    free(ctx)
    if snapshot.generation == site.workers.generation:
        site.workers.release(snapshot.step)
    site.num_empty_in_a_row += 1
    if site.num_empty_in_a_row < MAX_EMPTY_IN_A_ROW:
        return True
    text = (
        f"{site.num_empty_in_a_row} windows in a row had no tokens, and the run has too few sites without this one: "
        "give site.step(..., tokens=...) the number of tokens that the rank's own batch held"
    )
    endings.give_up(ctx, text, ConfigError.exit_code)
    return False


def is_committed_after(ctx: Context, last: int) -> bool:
    """Whether a commit after `last` holds it."""
    snapshot = ctx.site.snapshot
    return snapshot.is_sealed and snapshot.committed_in is not None and snapshot.committed_in > last
