"""Decisions for good: the run starts, a sync is opened, committed or abandoned, the run ends. Persisted, then sent."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain

from atoll.coordinator.core import logging_values
from atoll.coordinator.core.auditing import drawing_secret, judging
from atoll.coordinator.core.data import leases
from atoll.coordinator.core.events import CommitRecord, FinishedRecord, OpenRecord, PlanRecord
from atoll.coordinator.core.log import states
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site, Standing
from atoll.coordinator.core.sync import plans, same_samples, weighing
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.coordinator.core.sync.deciding import waiting_for
from atoll.coordinator.core.sync.decision import Wait
from atoll.coordinator.core.sync.exclusions import Kind
from atoll.coordinator.core.sync.resting import Committed
from atoll.coordinator.core.sync.syncs import Sync
from atoll.protocol import messages as m
from atoll.protocol.plans import weighed


def wait_for_start(run: Run) -> Wait | None:
    """None once enough sites hold an attested commit 0."""
    num_here, num_holding = len(run.members.live()), states.num_holding_commit_0(run)
    if 0 in run.log.attested and num_holding >= run.settings.min_sites:
        return None
    if num_holding or not (num_here or run.parent_json):
        return Wait(f"sites {num_holding} of {run.settings.min_sites}")
    if not run.parent_json or any(states.may_seed(run, site) for site in run.members.live()):
        return Wait("state")
    return Wait("state: a site has to bring the saved model that this run goes on from (node --from DIR)")


def start(run: Run) -> None:
    """Opens the first sync. A run that has its length from the saved model is over at once."""
    run.report(logging.INFO, f"training starts: {states.num_holding_commit_0(run)} sites hold commit 0")
    if _is_over(run, run.log.run_step, run.log.run_tokens):
        finish(run, f"the starting state is already at step {run.log.run_step}, the run's length")
        return
    open_next(run, run.members.holding(run.log.last))


def open_next(
    run: Run, at_base: Sequence[Site], before: m.RolledBack | None = None, returning: Sequence[Site] = ()
) -> None:
    """Opens a sync on the last commit, the only one, for the sites that hold it; `returning` sites will, and are waited
    for too. `before` is said first, and persisted already."""
    run.lanes.clear()
    expected = [*at_base, *(s for s in returning if s not in at_base)]
    log = run.log
    newest = log.record(log.last)
    turn = _turn(run, newest.commit.fragment) if newest is not None else 0
    window = _window(run, log.last, log.run_step, log.run_tokens, log.tokens_per_step(), turn=turn)
    following = _next(run, log.last, log.run_step, log.run_tokens, window)
    _open(run, following, expected)
    for site in at_base:
        if before is not None:
            run.send(site, before)
        run.send(site, following)


def _next(run: Run, base: int, run_step: int, run_tokens: int, window: tuple[int, int, int]) -> m.Open:
    fragment, num_steps, overlap_steps = window
    return m.Open(
        sync=run.last_sync + 1,
        fragment=fragment,
        base_commit=base,
        run_step=run_step,
        run_tokens=run_tokens,
        num_steps=num_steps,
        overlap_steps=overlap_steps,
    )


def open_beside(run: Run) -> bool:
    """Opens the next fragment's sync beside those that are open, if it is time. Whether it did.

    The contributors to the newest of these are ready, so their ranks train on; there are fewer than may be in flight;
    and what comes next is not a sync of all fragments, which is alone."""
    before, settings = max(run.lanes.values(), key=lambda sync: sync.open.run_step), run.settings.sync
    if not before.is_exchanged or len(run.lanes) >= settings.most_in_flight:
        return False
    log, steps = run.log, sum(sync.open.num_steps for sync in run.lanes.values())
    per_step = log.tokens_per_step() or 0.0
    at_base = run.members.holding(before.open.base_commit)
    reached = log.run_step + steps, log.run_tokens + math.ceil(steps * per_step), per_step
    following = _following(run, log.last, before.open, reached, at_base)
    if settings.all_fragments in (before.open.fragment, following.fragment) or not at_base:
        return False
    ahead = _open_after(run, following, at_base, before.attempts[-1])
    run.send_all(run.members.live(), following)
    if ahead is not None:
        run.send_all(at_base, ahead)
    return True


def _open_after(run: Run, following: m.Open, at_base: Sequence[Site], before: Attempt) -> m.Plan | None:
    """Its contributors train for it. The plan of the sync, in the same transaction, if one can be made by now."""
    sync = _open(run, following, at_base)
    run.stragglers.note_opening(before.ids(), run.now)
    plan = plans.make_ahead(run, sync, before) if not run.pause_reason else None
    if plan is not None:
        run.persist(PlanRecord(plan))
        sync.propose(plan, "with the opening", run.now)
    return plan


def _open(run: Run, opened: m.Open, at_base: Sequence[Site], pause_s: float = 0.0) -> Sync:
    turns = [i for i in run.resting.turns(opened.sync) if run.members.known(i).standing is Standing.MEMBER]
    expected = {s.site_id for s in at_base}.union(turns).difference(opened.resting)
    record = OpenRecord(open=opened, expected=tuple(sorted(expected)))
    run.persist(record)
    run.has_used(opened.sync)
    sync = Sync(record, run.now, earlier=run.trouble.links(opened.sync), not_before=run.now + pause_s)
    run.lanes[opened.fragment] = sync
    return sync


def _is_over(run: Run, run_step: int, run_tokens: int) -> bool:
    settings = run.changes.now
    return 0 < settings.steps <= run_step or 0 < settings.tokens <= run_tokens


def _ends(run: Run, run_step: int, run_tokens: int) -> bool:
    """As soon as a commit holds all that sites have trained."""
    return bool(run.stop_reason) or _is_over(run, run_step, run_tokens)


def is_followed(run: Run) -> bool:
    """Whether a run that is to stop has one more sync after those that are open."""
    return not all(may_be_last(run, sync.open) for sync in run.lanes.values())


def last_in_words(run: Run) -> str:
    """Which sync is the last one of a run that is to stop."""
    opened = "the sync that is open" if len(run.lanes) <= 1 else "those that are open"
    return f"{'the one after ' if is_followed(run) else ''}{opened} is the last"


def may_be_last(run: Run, opened: m.Open) -> bool:
    """Whether the run can end with the sync: it is of all fragments and sites, and nothing is trained beyond it."""
    return opened.fragment == run.settings.sync.all_fragments and not opened.overlap_steps and not opened.resting


def _turn(run: Run, fragment: int) -> int:
    """The fragment whose turn it is after that one: the first of those that follow which has no sync. After all of
    them it is 0."""
    num = run.settings.sync.fragments
    turns = ((fragment + i) % num for i in range(1, num + 1)) if fragment < num else range(num)
    return next(turn for turn in turns if turn not in run.lanes)


def _window(
    run: Run,
    base: int,
    run_step: int,
    run_tokens: int,
    tokens_per_step: float | None,
    *,
    turn: int,
    trained_steps: int = 0,
) -> tuple[int, int, int]:
    """Fragment of the next sync: the one whose `turn` it is, or all if it may be the last. Its steps: those of the
    window, or what is left of the run; where it ends, the `trained_steps` that sites may have trained beyond the sync
    before. Then how many steps they may train beyond this one: 0 if it may be the last. A length in tokens is estimated
    from the last commit."""
    settings, sync = run.changes.now, run.settings.sync
    together, longest = sync.all_fragments, sync.window_steps(sync.all_fragments, base)
    if trained_steps and _ends(run, run_step, run_tokens):
        return together, trained_steps, 0
    if settings.steps:
        left = settings.steps - run_step
    elif tokens_per_step:
        left = math.ceil((settings.tokens - run_tokens) / tokens_per_step)
    else:
        return together, longest, 0  # nobody knows yet whether it is the last
    num_steps = sync.window_steps(turn, base)
    if run.stop_reason or left <= num_steps:
        return together, max(1, min(longest, left)), 0
    return turn, num_steps, min(sync.overlap_steps, left - num_steps)


def _following(run: Run, base: int, before: m.Open, reached: tuple[int, int, float], at_base: Sequence[Site]) -> m.Open:
    """The sync whose window follows those up to the step and the tokens that are `reached`, at so many tokens a step;
    `before` is the last of these that is open, or was until now."""
    run_step, run_tokens, per_step = reached
    end = before.run_step + before.num_steps
    turn = _turn(run, before.fragment)
    while end < run_step:  # the sync of that window was committed before the one of `before`
        end += run.settings.sync.window_steps(turn, base)
        turn = _turn(run, turn)
    trained_steps = max(1, before.run_step + before.num_steps + before.overlap_steps - run_step)
    window = _window(run, base, run_step, run_tokens, per_step, turn=turn, trained_steps=trained_steps)
    following = _next(run, base, run_step, run_tokens, window)
    num_steps = following.num_steps
    if _ends(run, run_step + num_steps, run_tokens + math.ceil(num_steps * per_step)):
        return following
    return replace(following, resting=_sitting_out(run, following.sync, at_base))


def norm_in_words(run: Run, site: Site) -> str:
    """Of a site that is named."""
    if run.norms.is_zero(site.site_id):
        return (
            f"{site.label} contributed nothing but zeros again and again, with the weight of its tokens: its script "
            "trains something else than what it gave to atoll.join, or at a learning rate of 0"
        )
    sync = run.settings.sync
    what = {"clip": "is clipped", "trim": "is left out where it is among the highest", "warn": "counts in full"}.get(
        sync.robust, "counts by its distance from the others"
    )
    times = f"{run.norms.high_in_a_row(site.site_id)} times in a row"
    return f"{site.label} contributed more than {sync.clip:g} times the median norm {times}: what it sends {what}"


def commit(run: Run, sync: Sync, attempt: Attempt, payload_digest: bytes, stood_out: m.Outlier | None) -> None:
    """`payload_digest`: what every contributor that is still there reports."""
    sync.commit()
    plan = attempt.plan
    contributors = weighed(plan.contributors, attempt.weights.tokens, attempt.influences)
    run_step = run.log.run_step + plan.num_steps
    tokens = sum(attempt.weights.tokens)
    run_tokens = run.log.run_tokens + tokens
    number = run.log.next
    final = may_be_last(run, sync.open) and _ends(run, run_step, run_tokens)
    del run.lanes[plan.fragment]
    at_base = run.members.holding(plan.base_commit)
    _learn_links(run, sync, attempt)
    following: m.Open | None = None
    if not final and not run.lanes:  # else `open_beside` finds what follows
        reached = run_step, run_tokens, tokens / plan.num_steps
        following = _following(run, number, sync.open, reached, at_base)
    message = m.Commit(
        commit=number,
        sync=plan.sync,
        attempt=plan.attempt,
        term=plan.term,
        fragment=plan.fragment,
        contributors=contributors,
        payload_digest=payload_digest,
        run_step=run_step,
        run_tokens=run_tokens,
        final=final,
        branch=run.branch,
        next=following,
        done=leases.finish(run, attempt),
        error_commits=tuple(chain.from_iterable(attempt.weights.error_commits)),
        rates=attempt.weights.rates,
        changed_json=run.changes.changed_json,
        best=run.best.found,
    )
    losses = [(c.tokens, sync.losses[c.site_id]) for c in contributors if c.site_id in sync.losses]
    weight = sum(t for t, _ in losses)
    record = CommitRecord(
        commit=message,
        mean_loss=_if_finite(sum(t * x for t, x in losses) / weight) if weight else None,
        median_loss=_if_finite(statistics.median(x for _, x in losses)) if losses else None,
        cut=weighing.cut_of(run, attempt.weights, attempt.ids()),
        stood_out=stood_out,
        touched=run.log.touched(run.log.last),
        resting=sync.open.resting,
    )
    run.persist(record)
    run.persist_ledger()
    run.log.append(record)
    _note_who_may_hold_it(run, plan, number)
    run.num_abandoned_in_a_row = 0
    run.left_out.committed(message)
    ids = attempt.ids()
    for member in plan.contributors:
        contributor = run.members.known(member.site_id)
        before = contributor.record()
        is_its_start = contributor.incarnation == member.incarnation
        was_done = is_its_start and contributor.live and contributor.site_id in attempt.done
        contributor.contributes(sync.end_step if is_its_start else None, was_done=was_done)
        if was_done:
            contributor.conduct.contributed(run.now, run.limits.lease_s)
        if before != contributor.record():
            run.persist(contributor.record())
    awaited = {site.site_id for site in waiting_for(run, sync)} - sync.late - set(sync.ready)
    since = sync.first_ready_at if sync.first_ready_at is not None else attempt.planned_at
    run.stragglers.note_commit(ids, awaited - run.resting.turns(plan.sync), attempt.planned_at - since, run.now)
    for site_id in run.norms.note_commit(attempt) if run.settings.sync.robust != "off" else ():
        run.report(logging.WARNING, norm_in_words(run, run.members.known(site_id)))
    for pair in run.same_samples.note_commit({i: loss for i, loss in sync.losses.items() if i in ids}):
        run.report(logging.WARNING, same_samples.in_words(*(run.members.known(i).label for i in pair)))
    _learn(run, sync, attempt)
    words = f", loss {record.median_loss:.4f}" if record.median_loss is not None else ""
    run.report_sync(
        f"commit {number}: sync {plan.sync} of sites {', '.join(map(str, ids))}, step {run_step}, "
        f"{tokens} tokens{words}{', the last one' if final else ''}",
        is_seldom=final,
    )
    ahead: m.Plan | None = None
    if following is not None:
        ahead = _open_after(run, following, at_base, attempt)
    elif final:
        _end(run, run.stop_reason or f"the run's length is reached at step {run_step}")
    logging_values.committed(run, {c.site_id: sync.losses[c.site_id] for c in contributors if c.site_id in sync.losses})
    _send_commit(run, message, at_base, ids)
    if ahead is not None:
        run.send_all(at_base, ahead)
    judging.begin(run, message, attempt)


def _if_finite(loss: float) -> float | None:
    """Each site's loss is; what comes out of several may not be, and whoever reads the status could not read on."""
    return loss if math.isfinite(loss) else None


def _learn(run: Run, sync: Sync, attempt: Attempt) -> None:
    """What the next syncs remember of one that is committed. One that is abandoned teaches nothing: who was to blame
    for it is not known, and its sites are tried anew."""
    number, exclusions = sync.open.sync, sync.exclusions
    left_behind = attempt.heard - attempt.done.keys()
    named = {peer for site_id, peer in attempt.failing if site_id in left_behind}
    reduced_wrongly = exclusions.ids(Kind.NO_ROOM, Kind.NO_AVERAGE, Kind.ABSURD)
    run.trouble.reduce_nothing.note(attempt.suspects | reduced_wrongly | named, number)
    # The others were through, and waited until these had said so.
    unserved = {(a, b) for a, b in attempt.failing if a not in attempt.done and a not in attempt.heard}
    run.trouble.note_links({*sync.blame.pairs, *unserved}, number)
    here = {site.site_id for site in run.members.connected()}
    lost = {start[0] for start in exclusions.of(Kind.GONE) if attempt.has(start)}
    gone = {i for pair in unserved for i in pair if i in lost or i not in here}
    left = [pair for pair in unserved if gone.isdisjoint(pair)]  # who only waited for a site that has gone is not in it
    at_fault = gone | run.trouble.ends_at_fault(left, number)
    demoted = exclusions.ids(Kind.DEMOTED)
    run.trouble.held_up_others.note(demoted | at_fault, number)
    run.trouble.receive_only.note(_in_good_standing(run, demoted | left_behind), number)
    run.trouble.ended_attempts.note(exclusions.ended_attempts(attempt.plan.attempt), number)


def _learn_links(run: Run, sync: Sync, attempt: Attempt) -> None:
    """What is known of each link from now on, and who rests because of it."""
    sync_bytes = run.chunk_sizes.of_sync(attempt.plan.fragment).total_bytes
    run.pace.note_commit(attempt.ids(), sync_bytes, run.now - attempt.planned_at, run.now)
    if not run.pace.period_s:
        return
    here = [site.site_id for site in run.members.live()]
    run.links.settle(here, sync_bytes, run.pace.period_s)
    if run.settings.sync.steps_at_nodes:
        return  # no site rests: what it trained meanwhile would be in no commit
    ready_at = [sync.ready_at[i] for i in attempt.ids() if i in sync.ready_at and run.resting.every(i) == 1]
    is_first = attempt.plan.attempt == 1 and ready_at
    committed = Committed(
        sync=sync.open.sync,
        site_ids=here,
        sync_bytes=sync_bytes,
        period_s=run.pace.period_s,
        hidden_s=run.stragglers.typical_s(here, sync.open.overlap_steps) or 0.0,
        waited_s=run.now - max(ready_at) if is_first else None,
        most_every=run.log.num_kept,
        num_fragments=run.settings.sync.fragments,
    )
    for site_id in run.resting.settle(run.links, committed):
        every = run.resting.every(site_id)
        often = "every sync again" if every == 1 else f"one sync of {every}"
        why = f", which its link makes {run.resting.extra_s(site_id):.1f} s longer" if every > 1 else ""
        run.report(logging.INFO, f"{run.members.known(site_id).label} contributes to {often}{why}")


def _sitting_out(run: Run, sync: int, at_base: Sequence[Site]) -> tuple[int, ...]:
    """Who rests in the next sync: nobody if the others are no quorum."""
    resting = tuple(s.site_id for s in run.members.live() if run.resting.rests(s.site_id, sync))
    others = [s for s in at_base if s.site_id not in resting]
    return resting if len(others) >= run.settings.quorum else ()


def _in_good_standing(run: Run, site_ids: Collection[int]) -> list[int]:
    """Those of whom more is expected. Of a site on trial nothing is: it is evicted when it fails again."""
    return [i for i in sorted(site_ids) if not run.members.known(i).conduct.is_on_trial]


def _note_who_may_hold_it(run: Run, plan: m.Plan, number: int) -> None:
    """Who was planned and has gone since may have all payloads on its disk: a rollback waits for it."""
    for member in (*plan.contributors, *plan.receivers):
        site = run.members.known(member.site_id)
        if not site.live and site.may_hold < number:
            site.may_have(number)
            run.persist(site.record())


def _send_commit(run: Run, message: m.Commit, at_base: list[Site], contributors: tuple[int, ...]) -> None:
    """Contributors first. Of the last commit, sites that cannot apply it hear only that the run is over."""
    run.send_all(sorted(at_base, key=lambda s: s.site_id not in contributors), message)
    behind = [s for s in run.members.live() if s not in at_base]
    if run.finished is not None:
        _say_finished(run, behind)
        return
    run.send_all(behind, message)


def abandon(run: Run, sync: Sync, reason: str, *, without_tokens: bool = False) -> None:
    """The sync ends without a commit; the same contributions go into the next one on the same base. `without_tokens`:
    those that are empty do not."""
    open_, reason = sync.open, reason[:1024]
    sync.abandon(reason)
    run.num_abandoned_in_a_row += 1
    run.report(logging.ERROR, f"sync {open_.sync} is abandoned: {reason}")
    run.note_abandoned(open_.sync, reason)
    members = [s for s in run.members.live() if s.standing is Standing.MEMBER]
    if run.stop_reason and run.num_abandoned_in_a_row >= len(run.lanes):
        run.send_all(members, m.Abandoned(sync=open_.sync, reason=reason))
        finish(run, f"{run.stop_reason} (the last sync was abandoned: {reason})")
        return
    following = replace(open_, sync=run.last_sync + 1, resting=())  # whoever rested may be needed
    # Sites say Ready again at once; what failed a moment ago is not tried at the network's speed.
    pause_s = run.limits.heartbeat_s * 2.0 ** min(run.num_abandoned_in_a_row - 1, 16)
    _open(run, following, run.members.holding(open_.base_commit), min(pause_s, run.limits.sync_wait_s))
    abandoned = m.Abandoned(sync=open_.sync, reason=reason, next=following, without_tokens=without_tokens)
    run.send_all(members, abandoned)


def finish(run: Run, reason: str) -> None:
    """The run is over at the last commit that there is."""
    _end(run, reason)
    _say_finished(run, run.members.live())


def _end(run: Run, reason: str) -> None:
    run.finished = FinishedRecord(run.log.last, reason[:1024])
    run.lanes.clear()
    run.ledger.give_back_all()
    run.persist_ledger()
    run.persist(run.finished)
    drawing_secret.reveal(run)
    run.report(logging.INFO, f"the run is over at commit {run.log.last}: {reason}")


def _say_finished(run: Run, sites: Sequence[Site]) -> None:
    """To these, and to those at the door."""
    at_the_door = (s for s in run.members.sites.values() if s.standing is Standing.NEW)
    run.send_all((*sites, *at_the_door), run.finished_message())
