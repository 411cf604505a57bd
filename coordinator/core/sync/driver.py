"""One sync from Ready to Done: what sites say of it, and `advance`, which carries out what `deciding` finds."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from atoll.coordinator.core.auditing import signed
from atoll.coordinator.core.data import leases
from atoll.coordinator.core.events import InfluencesRecord, PlanRecord, WeightsRecord
from atoll.coordinator.core.log import evidence, going_back, rollback, states
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites import liveness
from atoll.coordinator.core.sites.conduct import Cause
from atoll.coordinator.core.sites.membership import Site, Standing
from atoll.coordinator.core.sync import (
    deciding,
    outcomes,
    payload_lists,
    standstill,
    unusable,
    weighing,
)
from atoll.coordinator.core.sync import decision as d
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.coordinator.core.sync.blame import in_words
from atoll.coordinator.core.sync.exclusions import Kind
from atoll.coordinator.core.sync.syncs import Sync
from atoll.protocol import messages as m
from atoll.protocol.outer import same_rates

MAX_STEPS_OF_ADVANCE = 1000


# --- messages


def ready(run: Run, site: Site, message: m.Ready) -> None:
    """The site has sealed what it contributes. Refused if that cannot be; nothing if it is of another sync, or void."""
    settings, sync = run.settings.sync, run.sync_of(message.sync)
    problem = weighing.beyond_bounds(message, settings)
    if sync is not None and not problem:
        num_errors = len(settings.fragments_in(sync.open.fragment)) if settings.error_feedback else 0
        num_rates = 2 * run.chunk_sizes.num_groups if settings.steps_at_nodes else 0
        if len(message.error_commits) != num_errors:
            problem = f"error feedback of {len(message.error_commits)} fragments, {num_errors} are expected"
        elif len(message.rates) != num_rates:
            problem = f"{len(message.rates)} rates, {num_rates} are expected"
        elif settings.audits and message.tokens:
            problem = signed.wrong_in_ready(run, site, message)
    if problem:
        run.refuse(site.stream, m.RefusedKind.INVALID, f"Ready of {site.label} for sync {message.sync}: {problem}")
        return
    site.unreachable_site_ids = message.unreachable_site_ids
    if sync is None:
        if message.sync > run.last_sync:
            run.report(logging.WARNING, f"{site.label} is ready for sync {message.sync}, which was never opened")
        for other in run.lanes.values() if message.sync <= run.last_sync else ():
            if site.standing is Standing.MEMBER and site.holds(other.open.base_commit):
                run.send(site, other.open)  # its snapshot is good for that one
        return
    if site.standing is not Standing.MEMBER or not site.holds(sync.open.base_commit):
        run.report(
            logging.WARNING,
            f"{site.label} is ready for sync {message.sync} without having applied commit {sync.open.base_commit}",
        )
        return
    if site.site_id in sync.open.resting:
        return  # it was told; its turn is in another sync
    if sync.exclusions.is_void(site.start):
        return  # reducers may hold what it discarded, under the same key; it contributes to the next sync
    known = sync.ready.get(site.site_id)
    if known is not None and not _is_same(known, message):
        return  # a contribution never changes
    if not leases.may_list(run, site, message):
        text = f"the Ready of {site.label} is refused: it lists data that this start does not lease"
        run.report(logging.ERROR, text)
        why = "it trained on data that it does not lease; it discards that and takes leases of its own"
        run.evict(site, why, Cause.CONTRADICTION)
        return
    if known is None:
        run.stragglers.note_ready(site.site_id, message.num_steps, message.train_s)
    sync.take_ready(site.site_id, message, run.now)


def _is_same(known: m.Ready, said: m.Ready) -> bool:
    """One contribution. After a restart of the coordinator the rates that are known of it are the usual ones."""
    one, other = ((r.tokens, r.ranges, r.error_commits, r.contributions_root) for r in (known, said))
    return one == other and same_rates(known.rates, said.rates)


def done(run: Run, site: Site, message: m.Done) -> None:
    """The site has all payloads of the attempt. It is evicted if it exchanged from a state without the plan's
    base."""
    run.links.note(site.site_id, run.members.among_live(message.links))
    attempt = run.attempt_of(site, message)
    if attempt is None:
        run.report(
            logging.DEBUG, f"{site.label}: Done of sync {message.sync} attempt {message.attempt} counts no longer"
        )
        return
    base = attempt.plan.base_commit
    if not base <= message.last_commit <= run.log.last:
        attempt.spoil(f"{site.label} exchanged from commit {message.last_commit}, the plan is based on {base}")
        why = f"it exchanged from commit {message.last_commit}, and the plan is based on {base}"
        run.evict(site, why, Cause.CONTRADICTION)
        return
    if problem := signed.wrong_in_done(run, site, attempt, message):
        run.refuse(site.stream, m.RefusedKind.INVALID, f"Done of {site.label} for sync {message.sync}: {problem}")
        return
    attempt.note_done(site.site_id, message)
    states.exchanged_from(run, site, message.last_commit, message.state_hash)


def exchange_failed(run: Run, site: Site, message: m.ExchangeFailed) -> None:
    """What the site could not do: `deciding` finds what follows from it."""
    sync, attempt = run.sync_of(message.sync), run.attempt_of(site, message)
    if sync is None or attempt is None:
        return
    peer = run.members.by_id(message.peer_site_id)
    run.report(
        logging.WARNING,
        f"sync {message.sync} attempt {message.attempt}: {site.label} could not exchange"
        f"{' with ' + peer.label if peer and peer is not site else ''} ({message.phase}): {message.text}",
    )
    if message.tensor and site.site_id in attempt.reducing():
        unusable.accuse(run, sync, attempt, site, message)
    elif peer is site:
        sync.exclude(site.start, Kind.NO_ROOM, f"{site.label} has no room to reduce: {message.text}", run.now)
    elif not attempt.exchanges(site.site_id, message.peer_site_id):  # or none
        sync.exclude(site.start, Kind.CANNOT_GO_ON, f"{site.label}: {message.text}", run.now)
    else:
        lacks = message.direction is m.Direction.RECEIVING
        attempt.note_failing({(site.site_id, message.peer_site_id): lacks}, run.now)


# --- what has become possible


def advance(run: Run) -> None:
    """Carries out one decision after the other, until everything waits. `run.waits` says for what."""
    for _ in range(MAX_STEPS_OF_ADVANCE):
        states.advance(run)
        waits = _look(run)
        if waits is not None:
            run.waits = waits if run.dispute is None else (evidence.wait(run, run.dispute), *waits)
            if run.dispute is not None or run.going_back is not None:
                for sync in run.lanes.values():
                    sync.waits(run.waits[0])
            leases.settle(run)
            return
    raise AssertionError(f"sync {run.last_sync} does not come to rest")


def _look(run: Run) -> tuple[d.Wait, ...] | None:
    """One decision is carried out, and there is more to look at; or else what is waited for, what the status says
    first."""
    if going_back.advance(run):
        return None
    if run.finished is not None:
        return (d.Wait("the run is over"),)
    if run.stop_reason and not (run.lanes and run.members.live()):
        outcomes.finish(run, run.stop_reason)
        return None
    if not run.lanes:
        if (start := outcomes.wait_for_start(run)) is not None:
            return (start,)
        outcomes.start(run)
        return None
    if run.going_back is not None:
        return (d.Wait(going_back.in_words(run, run.going_back), run.going_back.until, is_pause=True),)
    unreachable = rollback.look(run)
    if unreachable is not None and unreachable.is_safe:
        rollback.go_back_to(run, unreachable, "every site that may have had it is back without it")
        return None
    lost = [] if unreachable is None else [rollback.wait(run, unreachable)]
    if (dispute := run.dispute) is not None:
        if run.stop_reason and dispute.is_over(run.now):
            outcomes.finish(run, f"{run.stop_reason} ({dispute.words})")
            return None
        return tuple(lost)
    if (back := unusable.decide(run)) is not None:
        _go_back(run, back)
        return None
    waits: list[d.Wait] = []
    for sync in run.lanes.values():
        decision = deciding.decide(run, sync)
        if not isinstance(decision, d.Wait):
            _carry_out(run, sync, decision)
            return None
        sync.waits(decision)
        waits.append(decision)
    if run.stop_reason and (reason := _pause_of_all(run, waits)):
        outcomes.finish(run, f"{run.stop_reason} ({reason})")
        return None
    return None if outcomes.open_beside(run) else (*lost, *waits)


def _pause_of_all(run: Run, waits: Sequence[d.Wait]) -> str:
    """Why the first of the open syncs that are paused is, if no other one gets on: nobody is ready for that, nor may
    train to the end of its window. Empty if one does."""
    for sync, wait in zip(run.lanes.values(), waits, strict=True):
        if not wait.is_pause and (sync.ready or any(liveness.owes(run, s, sync) for s in run.members.live())):
            return ""
    return next((wait.reason for wait in waits if wait.is_pause), "")


def _go_back(run: Run, decision: d.GoBack) -> None:
    run.judge_divergence(decision.commit + 1)
    if decision.obstacle:
        run.report(logging.ERROR, decision.obstacle)
    else:
        going_back.begin(run, decision.commit, decision.reason, without=decision.without)


def _carry_out(run: Run, sync: Sync, decision: d.OfSync | d.OfAttempt) -> None:
    attempt = sync.attempt
    match decision:
        case d.Propose():
            _propose(run, sync, decision)
        case d.CollectAgain(reason):
            run.report(logging.WARNING, f"sync {sync.open.sync} attempt {sync.last_attempt} is given up: {reason}")
            at_base = {s.site_id for s in run.members.holding(sync.open.base_commit)}
            sync.collect_again(reason, at_base.difference(sync.open.resting), run.now)
        case d.Abandon(reason=reason, without_tokens=without_tokens, error=error):
            if error:
                run.report(logging.ERROR, error)
            outcomes.abandon(run, sync, reason, without_tokens=without_tokens)
        case d.Refuse(sites=sites):
            for site, text in sites:
                run.refuse(site.stream, m.RefusedKind.INVALID, f"{site.label}: {text}")
                run.evict(site, text, Cause.CONTRADICTION, is_strike=False)
        case _:
            assert attempt is not None, "what is decided of an attempt"
            _carry_out_in(run, sync, attempt, decision)


def _carry_out_in(run: Run, sync: Sync, attempt: Attempt, decision: d.OfAttempt) -> None:
    """Of the attempt under way."""
    match decision:
        case d.GiveWay(reason):
            run.report(logging.INFO, f"sync {sync.open.sync}: attempt {attempt.plan.attempt} is not kept: {reason}")
            sync.give_way(reason)
        case d.Weigh(weights):
            _weigh(run, sync, attempt, weights)
        case d.Influence(influences):
            _influence(run, sync, attempt, influences)
        case d.Fail():
            _fail(run, sync, attempt, decision)
        case d.LeaveOut(found):
            attempt.spoil(unusable.exclude(run, sync, attempt, found))
        case d.AskForLists():
            payload_lists.ask(run, attempt, decision)
        case d.Stuck():
            standstill.carry_out(run, attempt, decision)
        case d.Misled(reason):
            run.trouble.note_misled(sync.open.sync)
            attempt.spoil(reason)
        case d.Evict(sites=sites):
            for site, text, why in sites:
                run.report(logging.ERROR, text)
                run.evict(site, why, Cause.CONTRIBUTION)
        case d.JudgeStates(commit):
            states.judge(run, commit)
            attempt.spoil(attempt.spoiled or f"contributors hold different states of commit {commit}")
        case d.Commit(payload_digest, stood_out):
            outcomes.commit(run, sync, attempt, payload_digest, stood_out)


def _propose(run: Run, sync: Sync, decision: d.Propose) -> None:
    """Persists and sends the plan of the next attempt."""
    plan = decision.plan
    sync.propose(plan, decision.why, run.now, suspects=decision.suspects, late=decision.late)
    run.persist(PlanRecord(plan))
    contributors = ", ".join(run.members.known(c.site_id).label for c in plan.contributors)
    receivers = ", ".join(run.members.known(r.site_id).label for r in plan.receivers)
    run.report(
        logging.INFO,
        f"sync {plan.sync} attempt {plan.attempt}: {contributors} contribute"
        f"{f', {receivers} receive' if receivers else ''} ({decision.why})",
    )
    run.send_all((run.members.known(member.site_id) for member in (*plan.contributors, *plan.receivers)), plan)


def _weigh(run: Run, sync: Sync, attempt: Attempt, weights: WeightsRecord) -> None:
    """Persists and sends the weights of a plan whose contributors are all ready."""
    sync.weigh(weights, run.now)
    run.num_attempts += 1
    run.persist(weights)
    plan = attempt.plan
    if plan.ahead:
        level = logging.DEBUG if run.settings.sync.steps_at_nodes else logging.INFO
        run.report(level, f"sync {plan.sync} attempt {plan.attempt}: all who were planned are ready")
    for words in weighing.cut_of(run, weights, attempt.ids()):
        run.report(logging.WARNING, f"sync {plan.sync}: {words}")
    _tell_all(run, attempt, attempt.weights_message())


def _influence(run: Run, sync: Sync, attempt: Attempt, found: InfluencesRecord) -> None:
    """Persists and sends what its reducers average with."""
    sync.influence(found, run.now)
    run.persist(found)
    _tell_all(run, attempt, attempt.influences_message())


def _tell_all(run: Run, attempt: Attempt, message: m.Weights | m.Influences) -> None:
    """With the plan, with the commit before, or with Welcome, each was sent the rest."""
    plan = attempt.plan
    sites = [run.members.known(member.site_id) for member in (*plan.contributors, *plan.receivers)]
    run.send_all((site for site in sites if site.live), message)


def _fail(run: Run, sync: Sync, attempt: Attempt, decision: d.Fail) -> None:
    """What could not be exchanged is blamed on somebody."""
    if decision.payloads_differ:
        sync.note_digest_conflict()
        run.report(logging.ERROR, decision.payloads_differ)
    attempt.note_failing(decision.pairs, run.now)
    if attempt.failing:
        sync.blame.note(attempt.failing)
        what = "an attempt" if sync.blame.num_failures == 1 else f"{sync.blame.num_failures} attempts"
        why = f"{what} could not be exchanged (sites {in_words(attempt.failing)})"
        for demotion in sync.blame.to_demote(decision.among, run.settings.quorum):
            site = run.members.known(demotion.site_id)
            sync.exclude(site.start, Kind.DEMOTED, f"site {site.site_id}: {why}", run.now)
            if demotion.num_accusers > 1:  # one alone may be the culprit
                _hold_against(run, site, why)
    attempt.spoil(decision.reason)


def _hold_against(run: Run, site: Site, why: str) -> None:
    """A contributor with whom others could not exchange. A site that never contributes is evicted the second time."""
    if site.conduct.is_on_trial:
        run.evict(site, f"it says that it is ready, but {why}", Cause.CONTRADICTION)
    elif not site.conduct.has_contributed:
        run.strike(site, why)
        run.persist(site.record())
