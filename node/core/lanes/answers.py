"""Which answer the workers get at a boundary. Pure functions over the site's state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.node.core.disk import Outer
from atoll.node.core.events import Answer, AnswerKind, Difference, MergeMode, Values
from atoll.node.core.lanes.lane import Lane, SnapshotPhase
from atoll.node.core.lanes.local_copy import LocalCopy
from atoll.node.core.outputs import PublishState, SeedState
from atoll.node.core.state import SiteState
from atoll.node.core.workers import Workers
from atoll.protocol.changed import run_length
from atoll.protocol.messages import Open
from atoll.protocol.settings import RunSettings

EARLY = 0.1
"""Of a window: so much before the others a site that was late once plans to be ready."""
LOOK_AGAIN = 1 / 16
"""Of the time since the snapshot was sealed: when the ranks ask again for an update that is later than expected."""

LOOK_IN_A_WINDOW_S = 1.0
"""Where the nodes do the steps, and sites some by themselves: so often the ranks ask whether a commit without this site
has come, which voids their window. Every second of it that they train on they are later for the next one."""
LOOK_WHILE_RESTING = 1 / 8
"""Of a window: when the ranks of a site that rests ask again whether its turn has come."""
MOST_RESTED = 3
"""Windows that the ranks of a site that rests train without a commit. The run may stand still, and what is beyond
`sync.max_weight_ratio` (16) times the pace of others does not count; a site may be faster than they are by itself."""


@dataclass(frozen=True, slots=True)
class Hold:
    """No answer yet, and why."""

    reason: str


Decision = Answer | Hold | PublishState
"""PUBLISH must hold something first, or what to answer."""


def merge_mode(copy: LocalCopy, step: int, *, final: bool, mixes: bool) -> MergeMode:
    """How the local copy takes the newest commit."""
    if copy.version is None or copy.is_discarded or final:
        return MergeMode.REPLACE
    if copy.contributed is not None and mixes:
        return MergeMode.MIX
    if copy.contributed is not None:
        return MergeMode.REPLACE if step == copy.contributed else MergeMode.MERGE
    return MergeMode.REPLACE if step == copy.base_step else MergeMode.SHIFT


def rests(site: SiteState, open_: Open, *, away: bool) -> bool:
    """Whether the site sits that sync out: its ranks train on, and take commits by a difference, also while the site is
    behind. Not without a coordinator, which may have given its turn to it meanwhile."""
    return not away and site.site_id in open_.resting


def steps_until_the_others(site: SiteState, open_: Open, now: float) -> int:
    """For a site that missed a sync: so many steps, beyond those it was to do, until the others are ready again.

    Sealing at once would leave its workers idle until then. But if it was ready a little too late, it is sealed again
    at once: then it is in the next sync for certain.
    """
    step_s = site.workers.step_s
    if site.window_s is None or not step_s or site.workers.sealed_in_vain:
        return 0
    left_s = site.opened_at + (1 - EARLY) * site.window_s - now
    return min(max(0, int(left_s / step_s)), open_.num_steps)


def steps_until_update(workers: Workers, lane: Lane, now: float) -> int:
    """After so many steps the ranks ask whether the update is there: at least one. The expectation is the least that
    the last updates took, from the sealed snapshot to the commit that is applied."""
    step_s, snapshot = workers.step_s, lane.snapshot
    if not snapshot.is_sealed or not step_s:
        return 1  # it is there, and being written for the ranks; or nothing is known of their steps
    since_s = now - snapshot.sealed_at
    left_s = max(min(lane.update_s, default=0.0) - since_s, LOOK_AGAIN * since_s)
    return max(1, math.ceil(left_s / step_s))


def decide(site: SiteState, settings: RunSettings, *, away: bool, now: float) -> Decision:
    """The answer to `site.workers.ask`, which must be there. `away`: the coordinator has been gone for a lease."""
    assert site.workers.ask is not None
    step = site.workers.ask.step
    if any(copy.offered is not None for copy in site.workers.copies):
        return Hold("other ranks have not taken the last version yet")
    open_ = next_sync(site, site.disk.outer, away=away) if site.disk.outer is not None else None
    decision = _decide(site, settings, open_, step, now, away=away)
    if isinstance(decision, Hold):
        decision = _train_on(site, settings, open_, step, now, away=away) or decision
    goes_on = isinstance(decision, Answer) and decision.kind is not AnswerKind.APPLY
    return _with_values(site, decision) if goes_on and site.disk.has_let_go else decision


def _with_values(site: SiteState, decision: Decision) -> Decision:
    """Ranks that would go on from the values that they have, or end with them, which PUBLISH does not give them any
    more: a script may look at them after its last step."""
    disk, has_any = site.disk, any(copy.version is not None for copy in site.workers.copies)
    if not has_any:
        return decision
    if disk.outer is None or disk.running is not None or disk.has_moved:
        return Hold("what they read is being replaced")
    return PublishState(Values(disk.outer.commit, 0))


def next_sync(site: SiteState, outer: Outer, *, away: bool) -> Open | None:
    """The sync for which the ranks train: of those that are open on the state that is held, and whose snapshot can be
    written, the one of the newest window; else of those that the site sits out; else of those that are sealed by ranks
    before these, or over. What follows an abandoned sync has a new number and the old window."""
    opened = [lane.open for lane in site.lanes if lane.open is not None and lane not in site.in_flight]
    resting = [x for x in opened if rests(site, x, away=away)]
    held = [x for x in opened if x not in resting and outer.has_base(x.fragment, x.base_commit)]
    over = {commit.sync for commit in site.commits.values()}
    free = [x for x in held if x.sync not in over and not site.lanes[x.fragment].snapshot.is_sealed]
    return max(free or resting or held, key=lambda x: (x.run_step, x.sync), default=None)


def _target(site: SiteState, open_: Open, step: int, *, away: bool) -> int:
    """The generation step at which the ranks come to the boundary of that sync, or ask again while the site rests."""
    target = site.window_step + open_.num_steps
    if rests(site, open_, away=away) and step < site.workers.taken_step + MOST_RESTED * open_.num_steps:
        return max(target, step + math.ceil(LOOK_WHILE_RESTING * open_.num_steps))
    return target


def _train_on(
    site: SiteState, settings: RunSettings, open_: Open | None, step: int, now: float, *, away: bool
) -> Answer | None:
    """Beyond snapshots in flight, while steps are left that may be: those that overlap with the exchange of each, and,
    with the coordinator away, the overrun beyond the newest; but not beyond the next boundary. The ranks go on while
    their commit is written to PUBLISH, and are told; a difference they wait for. A site that leaves trains nothing that
    it would lose."""
    workers, outer, sync = site.workers, site.disk.outer, settings.sync
    committed = [x for x in site.lanes if x.snapshot.is_consumed and x.snapshot.generation == workers.generation]
    lanes = [*site.in_flight, *committed]
    if outer is None or not lanes:
        return None
    if any(copy.version != outer.commit and copy.contributed is None for copy in workers.copies):
        return None
    overlaps = not (site.leaving or site.disk.final)
    last_step = min(lane.snapshot.step + overlaps * _overlap_steps(site, lane, open_) for lane in lanes)
    newest_step = max(lane.snapshot.step for lane in lanes)
    if away and not committed:
        last_step = max(last_step, newest_step + settings.most_overrun_steps)
    if open_ is not None:
        last_step = min(last_step, _target(site, open_, step, away=away))
    elif not away:
        last_step = min(last_step, newest_step + sync.every // sync.fragments)
    if step >= last_step:
        return None
    next_step = min(last_step, step + min(steps_until_update(workers, lane, now) for lane in lanes))
    return Answer(kind=AnswerKind.CONTINUE, next_step=next_step, version=outer.commit if committed else 0)


def _overlap_steps(site: SiteState, lane: Lane, open_: Open | None) -> int:
    """Beyond the lane's snapshot, with those for an older window that is open: its sync may lack its quorum for as long
    as the site is not ready for that one."""
    for_older = open_.num_steps if open_ is not None and lane in site.sealed_beyond(open_) else 0
    return lane.snapshot.overlap_steps + for_older


def _next_question(workers: Workers, settings: RunSettings, step: int, target: int) -> int:
    """The step at which the ranks ask again on their way to the boundary."""
    if not settings.sync.steps_at_nodes or not workers.step_s:
        return target
    return min(target, step + max(1, math.ceil(LOOK_IN_A_WINDOW_S / workers.step_s)))


def _decide(
    site: SiteState, settings: RunSettings, open_: Open | None, step: int, now: float, *, away: bool
) -> Decision:
    disk, outer, workers = site.disk, site.disk.outer, site.workers
    if outer is None:
        whole = site.lanes[-1]
        if site.seeding and disk.find(SeedState) is None and whole.snapshot.phase is SnapshotPhase.FREE:
            return Answer(kind=AnswerKind.SNAPSHOT, fragment=whole.fragment)
        return Hold("waiting for the starting state")
    if all(copy.version == outer.commit for copy in workers.copies):
        if disk.final:
            return Answer(kind=AnswerKind.STOP, reason="the run is complete", run_over=True)
        if site.leaving and step == site.window_step and not site.in_flight:
            return Answer(kind=AnswerKind.STOP, reason=site.leaving)
    stale = [f for f, copy in enumerate(workers.copies) if copy.version != outer.commit or copy.is_discarded]
    if stale:
        return _apply(site, settings, stale, open_, step, now)
    if open_ is None:
        return Hold("waiting for the coordinator to open the next sync")
    target = _target(site, open_, step, away=away)
    if step < target:
        if site.in_flight:
            return Hold("it is not due yet")
        return Answer(kind=AnswerKind.CONTINUE, next_step=_next_question(workers, settings, step, target))
    if rests(site, open_, away=away):  # a snapshot would keep these steps out of the sync in which its turn comes
        return Hold("the site rests, and its workers have trained as far as may count")
    of_all = len(workers.copies)
    in_the_way = (lane for lane in site.lanes if of_all in (open_.fragment, lane.fragment) or lane.open is open_)
    if any(lane.snapshot.is_sealed for lane in in_the_way):
        return Hold("waiting for the commit")
    return Answer(kind=AnswerKind.SNAPSHOT, fragment=open_.fragment)


def _apply(  # noqa: PLR0917
    site: SiteState, settings: RunSettings, stale: Sequence[int], open_: Open | None, step: int, now: float
) -> Decision:
    """The workers take the newest commit into the first of these fragments, and ask again for the others. `open_`: the
    sync that they train for."""
    disk, outer, workers, fragment = site.disk, site.disk.outer, site.workers, stale[0]
    assert outer is not None
    copy = workers.copies[fragment]
    mode = merge_mode(copy, step, final=disk.final, mixes=settings.sync.merge == "mix")
    # What PUBLISH holds for it: all but SHIFT read the same bytes.
    is_shift = mode is MergeMode.SHIFT
    content = Difference(copy.taken, outer.commit, fragment) if is_shift else Values(outer.commit, fragment)
    # A difference that is written is handed out whatever was heard meanwhile: the next one starts from values only.
    if not (open_ or site.in_flight or disk.final or (is_shift and disk.published == content)):
        return Hold("waiting for the coordinator to open the next sync")
    if disk.running is not None:
        return Hold("the disk is at work")
    if disk.published != content:
        return PublishState(content) if not disk.has_moved else Hold("the disk is between two commits")
    next_step = step
    if open_ is not None and not site.in_flight and not disk.final and not site.leaving and len(stale) == 1:
        counts_from = step if mode is MergeMode.REPLACE else site.window_step
        next_step = _next_question(workers, settings, step, max(step, counts_from + open_.num_steps))
        if is_shift and next_step == step:
            next_step += steps_until_the_others(site, open_, now)
    sites = sorted({*site.contributors, site.site_id})
    return Answer(
        kind=AnswerKind.APPLY,
        fragment=fragment,
        version=outer.commit,
        mode=mode,
        next_step=next_step,
        run_step=outer.run_step,
        run_tokens=outer.run_tokens,
        run_length=run_length(settings, site.changed_json),
        site_index=sites.index(site.site_id),
        num_sites=len(sites) if site.contributors else 0,
        fresh=all(copy.version is None for copy in workers.copies),
        data_epoch=site.data.epoch,
    )


def in_sync(site: SiteState) -> bool:
    """Leaving now would lose work that others may already count on."""
    return site.disk.applying is not None or any(lane.snapshot.is_sealed for lane in site.lanes)
