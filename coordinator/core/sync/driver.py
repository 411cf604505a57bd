"""One sync from Ready to Done: what sites say of it, and `advance`, which does what has become possible."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial

from atoll.coordinator.core.data import leases
from atoll.coordinator.core.log import going_back, rollback, states
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site, Standing
from atoll.coordinator.core.sync import (
    accusations,
    decisions,
    divergence,
    payload_lists,
    plans,
    reach,
    standstill,
    weighing,
)
from atoll.coordinator.core.sync.attempts import Attempt, NoAverage
from atoll.coordinator.core.sync.blame import MAX_NAMED, in_words
from atoll.coordinator.core.sync.exclusions import Exclusion, Kind
from atoll.coordinator.core.sync.stragglers import Patience
from atoll.coordinator.core.sync.syncs import MAX_ATTEMPTS, MAX_DIGEST_CONFLICTS, Sync
from atoll.protocol import messages as m
from atoll.protocol.errors import ConfigError
from atoll.protocol.plans import weights

MAX_STEPS_OF_ADVANCE = 1000


# --- messages


def ready(run: Run, site: Site, message: m.Ready) -> None:
    if beyond := _beyond_bounds(run, message):
        assert site.stream is not None, "it was heard on its stream"
        run.refuse(site.stream, m.RefusedKind.INVALID, f"Ready of {site.label} for sync {message.sync}: {beyond}")
        return
    site.unreachable_site_ids = message.unreachable_site_ids
    sync = run.sync
    if sync is None or message.sync != sync.open.sync:
        if message.sync > run.last_sync:
            run.report(logging.WARNING, f"{site.label} is ready for sync {message.sync}, which was never opened")
        elif sync is not None and site.standing is Standing.MEMBER and site.applied == sync.open.base_commit:
            run.send(site, sync.open)  # its snapshot is good for that one
        return
    if site.standing is not Standing.MEMBER or site.applied != sync.open.base_commit:
        run.report(
            logging.WARNING,
            f"{site.label} is ready for sync {message.sync} without having applied commit {sync.open.base_commit}",
        )
        return
    if sync.exclusions.is_void(site.start):
        return  # reducers may hold what it discarded, under the same key; it contributes to the next sync
    known = sync.ready.get(site.site_id)
    if known is not None and (known.tokens, known.ranges) != (message.tokens, message.ranges):
        return  # a contribution never changes
    if not leases.may_list(run, site, message.ranges):
        return
    if known is None:
        run.stragglers.note_ready(site.site_id, message.num_steps, message.train_s)
    sync.take_ready(site.site_id, message, run.now)


def _beyond_bounds(run: Run, message: m.Ready) -> str:
    if message.tokens >= m.MAX_TOKENS:
        return f"it says {message.tokens} tokens, less than {m.MAX_TOKENS} are possible"
    return weighing.beyond_leases(message, run.settings.sync)


def _attempt_of(run: Run, site: Site, message: m.Done | m.PayloadList | m.ExchangeFailed) -> Attempt | None:
    """The attempt under way, if the message is of it and its site contributes."""
    current = run.sync.attempt if run.sync else None
    if current is None or not current.has(site.start):
        return None
    plan = current.plan
    is_of_it = (plan.sync, plan.attempt, plan.term) == (message.sync, message.attempt, message.term)
    return current if is_of_it else None


def done(run: Run, site: Site, message: m.Done) -> None:
    attempt = _attempt_of(run, site, message)
    if attempt is None:
        run.report(
            logging.DEBUG, f"{site.label}: Done of sync {message.sync} attempt {message.attempt} counts no longer"
        )
        return
    base = attempt.plan.base_commit
    if message.last_commit != base:
        attempt.spoil(f"{site.label} exchanged from commit {message.last_commit}, the plan is based on {base}")
        run.evict(site, f"it exchanged from commit {message.last_commit}, and the plan is based on {base}")
        return
    attempt.note_done(site.site_id, message)
    states.take(run, site, base, message.state_hash)


def payloads_listed(run: Run, site: Site, message: m.PayloadList) -> None:
    if (attempt := _attempt_of(run, site, message)) is not None:
        payload_lists.received(run, attempt, site.site_id, message)


def exchange_failed(run: Run, site: Site, message: m.ExchangeFailed) -> None:
    sync, attempt = run.sync, _attempt_of(run, site, message)
    if sync is None or attempt is None:
        return
    peer = run.members.by_id(message.peer_site_id)
    run.report(
        logging.WARNING,
        f"sync {message.sync} attempt {message.attempt}: {site.label} could not exchange"
        f"{' with ' + peer.label if peer and peer is not site else ''} ({message.phase}): {message.text}",
    )
    if message.tensor and site.site_id in attempt.reducing():
        accusations.accuse(run, sync, attempt, site, message)
    elif peer is site:
        sync.exclude(site.start, Kind.NO_ROOM, f"{site.label} has no room to reduce: {message.text}", run.now)
    elif not attempt.exchanges(site.site_id, message.peer_site_id):  # or none
        sync.exclude(site.start, Kind.CANNOT_GO_ON, f"{site.label}: {message.text}", run.now)
    else:
        lacks = message.direction is m.Direction.RECEIVING
        attempt.note_failing({(site.site_id, message.peer_site_id): lacks}, run.now)


# --- what has become possible


def advance(run: Run) -> None:
    for _ in range(MAX_STEPS_OF_ADVANCE):
        states.advance(run)
        if not _step(run):
            leases.settle(run)
            return
    raise AssertionError(f"sync {run.last_sync} does not come to rest")


def _step(run: Run) -> bool:
    """One decision; False if there is none to make now."""
    if going_back.advance(run):
        return True
    if run.finished is not None:
        return False
    if run.stop_reason and (run.sync is None or not run.members.live()):
        decisions.finish(run, run.stop_reason)
        return True
    if run.sync is None:
        return decisions.start(run)
    if run.going_back is not None:
        return False
    if rollback.advance(run):
        return True
    if run.disputed:
        if run.stop_reason and run.dispute_is_over:
            decisions.finish(run, f"{run.stop_reason} ({run.disputed})")
            return True
        return False
    if divergence.advance(run):
        return True
    attempt = run.sync.attempt
    if attempt is None:
        return _step_collecting(run, run.sync)
    if attempt.is_weighed:
        return _step_planned(run, run.sync, attempt)
    return _step_planned_ahead(run, run.sync, attempt)


# --- collecting


def waiting_for(run: Run, sync: Sync) -> list[Site]:
    """Expected sites that are not ready, and ready ones whose stream is being renewed."""
    spared = run.trouble.spared(sync.open.sync)
    return [
        s
        for s in run.members.live()
        if not sync.exclusions.bars(s.start)
        and s.site_id not in spared
        and not s.conduct.is_on_trial
        and (
            (s.site_id in sync.expected and s.site_id not in sync.ready and not s.catching_up)
            or (s.site_id in sync.ready and s.stream is None)
        )
    ]


def _barred(run: Run, sync: Sync) -> list[str]:
    """Sites that could contribute, but not to this sync; why."""
    return [
        sync.exclusions.why_failed(s.start) or f"{s.label} has discarded what it contributed"
        for s in decisions.members_at(run, sync.open.base_commit)
        if s.stream is not None and sync.exclusions.bars(s.start)
    ]


def _able(run: Run, sync: Sync) -> list[Site]:
    """Sites that are ready and here, and have not failed in this sync; those without tokens too."""
    return [
        s
        for s in run.members.live()
        if s.site_id in sync.ready and not sync.exclusions.bars(s.start) and s.stream is not None
    ]


def _step_collecting(run: Run, sync: Sync) -> bool:
    quorum = run.settings.quorum
    if not run.members.live():
        run.paused = "no site is here"
        return False
    waiting = waiting_for(run, sync)
    if not sync.ready or sync.first_ready_at is None:
        run.paused = ""
        if not waiting and (barred := _barred(run, sync)):
            decisions.abandon(run, sync, "; ".join(barred))
            return True
        return False
    patience = _patience(run, sync, waiting)
    sync.wait(patience)
    if run.now < sync.not_before or (len(waiting) > len(patience.late) and run.now < patience.until):
        run.paused = ""
        return False
    able = _able(run, sync)
    contributors = [s for s in able if sync.ready[s.site_id].tokens > 0]
    spared = run.trouble.spared(sync.open.sync)
    others = [s for s in contributors if s.site_id not in spared]
    left_out = ""
    spare = quorum <= len(others) < len(contributors)
    if spare and not reach.choose(others, quorum).problem:  # else a site that could not exchange is better than none
        names = ", ".join(s.label for s in contributors if s not in others)
        left_out = f"; not yet {names}, after exchanges that failed"
        contributors = others
    if len(contributors) < quorum and not waiting and (barred := _barred(run, sync)):
        # They may contribute to another sync, where nothing is known of them.
        decisions.abandon(run, sync, "; ".join(barred))
        return True
    if len(contributors) < quorum and not waiting and (empty := [s for s in able if not sync.ready[s.site_id].tokens]):
        _train_on(run, sync, empty, f"there are {len(contributors)} of the {quorum} contributors of the quorum")
        return True
    if not contributors and not waiting:
        failed = sync.exclusions.failed()
        decisions.abandon(run, sync, "; ".join(failed[i] for i in sorted(failed)) or "nobody is ready")
        return True
    if len(contributors) < quorum:
        if waiting and run.now < sync.first_ready_at + run.limits.sync_wait_s:
            run.paused = ""  # those who are late are needed
            return False
        run.paused = f"sync {sync.open.sync} has {len(contributors)} of the {quorum} contributors of the quorum"
        if run.stop_reason:
            decisions.finish(run, f"{run.stop_reason} ({run.paused})")
            return True
        return False
    return _plan(run, sync, contributors, _why_now(run, sync, waiting, patience) + left_out)


def _patience(run: Run, sync: Sync, waiting: list[Site]) -> Patience:
    assert sync.first_ready_at is not None
    if any(s.site_id in sync.ready for s in waiting):  # it comes back, or is evicted within the grace
        return Patience(sync.first_ready_at + run.limits.sync_wait_s, frozenset())
    return run.stragglers.patience(
        [s.site_id for s in waiting],
        [
            s.site_id
            for s in run.members.live()
            if s.site_id in sync.ready or (s.site_id in sync.expected and not s.conduct.is_on_trial)
        ],
        num_steps=sync.open.num_steps,
        opened_at=sync.opened_at,
        first_ready_at=sync.first_ready_at,
        least_slack_s=run.limits.lease_s / 2,
        most_s=run.limits.sync_wait_s,
    )


def _why_now(run: Run, sync: Sync, waiting: list[Site], patience: Patience) -> str:
    if not waiting:
        return "everybody who is expected is ready"
    assert sync.first_ready_at is not None
    slower = ", ".join(s.label for s in waiting if s.site_id in patience.late)
    others = ", ".join(s.label for s in waiting if s.site_id not in patience.late)
    reasons = []
    if slower:
        reasons.append(f"without {slower}, slower than most")
    if others:
        reasons.append(f"without {others}, after {round(run.now - sync.first_ready_at, 1):g} s")
    return "; ".join(reasons)


def _plan(run: Run, sync: Sync, contributors: list[Site], why: str) -> bool:
    """Persists and sends the next attempt. False if it can only be made later."""
    held_back = run.trouble.held_back(sync.open.sync)
    choice = reach.choose(contributors, run.settings.quorum, partial(plans.fit, run), held_back)
    if choice.problem:
        return _nobody_reduces(run, sync, contributors, choice.problem)
    full = sync.exclusions.reasons(Kind.NO_ROOM)
    no_reducers = choice.not_reducing.union(full)
    contributors = plans.with_room(run, choice.contributors, run.settings.quorum, no_reducers)
    why += choice.left_out
    if left := [s.label for s in choice.contributors if s not in contributors]:
        more = f" and {len(left) - MAX_NAMED} more" if len(left) > MAX_NAMED else ""
        names = ", ".join(left[:MAX_NAMED]) + more
        why += f"; without {names}: there is no room to reduce what they contribute (--max-retained-mib)"
    ids = {s.site_id for s in contributors}
    receivers = [s for s in run.members.live() if s.site_id not in ids]
    try:
        made = plans.make(run, sync, contributors, receivers, choice.not_reducing)
    except ConfigError as error:
        return _nobody_reduces(run, sync, contributors, str(error))
    if made is None:
        decisions.abandon(run, sync, "; ".join(["every assignment of reducers was tried", *full.values()]))
        return True
    record, suspects = made
    plan = record.plan
    run.paused = ""
    run.num_attempts += 1
    attempt = sync.propose(record, suspects, why, run.now)
    run.persist(record)
    for words in weighing.cut_of(run, attempt):
        run.report(logging.WARNING, f"sync {plan.sync}: {words}")
    run.report(
        logging.INFO,
        f"sync {plan.sync} attempt {plan.attempt}: {', '.join(s.label for s in contributors)} contribute"
        f"{', ' + ', '.join(s.label for s in receivers) + ' receive' if receivers else ''} ({why})",
    )
    for site in (*contributors, *receivers):
        run.send(site, plan)
    return True


def _train_on(run: Run, sync: Sync, empty: list[Site], lack: str) -> None:
    """The sync ends; in the next one the sites that had no tokens can contribute."""
    names = ", ".join(s.label for s in empty)
    decisions.abandon(run, sync, f"{names} trained no tokens, so {lack}", without_tokens=True)


def _nobody_reduces(run: Run, sync: Sync, contributors: list[Site], problem: str) -> bool:
    """Nobody can be dialled, or has the memory. Until that changes; nothing of this sync is lost."""
    if sync.attempt is not None:
        _collect_again(run, sync, problem)
        return True
    empty = [s for s in _able(run, sync) if not sync.ready[s.site_id].tokens]
    if empty and not waiting_for(run, sync):
        with_them = reach.choose([*contributors, *empty], run.settings.quorum, partial(plans.fit, run))
        if not with_them.problem:
            _train_on(run, sync, empty, problem)
            return True
    if barred := _barred(run, sync):
        decisions.abandon(run, sync, "; ".join([problem, *barred]))  # one of them may reduce in the next one
        return True
    run.paused = problem
    if run.stop_reason:
        decisions.finish(run, f"{run.stop_reason} ({problem})")
        return True
    return False


def _collect_again(run: Run, sync: Sync, reason: str) -> None:
    run.report(logging.WARNING, f"sync {sync.open.sync} attempt {sync.last_attempt} is given up: {reason}")
    sync.collect_again(reason, [s.site_id for s in decisions.members_at(run, sync.open.base_commit)], run.now)


# --- planned


def _step_planned_ahead(run: Run, sync: Sync, attempt: Attempt) -> bool:
    """The plan came with the commit before. It counts once all its contributors are ready, and is like any other then;
    until then sites are waited for as without it, and planned without those who do not come."""
    if reason := plans.gives_way(run, sync, attempt):
        run.report(logging.INFO, f"sync {sync.open.sync}: attempt {attempt.plan.attempt} is not kept: {reason}")
        sync.give_way(reason)
        return True
    if not all(i in sync.ready for i in attempt.ids()):
        return _step_collecting(run, sync)
    record = plans.weigh(sync, attempt)
    run.paused = ""
    run.num_attempts += 1
    sync.weigh(record, run.now)
    run.persist(record)
    run.report(logging.INFO, f"sync {sync.open.sync} attempt {attempt.plan.attempt}: all who were planned are ready")
    plan = record.plan
    said = m.Weights(sync=plan.sync, attempt=plan.attempt, term=plan.term, tokens=weights(plan))
    planned = set(attempt.ids())  # none of them has been lost
    for site in run.members.live():
        if site.site_id in planned:
            run.send(site, said)  # with the commit, or with Welcome, it was sent the rest
    return True


def _step_planned(run: Run, sync: Sync, attempt: Attempt) -> bool:
    survivors = sync.survivors()
    if survivors and not attempt.spoiled and all(i in attempt.done for i in survivors):
        return _all_done(run, sync, attempt, survivors)
    if not attempt.spoiled and (through := _most_are_through(attempt, survivors)):
        return _all_done(run, sync, attempt, through)
    if attempt.spoiled:
        return _another_attempt(run, sync, attempt, attempt.spoiled)
    if lost := sync.lost():
        if run.now < replan_at(run, lost.values()) and any(_in_doubt(run, i) for i in survivors):
            return False
        return _another_attempt(run, sync, attempt, "; ".join(e.reason for e in lost.values()))
    if failed := sync.failed():
        return _another_attempt(run, sync, attempt, "; ".join(failed.values()))
    if full := plans.no_room(sync, attempt):
        return _another_attempt(run, sync, attempt, full)
    if attempt.no_average is not None:
        return _no_average(run, sync, attempt, attempt.no_average)
    if not survivors:
        return _another_attempt(run, sync, attempt, "every contributor has left")
    due = retry_at(run, attempt)
    if due is not None and run.now >= due and not _peer_away(run, attempt):
        _settle_failures(run, sync, attempt, survivors)
        return _another_attempt(run, sync, attempt, f"sites could not exchange: {in_words(attempt.failing)}")
    return standstill.advance(run, sync, attempt, survivors)


def replan_at(run: Run, lost: Collection[Exclusion]) -> float:
    """Until then others that are silent may turn out to be lost as well."""
    return min(e.since for e in lost) + run.limits.heartbeat_s


def retry_at(run: Run, attempt: Attempt) -> float | None:
    """When an exchange that failed is tried again: a peer that died is evicted by then, and the next attempt is without
    it."""
    return attempt.failed_at + run.limits.reconnect_grace_s if attempt.failed_at is not None else None


def _settle_failures(run: Run, sync: Sync, attempt: Attempt, survivors: list[int]) -> None:
    """Who is to be a receiver from now on, after what failed in this attempt."""
    sync.blame.note(attempt.failing)
    what = "an attempt" if sync.blame.num_failures == 1 else f"{sync.blame.num_failures} attempts"
    why = f"{what} could not be exchanged (sites {in_words(attempt.failing)})"
    for demotion in sync.blame.to_demote(survivors, run.settings.quorum):
        site = run.members.by_id(demotion.site_id)
        assert site is not None, "who survives is in the run"
        sync.exclude(site.start, Kind.DEMOTED, f"site {site.site_id}: {why}", run.now)
        if demotion.num_accusers > 1:  # one alone may be the culprit
            _hold_against(run, site, why)


def _no_average(run: Run, sync: Sync, attempt: Attempt, found: NoAverage) -> bool:
    """No fault of the site that says so. It is believed once another one has found the same, or for one sync where it
    names contributions that stand out."""
    if found.accused:
        return _another_attempt(run, sync, attempt, accusations.exclude(run, sync, attempt, found))
    if len(sync.exclusions.ids(Kind.NO_AVERAGE)) > 1 or len(attempt.ids()) == 1:
        decisions.abandon(run, sync, found.reason)
        return True
    return _another_attempt(run, sync, attempt, found.reason)


def _hold_against(run: Run, site: Site, why: str) -> None:
    """A contributor with whom others could not exchange. A site that never contributes is evicted the second time."""
    if site.conduct.is_on_trial:
        run.evict(site, f"it says that it is ready, but {why}")
    elif not site.conduct.has_contributed:
        run.strike(site, why)
        run.persist(site.record())


def _in_doubt(run: Run, site_id: int) -> bool:
    """It was here, and has no stream or is silent for two heartbeats: it may be lost as the one before it is. A region
    that is cut off costs one attempt, not one for each of its sites."""
    site = run.members.by_id(site_id)
    if site is None or not site.heard_at:
        return False
    return site.stream is None or run.now - site.heard_at > 2 * run.limits.heartbeat_s


def _most_are_through(attempt: Attempt, survivors: list[int]) -> list[int]:
    """Those who are done, if they are most and all others say that they could not exchange: their contributions are in
    every payload all the same, and they fetch the commit. None otherwise."""
    reported = attempt.reporters()
    through = [i for i in survivors if i in attempt.done]
    if 2 * len(through) <= len(survivors) or not all(i in reported for i in survivors if i not in attempt.done):
        return []
    return through


def _peer_away(run: Run, attempt: Attempt) -> bool:
    """A peer that was reported is just now without a stream: it comes back or is evicted soon."""
    peers = (run.members.by_id(peer) for _, peer in attempt.failing)
    return any(peer is not None and peer.live and peer.stream is None for peer in peers)


def _wrong_weights(run: Run, sync: Sync, attempt: Attempt, wrong: list[int], num_survivors: int) -> bool:
    """Where each site said its own weight, those who averaged with another one were told it. Where the plan said all of
    them, who has others is wrong itself."""
    said, planned = list(attempt.done[wrong[0]].tokens), list(weights(attempt.plan))
    text = f"site {wrong[0]} averaged with weights {said}, sites are ready with {planned}"
    run.trouble.note_misled(sync.open.sync)
    if attempt.weighed_late or len(wrong) == num_survivors:
        return _another_attempt(run, sync, attempt, text)
    for site_id in wrong:
        site = run.members.by_id(site_id)
        assert site is not None, "survivors are in the run"
        run.report(logging.ERROR, f"{site.label} says that it averaged with other weights than the plan's")
        run.evict(site, f"its weights {list(attempt.done[site_id].tokens)} are not the plan's {planned}")
    return True


def _all_done(run: Run, sync: Sync, attempt: Attempt, survivors: list[int]) -> bool:
    dones = [attempt.done[i] for i in survivors]
    base = attempt.plan.base_commit
    if len({d.state_hash for d in dones}) > 1:
        states.judge(run, base)
        attempt.spoil(attempt.spoiled or f"contributors hold different states of commit {base}")
        return True
    planned = weights(attempt.plan)
    if wrong := [i for i in survivors if attempt.done[i].tokens != planned]:
        return _wrong_weights(run, sync, attempt, wrong, len(survivors))
    if len({d.payload_digest for d in dones}) > 1:
        if payload_lists.awaited(run, attempt, survivors):
            return False
        return _payloads_differ(run, sync, attempt, survivors)
    decisions.commit(run, sync, attempt, dones[0].payload_digest, divergence.stood_out(attempt))
    return True


def _payloads_differ(run: Run, sync: Sync, attempt: Attempt, survivors: list[int]) -> bool:
    """Where there are several to compare, that is a failed exchange like others. Of two the reducer is believed."""
    if len(survivors) == 2 and payload_lists.evict_outliers(run, attempt, survivors):
        return True
    num_conflicts = sync.note_digest_conflict()
    words = ", ".join(f"site {i} {attempt.done[i].payload_digest.hex()[:12]}" for i in survivors[:MAX_NAMED])
    text = f"sync {sync.open.sync} attempt {attempt.plan.attempt}: payloads differ ({words}); nothing is committed"
    run.report(logging.ERROR, text)
    attempt.note_failing(payload_lists.disagreements(run, attempt, survivors), run.now)
    if attempt.failing:
        _settle_failures(run, sync, attempt, survivors)
        reason = f"payloads differ between sites: {in_words(attempt.failing)}"
        return _another_attempt(run, sync, attempt, reason)
    if num_conflicts >= MAX_DIGEST_CONFLICTS:
        decisions.abandon(run, sync, f"payloads differed in {num_conflicts} attempts ({words})")
        return True
    return _another_attempt(run, sync, attempt, "payloads differ between sites")


def _another_attempt(run: Run, sync: Sync, attempt: Attempt, reason: str) -> bool:
    survivors = sync.survivors()
    able = [s for s in run.members.live() if s.site_id in survivors and s.site_id in sync.ready]
    if attempt.plan.attempt >= MAX_ATTEMPTS:
        decisions.abandon(run, sync, f"{MAX_ATTEMPTS} attempts failed, the last one because: {reason}")
        return True
    if not able and sync.exclusions.failed():
        decisions.abandon(run, sync, reason)
        return True
    if len(able) < run.settings.quorum:
        _collect_again(run, sync, reason)
        return True
    return _plan(run, sync, able, reason)
