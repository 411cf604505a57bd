"""Which answer the workers get at a boundary. Pure functions over the site's state."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from atoll.node.core.events import Answer, AnswerKind, Content, Difference, MergeMode, Values
from atoll.node.core.lanes.lane import Lane, SnapshotPhase
from atoll.node.core.outputs import PublishState, SeedState
from atoll.node.core.state import SiteState
from atoll.protocol.settings import RunSettings

EARLY = 0.1
"""Of a window: so much before the others a site that was late once plans to be ready."""
LOOK_AGAIN = 1 / 16
"""Of the time since the snapshot was sealed: when the ranks ask again for an update that is later than expected."""


@dataclass(frozen=True, slots=True)
class Hold:
    """No answer yet, and why."""

    reason: str


Decision = Answer | Hold | PublishState
"""PUBLISH must hold something first, or what to answer."""


def merge_mode(site: SiteState, lane: Lane, step: int, *, mixes: bool) -> MergeMode:
    """How the local copy takes the newest commit."""
    local, snapshot = lane.local, lane.snapshot
    if local.version is None or local.is_discarded or site.disk.final:
        return MergeMode.REPLACE
    if local.contributed and mixes:
        return MergeMode.MIX
    if local.contributed:
        return MergeMode.REPLACE if step == snapshot.step else MergeMode.MERGE
    return MergeMode.REPLACE if step == local.base_step else MergeMode.SHIFT


def target_step(lane: Lane, base_step: int) -> int:
    """The generation step of the next boundary."""
    return base_step + (lane.open.num_steps if lane.open is not None else 0)


def steps_until_the_others(site: SiteState, lane: Lane, now: float) -> int:
    """For a site that missed a sync: so many steps, beyond those it was to do, until the others are ready again.

    Sealing at once would leave its workers idle until then. But if it was ready a little too late, it is sealed again
    at once: then it is in the next sync for certain.
    """
    step_s = site.workers.step_s
    if lane.open is None or site.window_s is None or not step_s or lane.local.sealed_in_vain:
        return 0
    left_s = site.opened_at + (1 - EARLY) * site.window_s - now
    return min(max(0, int(left_s / step_s)), lane.open.num_steps)


def steps_until_update(site: SiteState, lane: Lane, now: float) -> int:
    """After so many steps the ranks ask whether the update is there: at least one. The expectation is the least that
    the last updates took, from the sealed snapshot to the commit that is applied."""
    step_s, snapshot = site.workers.step_s, lane.snapshot
    if not snapshot.is_sealed or not step_s:
        return 1  # it is there, and being written for the ranks; or nothing is known of their steps
    since_s = now - snapshot.sealed_at
    left_s = max(min(lane.update_s, default=0.0) - since_s, LOOK_AGAIN * since_s)
    return max(1, math.ceil(left_s / step_s))


def decide(site: SiteState, settings: RunSettings, *, away: bool, now: float) -> Decision:
    """The answer to `site.workers.ask`, which must be there. `away`: the coordinator has been gone for a lease."""
    assert site.workers.ask is not None
    step = site.workers.ask.step
    if any(lane.local.offered is not None for lane in site.lanes):
        return Hold("other ranks have not taken the last version yet")
    overrun_steps = (settings.overrun_steps or settings.sync.every) if away else 0
    found = []
    for lane in site.lanes:
        decision = _of_lane(site, lane, step, now, mixes=settings.sync.merge == "mix")
        if isinstance(decision, Hold):
            decision = _train_on(site, lane, step, now, overrun_steps) or decision
        found.append(decision)
    return most_urgent(found)


def most_urgent(decisions: Iterable[Decision]) -> Decision:
    """Of all lanes: what one of them needs at this step; else why one holds the ranks back; else the next step at
    which one of them needs something. The ranks stop when all lanes stop."""

    def place(decision: Decision) -> tuple[int, int]:
        if isinstance(decision, Hold):
            return 1, 0
        if isinstance(decision, PublishState) or decision.kind in (AnswerKind.SNAPSHOT, AnswerKind.APPLY):
            return 0, 0
        return (2, decision.next_step) if decision.kind is AnswerKind.CONTINUE else (3, 0)

    return min(decisions, key=place)


def _train_on(site: SiteState, lane: Lane, step: int, now: float, overrun_steps: int) -> Answer | None:
    """Beyond the snapshot, while steps are left that may be: those that overlap with the exchange, and, with the
    coordinator away, the overrun. The ranks go on while their commit is written to PUBLISH, and are told. A site that
    leaves trains nothing that it would lose."""
    snapshot, outer = lane.snapshot, site.disk.outer
    if outer is None or snapshot.generation != site.workers.generation:
        return None
    base, is_here = lane.base_at(outer.commit), snapshot.phase is SnapshotPhase.CONSUMED
    if not is_here and not (snapshot.is_sealed and lane.local.version == base):
        return None
    overlap_steps = 0 if site.leaving or site.disk.final else snapshot.overlap_steps
    last_step = snapshot.step + max(overlap_steps, 0 if is_here else overrun_steps)
    if step >= last_step:
        return None
    next_step = min(last_step, step + steps_until_update(site, lane, now))
    return Answer(kind=AnswerKind.CONTINUE, next_step=next_step, version=base if is_here else 0)


def _of_lane(site: SiteState, lane: Lane, step: int, now: float, *, mixes: bool) -> Decision:
    disk, outer, local, open_ = site.disk, site.disk.outer, lane.local, lane.open
    if outer is None:
        if site.seeding and disk.find(SeedState) is None and lane.snapshot.phase is SnapshotPhase.FREE:
            return Answer(kind=AnswerKind.SNAPSHOT, fragment=lane.fragment)
        return Hold("waiting for the starting state")
    base = lane.base_at(outer.commit)
    if local.version == base and disk.final:
        return Answer(kind=AnswerKind.STOP, reason="the run is complete")
    if local.version == base and site.leaving and step == local.base_step:
        return Answer(kind=AnswerKind.STOP, reason=site.leaving)
    is_open = open_ is not None and open_.base_commit == base
    if local.version != base or local.is_discarded:
        return _apply(site, lane, step, now, base=base, is_open=is_open, mixes=mixes)
    if lane.snapshot.is_sealed:
        return Hold("waiting for the commit")
    if not is_open:
        return Hold("waiting for the coordinator to open the next sync")
    target = target_step(lane, local.counts_from)
    if step < target:
        return Answer(kind=AnswerKind.CONTINUE, next_step=target)
    return Answer(kind=AnswerKind.SNAPSHOT, fragment=lane.fragment)


def _apply(site: SiteState, lane: Lane, step: int, now: float, *, base: int, is_open: bool, mixes: bool) -> Decision:
    """The workers take commit `base`. `is_open`: the sync on it is."""
    disk, outer, local = site.disk, site.disk.outer, lane.local
    assert outer is not None
    mode = merge_mode(site, lane, step, mixes=mixes)
    content = _content(lane, mode, base)
    # A difference that is written is handed out whatever was heard meanwhile: the next one starts from values only.
    if not is_open and not disk.final and not (isinstance(content, Difference) and disk.published == content):
        return Hold("waiting for the coordinator to open the next sync")
    if disk.running is not None:
        return Hold("the disk is at work")
    if disk.published != content:
        return PublishState(content) if not disk.has_moved else Hold("the disk is between two commits")
    base_step = mode.base(before=local.counts_from, snapshot=lane.snapshot.step, now=step)
    target = target_step(lane, base_step) if is_open else step
    if is_open and mode is MergeMode.SHIFT and step >= target:
        target = step + steps_until_the_others(site, lane, now)
    return Answer(
        kind=AnswerKind.APPLY,
        fragment=lane.fragment,
        version=base,
        mode=mode,
        next_step=step if disk.final or site.leaving else max(step, target),
        run_step=outer.run_step,
        run_tokens=outer.run_tokens,
        fresh=local.version is None,
        data_epoch=site.data.epoch,
    )


def _content(lane: Lane, mode: MergeMode, version: int) -> Content:
    """What PUBLISH holds for a merge with this version. All but SHIFT read the same bytes."""
    if mode is not MergeMode.SHIFT:
        return Values(version)
    assert lane.local.version is not None, "what has no base yet is replaced"
    return Difference(lane.local.version, version)


def in_sync(site: SiteState) -> bool:
    """Leaving now would lose work that others may already count on."""
    return site.disk.applying is not None or any(lane.snapshot.is_sealed for lane in site.lanes)
