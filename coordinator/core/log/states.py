"""Who holds which state: commit 0 and its seeder, Applied, attestation."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from atoll.coordinator.core.events import AttestationRecord, Recompute
from atoll.coordinator.core.log import evidence, sources
from atoll.coordinator.core.log.disputes import Asked, Dispute
from atoll.coordinator.core.run import Refusal, Run
from atoll.coordinator.core.sites.conduct import Cause
from atoll.coordinator.core.sites.membership import Site, Standing
from atoll.coordinator.core.sync.syncs import Sync
from atoll.protocol import messages as m
from atoll.protocol.messages import AdmittedAs, RefusedKind

WRONG_STORE = (
    "the coordinator was started with an old or a wrong store: start it with the newest copy; if that is lost, start a "
    "new run from a saved model"
)


def ahead(run: Run, name: str, commit: int, branch: int) -> Refusal:
    """Of a site that has a commit which the log lacks: a wrong store, for an operator to see."""
    theirs, ours = ((f"{c} (branch {b})" if b else f"{c}") for c, b in ((commit, branch), (run.log.last, run.branch)))
    text = f"{name} is at commit {theirs} of run {run.run_id!r}, the coordinator's log ends at {ours}: {WRONG_STORE}"
    return RefusedKind.STATE, text


# --- what a site says it holds


def take(run: Run, site: Site, commit: int, state_hash: bytes, *, has_computed: bool = False) -> None:
    """The site holds this state; the hash is compared once that can be decided (`advance`). `has_computed`: by its word
    of before."""
    if site.applied is not None and commit < site.applied:
        run.log.goes_back(commit, site.site_id)
    is_behind = run.log.last - commit >= run.settings.sync.most_in_flight  # fewer may come at once
    site.takes(commit, state_hash, is_behind=is_behind, run_step=run.log.run_step)
    _report(run, site, commit, state_hash, has_computed=has_computed)


def exchanged_from(run: Run, site: Site, commit: int, state_hash: bytes) -> None:
    """The site held this state when its exchange ended. It may have applied later commits since, of other fragments:
    then it has not gone back."""
    if site.holds(commit + 1):
        _report(run, site, commit, state_hash)
    else:
        take(run, site, commit, state_hash)


def _report(run: Run, site: Site, commit: int, state_hash: bytes, *, has_computed: bool = False) -> None:
    if commit > 0 and (site.site_id in run.log.contributors(commit)):
        run.log.note(commit, site.site_id, state_hash)
    elif has_computed or run.log.is_heard(commit, site.site_id):
        run.log.witness(commit, site.site_id, state_hash)


def resume(run: Run, site: Site, hello: m.Hello) -> None:
    """An admitted site is back on a new stream: everything that is pending."""
    if hello.has_state:
        _hear(run, site, hello.last_commit, hello.state_hash)
        take(run, site, hello.last_commit, hello.state_hash)
        send_pending(run, site)
    elif site.standing is Standing.MEMBER:
        run.report(logging.WARNING, f"{site.label} came back without the state it had")
        site.is_without_state()
        site.counts_from(None)
        run.log.forget(site.site_id)
    if site.applied is None:
        for sync in run.lanes.values():
            sync.unexpect(site.site_id)


def send_commits(run: Run, site: Site) -> None:
    """Those that the site lacks, but no more than its own payload log may lead it through."""
    assert site.applied is not None
    for commit in run.log.after(site.applied)[: run.log.num_kept]:
        run.send(site, commit)


def send_pending(run: Run, site: Site) -> None:
    """The commits that the site lacks, or the syncs under way."""
    send_commits(run, site)
    for sync in run.lanes.values():
        _send_sync(run, site, sync)


def _send_sync(run: Run, site: Site, sync: Sync) -> None:
    at_base, base = site.holds(sync.open.base_commit), run.log.record(sync.open.base_commit)
    following = base.commit.next if base is not None else None
    # What follows the base its commit says, to a site on its way there; not which syncs were opened beside others.
    if at_base or (base is not None and (following is None or following.fragment != sync.open.fragment)):
        run.send(site, sync.open)
    # A plan that was made ahead is kept until the site has applied the commit before.
    attempt = sync.attempt
    if attempt is not None and (at_base or not attempt.is_weighed):
        plan = attempt.plan
        listed = [(member.site_id, member.incarnation) for member in (*plan.contributors, *plan.receivers)]
        if site.start in listed and not sync.exclusions.is_void(site.start):
            run.send(site, plan)
            if attempt.is_weighed:
                run.send(site, attempt.weights_message())
            if attempt.influences:
                run.send(site, attempt.influences_message())


def applied(run: Run, site: Site, message: m.Applied) -> None:
    """The site holds that commit. It is sent what follows, unless that is on its way to it already."""
    if run.members.is_void(site, message.commit):
        return
    if message.commit > run.log.last:
        run.refuse(site.stream, *ahead(run, site.label, message.commit, run.branch))
        return
    news = site.standing is not Standing.MEMBER or site.applied != message.commit
    joined, fetched = site.standing is not Standing.MEMBER, site.fetches
    contributed = site.site_id in run.log.contributors(message.commit)
    _hear(run, site, message.commit, message.state_hash)
    take(run, site, message.commit, message.state_hash)
    if run.finished is not None:
        if message.commit == run.finished.commit:
            run.send(site, run.finished_message())
    elif joined or (news and (fetched or not contributed)):
        # Contributors have the next sync from the commit itself, unless they had to fetch it.
        send_pending(run, site)


def _hear(run: Run, site: Site, commit: int, state_hash: bytes) -> None:
    """A member that has come to `commit` from those before it has computed its state, though it was no part of it."""
    has_come = site.standing is Standing.MEMBER and site.applied is not None and site.applied < commit
    if has_come and not site.fetches and site.site_id not in run.log.contributors(commit):
        run.log.witness(commit, site.site_id, state_hash)


# --- attestation


def advance(run: Run) -> None:
    """Whatever reports of state hashes now decide."""
    if not run.started and 0 not in run.log.attested:
        _advance_commit_0(run)
    _evict_who_contradicts_itself(run)
    if run.dispute is not None:
        run.dispute.look_anew()
    undecided: set[int] = set()
    for commit in run.log.reported():
        awaited = _contributors_here(run, commit)
        judge(run, commit)
        is_disputed = bool(run.disputed) and run.dispute is not None and run.dispute.commit <= commit
        if is_disputed or not run.log.has_reported(commit, awaited):
            undecided.add(commit)
    if not run.disputed:
        _end_dispute(run)
    elif run.dispute is not None:
        _doubt(run, run.dispute)
    for site in run.members.live():
        known = run.log.attested.get(site.applied) if site.applied is not None else None
        if known is None or site.state_hash == known or run.log.is_heard(site.applied or 0, site.site_id):
            continue
        # The first report attests, and may be wrong: whoever differs is heard once all contributors have been.
        if site.applied not in undecided or any(site.site_id in a.done for a in run.attempts):
            _evict_for_state(run, site, site.applied or 0, known)
    _say_the_last_state(run)
    sources.answer_waiting(run)


def _say_the_last_state(run: Run) -> None:
    """Once nobody can contradict it any more: sites put their models in place then."""
    if run.finished is None or run.last_state or run.disputed:
        return
    commit = run.finished.commit
    known = run.log.attested.get(commit)
    if known is None or not run.log.has_reported(commit, _contributors_here(run, commit)):
        return
    run.last_state = known
    run.send_all((s for s in run.members.sites.values() if s.site_id), run.finished_message())


def _contributors_here(run: Run, commit: int) -> list[int]:
    contributors = run.log.contributors(commit)
    return [s.site_id for s in run.members.live() if s.site_id in contributors]


def judge(run: Run, commit: int) -> None:
    """Takes from all that is said of one commit what follows now: it is attested, somebody is evicted, or it is
    disputed."""
    if run.log.is_agreed(commit):
        return
    live = {s.site_id for s in run.members.live()}
    present = {s.site_id: s.state_hash for s in run.members.live() if s.applied == commit}
    later = [s.site_id for s in run.members.live() if s.applied is not None and s.applied > commit]
    contributors = [run.members.by_id(i) for i in run.log.contributors(commit)]
    hellos = [(s, s.hello) for s in contributors if s is not None and not s.live and s.stream is not None]
    starting = [
        h.state_hash if h.last_commit == commit else run.log.said(commit, s.site_id) or b""
        for s, h in hellos
        if h is not None and h.has_state and h.last_commit >= commit
    ]
    judgement = run.log.judge(commit, live, present, later=later, starting=starting)
    if judgement.attest is not None:
        old = run.log.attested.get(commit)
        if old is not None:
            run.report(
                logging.ERROR,
                f"commit {commit} has hash {judgement.attest.hex()[:12]}, not {old.hex()[:12]} as reported at first",
            )
        run.log.attest(commit, judgement.attest)
        run.persist(AttestationRecord(commit, judgement.attest))
    for site_id in judgement.losers:
        said, site = run.log.said(commit, site_id), run.members.by_id(site_id)
        run.log.forget(site_id)
        if site is not None and site.live:
            _evict_for_state(run, site, commit, judgement.against, held=said or b"")
    if len(judgement.claims) > 1 and not run.disputed:  # else one of an older commit is settled first
        _dispute(run, commit, judgement.claims)


def _evict_who_contradicts_itself(run: Run) -> None:
    """Each other word would be another dispute, with all its time. Whoever is alone says what it likes."""
    for site_id, why in run.log.take_contradicted().items():
        site = run.members.by_id(site_id)
        others = [s for s in run.members.live() if s.site_id != site_id and s.applied is not None]
        if site is not None and site.live and others:
            run.log.forget(site_id)
            run.evict(site, why, Cause.STATE)


def _dispute(run: Run, commit: int, claims: Mapping[bytes, tuple[int, ...]]) -> None:
    """Nothing is planned or committed until it is known who is wrong."""
    dispute, order = run.dispute, tuple(claims)
    if dispute is None or dispute.commit != commit:  # nobody gets time anew as another side comes or goes
        _end_dispute(run)
        dispute = run.dispute = Dispute(commit, order, run.now + run.limits.give_up_s)
        _doubt(run, dispute)
    dispute.claims = order
    if (asked := dispute.asked) is not None:
        site = run.members.by_id(asked.site_id)
        late = site if site is not None and site.live and run.now >= asked.until else None
        if late is not None or site is None or not site.live or site.stream != asked.stream:
            dispute.in_vain(asked, run.now)
        if late is not None:
            run.evict(late, f"it was asked for {asked.need.in_words()}, and has not answered", Cause.STATE)
            judge(run, commit)
            return
    holders = {claim: [s for i in ids if (s := run.members.by_id(i)) is not None] for claim, ids in claims.items()}
    found = evidence.look_into(run, dispute, holders)
    dispute.undecided = found if isinstance(found, str) else ""
    match found:
        case dict():
            _settle(run, commit, found)
            return
        case Asked():
            dispute.ask(found)
            evidence.ask(run, found)
        case Recompute():
            dispute.begin_sum(found)
            run.put_out(found)
    dispute.say(holders)
    for site in [s for sites in holders.values() for s in sites if s.holds(commit) and s.stream is not None]:
        said = (site.stream or 0, site.applied or 0, bool(dispute.undecided))  # what it holds came of what is disputed
        if dispute.told.get(site.site_id) != said:
            dispute.told[site.site_id] = said
            run.send(site, m.Disputed(commit=said[1], is_over=said[2]))


def _doubt(run: Run, dispute: Dispute) -> None:
    """What is attested of the commit, and of those that came of it, stands against nobody after a restart."""
    found = [n for n in run.log.attested if n >= dispute.commit and n not in dispute.doubted]
    for commit in found:
        run.persist(AttestationRecord(commit, b""))
    dispute.doubted += found


def drop_dispute(run: Run) -> None:
    """It was over another commit of that number."""
    run.dispute = None


def _end_dispute(run: Run, *, distrusted: Collection[int] = ()) -> None:
    """What is attested stands again, also after a restart, but for what sites alone said that were wrong in it."""
    dispute, run.dispute = run.dispute, None
    for commit in dispute.doubted if dispute is not None else ():
        if (known := run.log.attested.get(commit)) is not None and commit not in distrusted:
            run.persist(AttestationRecord(commit, known))


def _settle(run: Run, commit: int, wrong: Mapping[bytes, str]) -> None:
    """Who holds a state that is proved wrong, or has gone on from it, gives it up; `wrong` says why."""
    held = {s.site_id: run.log.said(commit, s.site_id) or b"" for s in run.members.live()}
    held |= {s.site_id: s.state_hash for s in run.members.live() if s.applied == commit}
    run.log.disprove(commit, wrong)
    for value, why in wrong.items():
        run.report(logging.ERROR, f"the state {value.hex()[:12]} of commit {commit} is wrong: {why}")
    losers = [site_id for site_id, value in held.items() if value in wrong]
    others = [s.state_hash for s in run.members.live() if s.site_id not in losers]
    _end_dispute(run, distrusted=run.log.distrust(commit, losers, others))
    judge(run, commit)  # whoever is left says what the run's is
    known = run.log.attested.get(commit, b"")
    for site in run.members.live():
        if (value := held.get(site.site_id, b"")) in wrong:
            _evict_for_state(run, site, commit, known, wrong[value], held=value)


def _evict_for_state(run: Run, site: Site, commit: int, known: bytes, why: str = "", *, held: bytes = b"") -> None:
    """`held`: the hash of the state that it had of that commit; empty: it has it now."""
    reason = (
        f"its state of commit {commit} has hash {(held or site.state_hash).hex()[:12]}, the run's is {known.hex()[:12]}"
        f"{f' ({why})' if why else ''}; it must fetch the state again"
    )
    for attempt in run.attempts:
        if site.site_id in attempt.ids():
            attempt.spoil(f"{site.label} took part from another state")
    run.evict(site, reason, Cause.STATE)


# --- commit 0


def drop_claim(run: Run) -> None:
    """The starting state is taken back."""
    run.claim = None


def needs_seeder(run: Run) -> bool:
    """Whether nobody makes the starting state, claims it, or has it."""
    seeding = any(s.standing is Standing.SEEDER for s in run.members.live())
    return not (seeding or run.started or run.claim is not None or 0 in run.log.attested)


def may_seed(run: Run, site: Site) -> bool:
    """Whether the site may make the starting state: of a run that goes on from a saved model, who brings that."""
    return not run.parent_json or (site.hello is not None and site.hello.from_saved_model)


def _advance_commit_0(run: Run) -> None:
    holders = [s for s in run.members.live() if s.applied == 0]
    if run.claim is not None and not any(s.state_hash == run.claim for s in holders):
        run.claim = None
    if run.claim is None and holders:
        run.claim = holders[0].state_hash
        run.report(logging.INFO, f"{holders[0].label} holds the starting state {run.claim.hex()[:12]}")
    if run.claim is not None:
        for site in [s for s in holders if s.state_hash != run.claim]:
            _evict_for_state(run, site, 0, run.claim)
        for site in run.members.live():
            if site.standing is Standing.SEEDER and site.applied is None:
                site.is_to(Standing.JOINER)  # another was first
                run.send(site, admitted(run, site))
        agreeing = [s for s in holders if s.state_hash == run.claim]
        if len(agreeing) >= min(2, run.settings.min_sites):
            run.log.attest(0, run.claim)
            run.persist(AttestationRecord(0, run.claim))
            names = ", ".join(s.label for s in agreeing)
            run.report(logging.INFO, f"commit 0 is attested with state {run.claim.hex()[:12]}, held by {names}")
            run.claim = None
    elif needs_seeder(run):
        candidates = [s for s in run.members.connected() if s.standing is Standing.JOINER and may_seed(run, s)]
        if candidates:
            site = candidates[0]
            site.is_to(Standing.SEEDER)
            site.finds_sources()
            run.report(logging.INFO, f"{site.label} is named to make the starting state")
            run.send(site, admitted(run, site))


def admitted(run: Run, site: Site) -> m.Admitted:
    """The answer to an offer: what the site is in the run."""
    return m.Admitted(
        site_id=site.site_id,
        admitted_as=AdmittedAs[site.standing.name],
        run_seed=run.settings.seed,
        state_hash=_other_hash(run, site) if site.standing is Standing.JOINER else b"",
        last_commit=run.log.last,
    )


def _other_hash(run: Run, site: Site) -> bytes:
    """Of the commit that the site came with, if its own is another."""
    hello = site.hello
    if hello is None or not hello.has_state:
        return b""
    known = run.log.attested.get(hello.last_commit, run.claim if hello.last_commit == 0 else None)
    return known if known is not None and known != hello.state_hash else b""


def num_holding_commit_0(run: Run) -> int:
    """Connected sites with the starting state that is attested, or claimed."""
    known = run.log.attested.get(0, run.claim)
    return sum(1 for s in run.members.connected() if s.applied == 0 and s.state_hash == known)
