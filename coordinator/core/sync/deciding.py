"""What follows in a sync from what is known of it now: one decision, or a wait. Pure; `driver` carries it out."""

from __future__ import annotations

from functools import partial

from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync import decision as d
from atoll.coordinator.core.sync import influence, payload_lists, plans, reach, standstill, unusable, weighing
from atoll.coordinator.core.sync.attempts import Attempt, NoAverage
from atoll.coordinator.core.sync.blame import MAX_NAMED, in_words
from atoll.coordinator.core.sync.exclusions import Kind
from atoll.coordinator.core.sync.stragglers import Patience, Window
from atoll.coordinator.core.sync.syncs import MAX_ATTEMPTS, MAX_DIGEST_CONFLICTS, Phase, Sync
from atoll.protocol.errors import ConfigError


def decide(run: Run, sync: Sync) -> d.Decision:
    """By its phase. Nothing else holds the run up."""
    attempt = sync.attempt
    if attempt is None:
        return _collecting(run, sync)
    if sync.phase is Phase.EXCHANGING:
        return _exchanging(run, sync, attempt)
    return _planned(run, sync, attempt)


# --- collecting


def waiting_for(run: Run, sync: Sync) -> list[Site]:
    """Expected sites that are not ready, and ready ones whose stream is being renewed."""
    spared, turns = run.trouble.spared(sync.open.sync), run.resting.turns(sync.open.sync)

    def may_come(site: Site) -> bool:
        return site.site_id in sync.expected and (not site.catching_up or site.site_id in turns)

    return [
        s
        for s in run.members.live()
        if (s.stream is None if s.site_id in sync.ready else may_come(s))
        and not sync.exclusions.bars(s.start)
        and s.site_id not in spared
        and not s.conduct.is_on_trial
    ]


def _barred(run: Run, sync: Sync) -> list[str]:
    """Sites that could contribute, but not to this sync; why."""
    failed = sync.exclusions.failed()
    return [
        failed.get(s.site_id) or f"{s.label} has discarded what it contributed"
        for s in run.members.holding(sync.open.base_commit)
        if s.stream is not None and sync.exclusions.bars(s.start)
    ]


def _able(run: Run, sync: Sync) -> list[Site]:
    """Sites that are ready and here, and have not failed in this sync; those without tokens too."""
    return [
        s
        for s in run.members.live()
        if s.site_id in sync.ready and not sync.exclusions.bars(s.start) and s.stream is not None
    ]


def _collecting(run: Run, sync: Sync) -> d.Decision:
    quorum = run.settings.quorum
    if run.pause_reason and not run.stop_reason:
        return d.Wait(f"a person has paused the run: {run.pause_reason} (atoll resume)", is_pause=True)
    if not run.members.live():
        return d.Wait("no site is here", is_pause=True)
    waiting = waiting_for(run, sync)
    if not sync.ready or sync.first_ready_at is None:
        barred = _barred(run, sync) if not waiting else []
        if sync.open.resting and not waiting:
            barred = barred or ["nobody is here but sites that rest"]
        why = _without_state(run) if all(s.applied is None for s in run.members.live()) else _not_ready(waiting)
        return d.Abandon(reason="; ".join(barred)) if barred else d.Wait(why)
    if run.now < sync.not_before:
        return d.Wait("the sync before was abandoned: the next plan takes its time", sync.not_before)
    patience = _patience(run, sync, waiting, sync.first_ready_at)
    if len(waiting) > len(patience.late) and run.now < patience.until:
        return d.Wait(_not_ready(waiting), patience.until)
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
    if len(contributors) < quorum:
        return _too_few(run, sync, waiting, able)
    if (refused := _odd_ones(run, sync, contributors)) is not None:
        return refused
    why = _why_now(waiting, patience, run.now - sync.first_ready_at) + left_out
    return _propose(run, sync, contributors, why, patience.late)


def _without_state(run: Run) -> str:
    expected = {site_id for sync in run.lanes.values() for site_id in sync.expected}
    back = [s.label for s in run.members.live() if s.site_id in expected]
    what = f"the state of commit {run.log.last}"
    if not back:
        return f"no site that is here holds {what}; start one that did"
    return f"{', '.join(back)} bring{'s' * (len(back) == 1)} {what} back"


def _not_ready(waiting: list[Site]) -> str:
    more = f" and {len(waiting) - MAX_NAMED} more" if len(waiting) > MAX_NAMED else ""
    return f"not ready yet: {', '.join(s.label for s in waiting[:MAX_NAMED]) or 'nobody who is here'}{more}"


def _too_few(run: Run, sync: Sync, waiting: list[Site], able: list[Site]) -> d.Decision:
    """There is no quorum."""
    quorum, num = run.settings.quorum, sum(sync.ready[s.site_id].tokens > 0 for s in able)
    if not waiting and (barred := _barred(run, sync)):
        # They may contribute to another sync, where nothing is known of them.
        return d.Abandon(reason="; ".join(barred))
    if not waiting and (empty := [s for s in able if not sync.ready[s.site_id].tokens]):
        return _train_on(empty, f"there are {num} of the {quorum} contributors of the quorum")
    if not num and not waiting:
        failed = sync.exclusions.failed()
        return d.Abandon(reason="; ".join(failed[i] for i in sorted(failed)) or "nobody is ready")
    assert sync.first_ready_at is not None
    until = sync.first_ready_at + run.limits.sync_wait_s
    if waiting and run.now < until:
        return d.Wait(f"there is no quorum without them: {_not_ready(waiting)}", until)
    return _paused(sync, f"sync {sync.open.sync} has {num} of the {quorum} contributors of the quorum")


def _paused(sync: Sync, reason: str) -> d.Decision:
    """Until something happens; a run that is to stop ends once all that are open wait so. Sites that rest are asked
    first."""
    return d.Abandon(reason=reason) if sync.open.resting else d.Wait(reason, is_pause=True)


def _patience(run: Run, sync: Sync, waiting: list[Site], first_ready_at: float) -> Patience:
    if any(s.site_id in sync.ready for s in waiting):  # it comes back, or is evicted within the grace
        return Patience(first_ready_at + run.limits.sync_wait_s, frozenset())
    return run.stragglers.patience(
        [s.site_id for s in waiting],
        [
            s.site_id
            for s in run.members.live()
            if s.site_id in sync.ready or (s.site_id in sync.expected and not s.conduct.is_on_trial)
        ],
        Window(sync.open.num_steps, sync.opened_at, run.limits.lease_s / 2),
        first_ready_at=first_ready_at,
        most_s=run.limits.sync_wait_s,
    )


def _why_now(waiting: list[Site], patience: Patience, waited_s: float) -> str:
    slower = ", ".join(s.label for s in waiting if s.site_id in patience.late)
    others = ", ".join(s.label for s in waiting if s.site_id not in patience.late)
    reasons = []
    if slower:
        reasons.append(f"without {slower}, slower than most")
    if others:
        reasons.append(f"without {others}, after {round(waited_s, 1):g} s")
    return "; ".join(reasons) or "everybody who is expected is ready"


def _propose(run: Run, sync: Sync, contributors: list[Site], why: str, late: frozenset[int]) -> d.Decision:
    """The next attempt."""
    listed = plans.within_commit(sync, contributors)
    if left := [s.label for s in contributors if s not in listed]:
        pieces = f"without {', '.join(left[:MAX_NAMED])}: a commit cannot list samples in so many pieces"
        if len(listed) < run.settings.quorum:
            return _nobody_reduces(run, sync, listed, f"there is no quorum {pieces}")
        contributors, why = listed, f"{why}; {pieces}"
    held_back, sizes = run.trouble.held_back(sync.open.sync), run.chunk_sizes.of_sync(sync.open.fragment)
    choice = reach.choose(contributors, run.settings.quorum, partial(plans.fit, sizes), held_back)
    if choice.problem:
        return _nobody_reduces(run, sync, contributors, choice.problem)
    full = sync.exclusions.reasons(Kind.NO_ROOM)
    no_reducers = choice.not_reducing.union(full)
    contributors = plans.with_room(sizes, choice.contributors, run.settings.quorum, no_reducers)
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
        return d.Abandon(reason="; ".join(["every assignment of reducers was tried", *full.values()]))
    plan, suspects = made
    return d.Propose(plan=plan, suspects=suspects, late=late, why=why)


def _odd_ones(run: Run, sync: Sync, sites: list[Site]) -> d.Refuse | None:
    """A commit has one learning rate. None: they agree."""
    odd = weighing.odd_rates(run, sync, [s.site_id for s in sites])
    return d.Refuse(sites=tuple((run.members.known(i), text) for i, text in odd.items())) if odd else None


def _train_on(empty: list[Site], lack: str) -> d.Decision:
    """The sync ends; in the next one the sites that had no tokens can contribute."""
    names = ", ".join(s.label for s in empty)
    return d.Abandon(reason=f"{names} trained no tokens, so {lack}", without_tokens=True)


def _nobody_reduces(run: Run, sync: Sync, contributors: list[Site], problem: str) -> d.Decision:
    """Nobody can be dialled, or has the memory. Until that changes; nothing of this sync is lost."""
    if sync.attempt is not None:
        return d.CollectAgain(problem)
    empty = [s for s in _able(run, sync) if not sync.ready[s.site_id].tokens]
    if empty and not waiting_for(run, sync):
        fit = partial(plans.fit, run.chunk_sizes.of_sync(sync.open.fragment))
        with_them = reach.choose([*contributors, *empty], run.settings.quorum, fit)
        if not with_them.problem:
            return _train_on(empty, problem)
    if barred := _barred(run, sync):
        return d.Abandon(reason="; ".join([problem, *barred]))  # one of them may reduce in the next one
    return _paused(sync, problem)


# --- planned


def _planned(run: Run, sync: Sync, attempt: Attempt) -> d.Decision:
    """The weights are said once all contributors are ready, as they were when the plan was made, unless it was made
    ahead. Until then sites are waited for as without it, and planned without those who do not come."""
    if attempt.plan.ahead and (reason := plans.gives_way(run, sync, attempt)):
        return d.GiveWay(reason)
    if not all(i in sync.ready for i in attempt.ids()):
        return _collecting(run, sync)
    if (refused := _odd_ones(run, sync, [run.members.known(i) for i in attempt.ids()])) is not None:
        return refused
    weights = weighing.weigh(run, sync, attempt)
    if attempt.plan.ahead and (cut := weighing.cut_of(run, weights, attempt.ids())):
        return d.GiveWay("; ".join(cut))  # contributors say their whole weights to each other; in another one not
    return d.Weigh(weights)


def _exchanging(run: Run, sync: Sync, attempt: Attempt) -> d.Decision:
    survivors = sync.survivors()
    if attempt.spoiled:
        return _another_attempt(run, sync, attempt, attempt.spoiled)
    if (found_by_products := influence.decide(run, attempt)) is not None:
        return d.Influence(found_by_products)
    if survivors and all(i in attempt.done for i in survivors):
        return _all_done(run, sync, attempt, survivors)
    if through := _most_are_through(attempt, survivors):
        return _all_done(run, sync, attempt, through)
    if lost := sync.gone(Kind.GONE):
        # Others that are silent may turn out to be lost as well.
        replan_at = min(e.since for e in lost.values()) + run.limits.heartbeat_s
        if run.now < replan_at and any(_in_doubt(run, i) for i in survivors):
            return d.Wait("a contributor is lost, and others are silent", replan_at)
        return _another_attempt(run, sync, attempt, "; ".join(e.reason for e in lost.values()))
    if failed := sync.failed():
        return _another_attempt(run, sync, attempt, "; ".join(failed.values()))
    if full := plans.no_room(sync, attempt):
        return _another_attempt(run, sync, attempt, full)
    if attempt.no_average is not None:
        return _no_average(run, sync, attempt, attempt.no_average)
    if not survivors:
        return _another_attempt(run, sync, attempt, "every contributor has left")
    # A peer that died is evicted within the grace, and the next attempt is without it.
    retry_at = attempt.failed_at + run.limits.reconnect_grace_s if attempt.failed_at is not None else None
    if retry_at is not None and run.now >= retry_at:
        if not _peer_away(run, attempt):
            return d.Fail(reason=f"sites could not exchange: {in_words(attempt.failing)}", among=tuple(survivors))
        retry_at = None
    found = standstill.decide(run, sync, attempt, survivors)
    if isinstance(found, d.Wait) and retry_at is not None:
        reason = f"{found.reason}; {in_words(attempt.failing)} could not exchange"
        return d.Wait(reason, min(retry_at, found.until) if found.until is not None else retry_at)
    return found


def _no_average(run: Run, sync: Sync, attempt: Attempt, found: NoAverage) -> d.Decision:
    """No fault of the site that says so. It is believed once another one has found the same, or for one sync where it
    names contributions that stand out."""
    if found.accused:
        return d.LeaveOut(found)
    if len(sync.exclusions.ids(Kind.NO_AVERAGE)) > 1 or len(attempt.ids()) == 1:
        return d.Abandon(reason=found.reason)
    return _another_attempt(run, sync, attempt, found.reason)


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


def _all_done(run: Run, sync: Sync, attempt: Attempt, survivors: list[int]) -> d.Decision:
    dones = [attempt.done[i] for i in survivors]
    states: dict[int, bytes] = {}
    for done in dones:
        if states.setdefault(done.last_commit, done.state_hash) != done.state_hash:
            return d.JudgeStates(done.last_commit)
    if wrong := [i for i in survivors if attempt.done[i].tokens != attempt.weights.tokens]:
        return _wrong_weights(run, attempt, wrong, len(survivors))
    if len({done.payload_digest for done in dones}) > 1:
        return _payloads_differ(run, sync, attempt, survivors)
    return d.Commit(dones[0].payload_digest, unusable.stood_out(attempt))


def _wrong_weights(run: Run, attempt: Attempt, wrong: list[int], num_survivors: int) -> d.Decision:
    """In a plan that was made ahead a survivor may have others from its peers: there is another attempt. Any other plan
    is not begun before its weights are there: the survivor is faulty, and is evicted."""
    planned = list(attempt.weights.tokens)
    said = {i: list(attempt.done[i].tokens) for i in wrong}
    if attempt.plan.ahead or len(wrong) == num_survivors:
        return d.Misled(f"site {wrong[0]} averaged with weights {said[wrong[0]]}, sites are ready with {planned}")
    sites = [run.members.known(i) for i in wrong]
    text = "says that it averaged with other weights than the plan's"
    return d.Evict(
        sites=tuple(
            (s, f"{s.label} {text}", f"its weights {said[s.site_id]} are not the plan's {planned}") for s in sites
        )
    )


def _payloads_differ(run: Run, sync: Sync, attempt: Attempt, survivors: list[int]) -> d.Decision:
    """Where there are several to compare, that is a failed exchange like others. Of two the reducer is believed."""
    if (asked := payload_lists.awaited(run, attempt, survivors)) is not None:
        return asked
    if len(survivors) == 2 and (outliers := payload_lists.outliers(run, attempt, survivors)):
        return d.Evict(sites=outliers)
    words = ", ".join(f"site {i} {attempt.done[i].payload_digest.hex()[:12]}" for i in survivors[:MAX_NAMED])
    text = f"sync {sync.open.sync} attempt {attempt.plan.attempt}: payloads differ ({words}); nothing is committed"
    pairs = payload_lists.disagreements(attempt, survivors)
    if failing := {**attempt.failing, **pairs}:
        reason = f"payloads differ between sites: {in_words(failing)}"
        return d.Fail(reason=reason, among=tuple(survivors), pairs=pairs, payloads_differ=text)
    if sync.num_digest_conflicts + 1 >= MAX_DIGEST_CONFLICTS:
        num = sync.num_digest_conflicts + 1
        return d.Abandon(reason=f"payloads differed in {num} attempts ({words})", error=text)
    return d.Fail(reason="payloads differ between sites", among=tuple(survivors), payloads_differ=text)


def _another_attempt(run: Run, sync: Sync, attempt: Attempt, reason: str) -> d.Decision:
    """Of the survivors, or none."""
    if attempt.plan.attempt >= MAX_ATTEMPTS:
        return d.Abandon(reason=f"{MAX_ATTEMPTS} attempts failed, the last one because: {reason}")
    survivors = set(sync.survivors())
    able = [s for s in run.members.live() if s.site_id in survivors and s.site_id in sync.ready]
    if not able and sync.exclusions.failed():
        return d.Abandon(reason=reason)
    if len(able) < run.settings.quorum:
        return d.CollectAgain(reason)
    return _propose(run, sync, able, reason, sync.late)
