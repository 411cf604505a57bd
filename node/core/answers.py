"""Which answer the workers get at a boundary. One pure function over the site's state."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.node.core.events import Answer, AnswerKind, Content, Difference, MergeMode, Values
from atoll.node.core.outputs import PublishState, SeedState
from atoll.node.core.state import SiteState, SnapshotPhase

EARLY = 0.1
"""Of a window: so much before the others a site that was late once plans to be ready."""


@dataclass(frozen=True, slots=True)
class Hold:
    """No answer yet, and why."""

    reason: str


Decision = Answer | Hold | PublishState
"""PUBLISH must hold something first, or what to answer."""


def merge_mode(site: SiteState, step: int) -> MergeMode:
    """How the local copy takes the newest commit."""
    workers, snapshot = site.workers, site.snapshot
    if workers.version is None or workers.discard_local or site.disk.final:
        return MergeMode.REPLACE
    if workers.contributed:
        return MergeMode.REPLACE if step == snapshot.step else MergeMode.MERGE
    return MergeMode.REPLACE if step == workers.base_step else MergeMode.SHIFT


def target_step(site: SiteState, base_step: int) -> int:
    """The generation step of the next boundary."""
    return base_step + (site.open.num_steps if site.open is not None else 0)


def steps_until_the_others(site: SiteState, now: float) -> int:
    """For a site that missed a sync: so many steps, beyond those it was to do, until the others are ready again.

    Sealing at once would leave its workers idle until then. But if it was ready a little too late, it is sealed again
    at once: then it is in the next sync for certain.
    """
    workers = site.workers
    if site.open is None or site.window_s is None or not workers.step_s or workers.sealed_in_vain:
        return 0
    left_s = site.opened_at + (1 - EARLY) * site.window_s - now
    return min(max(0, int(left_s / workers.step_s)), site.open.num_steps)


def decide(site: SiteState, *, away: bool, now: float) -> Decision:
    """The answer to `site.workers.ask`, which must be there. `away`: the coordinator has been gone for a lease."""
    workers, disk, outer = site.workers, site.disk, site.disk.outer
    ask = workers.ask
    assert ask is not None
    if workers.offered is not None:
        return Hold("other ranks have not taken the last version yet")
    if outer is None:
        if site.seeding and disk.find(SeedState) is None and site.snapshot.phase is SnapshotPhase.FREE:
            return Answer(kind=AnswerKind.SNAPSHOT)
        return Hold("waiting for the starting state")
    if workers.version == outer.commit and disk.final:
        return Answer(kind=AnswerKind.STOP, reason="the run is complete")
    if workers.version == outer.commit and site.leaving and ask.step == workers.base_step:
        return Answer(kind=AnswerKind.STOP, reason=site.leaving)
    if workers.version != outer.commit or workers.discard_local:
        return _apply(site, ask.step, now)
    if site.snapshot.is_sealed:
        if away and workers.overrun_left > 0:
            return Answer(kind=AnswerKind.CONTINUE, next_step=ask.step + 1)
        return Hold("waiting for the commit")
    if site.open is None or site.open.base_commit != outer.commit:
        return Hold("waiting for the coordinator to open the next sync")
    target = target_step(site, max(workers.base_step, workers.released_step))
    if ask.step < target:
        return Answer(kind=AnswerKind.CONTINUE, next_step=target)
    return Answer(kind=AnswerKind.SNAPSHOT, fragment=site.open.fragment)


def _apply(site: SiteState, step: int, now: float) -> Decision:
    workers, disk, outer = site.workers, site.disk, site.disk.outer
    assert outer is not None
    mode = merge_mode(site, step)
    content = _content(site, mode)
    is_open = disk.final or (site.open is not None and site.open.base_commit == outer.commit)
    # A difference that is written is handed out whatever was heard meanwhile: the next one starts from values only.
    if not is_open and not (isinstance(content, Difference) and disk.published == content):
        return Hold("waiting for the coordinator to open the next sync")
    if disk.running is not None:
        return Hold("the disk is at work")
    if disk.published != content:
        return PublishState(content) if not disk.has_moved else Hold("the disk is between two commits")
    before = max(workers.base_step, workers.released_step)
    base_step = mode.base(before=before, snapshot=site.snapshot.step, now=step)
    target = target_step(site, base_step) if is_open else step
    if is_open and mode is MergeMode.SHIFT and step >= target:
        target = step + steps_until_the_others(site, now)
    return Answer(
        kind=AnswerKind.APPLY,
        version=outer.commit,
        mode=mode,
        next_step=step if disk.final or site.leaving else max(step, target),
        run_step=outer.run_step,
        run_tokens=outer.run_tokens,
        fresh=workers.version is None,
        data_epoch=site.data.epoch,
    )


def _content(site: SiteState, mode: MergeMode) -> Content:
    """What PUBLISH holds for a merge with the outer state as it is. REPLACE and MERGE read the same bytes."""
    outer, base = site.disk.outer, site.workers.version
    assert outer is not None
    if mode is not MergeMode.SHIFT:
        return Values(outer.commit)
    assert base is not None, "what has no base yet is replaced"
    return Difference(base, outer.commit)


def in_sync(site: SiteState) -> bool:
    """Leaving now would lose work that others may already count on."""
    return site.snapshot.is_sealed or site.disk.applying is not None
