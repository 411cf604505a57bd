"""After a commit some of its chunks are averaged once more, by sites that did not reduce them. A difference is computed
by a third site before anybody is judged: whoever differs may lie, or have bad memory. Two against one decide who is
wrong; what follows for that site is in `sentencing`.

See docs/decisions/0069-audited-reducers.md.
"""

from __future__ import annotations

import logging

from atoll.coordinator.core import events as e
from atoll.coordinator.core.auditing import left_over, sentencing, withholding
from atoll.coordinator.core.auditing.asking import ask, end, may_be_asked
from atoll.coordinator.core.auditing.audits import Accused, Audit, audits_of
from atoll.coordinator.core.auditing.drawing import draw, drawn_in_words, is_drawn
from atoll.coordinator.core.auditing.signed import made_by
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.protocol import messages as m
from atoll.protocol.messages import AuditOutcome
from atoll.protocol.plans import top_of

MAX_ASKED = 5
"""Sites, for one chunk: an auditor, a third one, and others in place of those who cannot find out."""


def begin(run: Run, commit: m.Commit, attempt: Attempt) -> None:
    """The commit is made, and its payloads are what they are: from now on it is known what is audited."""
    num, plan, roots = run.settings.sync.audits, attempt.plan, attempt.weights.roots
    _begin(run, run.auditing.take_left_open())  # all contributors are here now
    if not num:
        return
    for audit in withholding.committed(run, plan, commit):
        _end_undecided(run, audit)
    left_over.note(run, commit, attempt)
    sizes, secret = run.chunk_sizes.of_sync(commit.fragment), run.auditing.secret
    if commit.final or not roots or not is_drawn(secret, commit.payload_digest, run.settings.sync):
        return
    asked, reducers = [], []
    for number in range(num if sizes.num_payloads else 0):
        place = draw(secret, commit.payload_digest, "chunk", number, sizes.num_payloads)
        chunk = sizes.with_payload(place)
        drawn = drawn_in_words(secret, commit.commit, commit.payload_digest, number, place, sizes.num_payloads)
        run.report(logging.INFO, drawn)
        tree = next(tree for tree in plan.trees if chunk < tree.first_chunk + tree.num_chunks)
        reducers.append(top_of(tree))
        asked.append(
            m.AuditChunk(
                number=0,
                commit=commit.commit,
                sync=plan.sync,
                attempt=plan.attempt,
                term=plan.term,
                fragment=plan.fragment,
                base_commit=plan.base_commit,
                contributors=commit.contributors,
                roots=roots,
                chunk=chunk,
                signatures=attempt.weights.signatures,
                made=made_by(attempt, top_of(tree)),
                before=left_over.before(run, plan, chunk, commit.contributors[top_of(tree)]),
            )
        )
    record = e.OpenAuditsRecord(
        commit=commit.commit, payload_digest=commit.payload_digest, asked=tuple(asked), reducers=tuple(reducers)
    )
    _make_room(run, len(asked))
    if asked and run.auditing.has_room(len(asked)):
        run.persist(record)
        _begin(run, audits_of(record))
    else:
        run.auditing.num_unknown += len(asked)


def _make_room(run: Run, num: int) -> None:
    """The oldest audits end that nobody can compute any more. Sites that do not answer hold no place for longer: else
    they would end all audits."""
    gone = [audit for audit in run.auditing.open if not audit.accused and sentencing.is_gone(run, audit)]
    while gone and not run.auditing.has_room(num):
        audit = gone.pop(0)
        if audit.question is not None:
            run.auditing.silent[audit.question.site_id] += 1
        _end_undecided(run, audit)


def _begin(run: Run, audits: list[Audit]) -> None:
    """All of a commit, before one of them can end."""
    run.auditing.begin(audits)
    for audit in audits:
        _ask_next(run, audit)


def audited(run: Run, site: Site, message: m.ChunkAudited) -> None:
    """What a site has found. Nothing if it was not asked, or too long ago."""
    audit = run.auditing.answered(message.number, site.site_id)
    if audit is None:
        return
    if audit.accused:
        sentencing.answered(run, audit, message)
        return
    match message.outcome:
        case AuditOutcome.RIGHT:
            _right(run, audit, site)
        case AuditOutcome.WRONG:
            _wrong(run, audit, site, message.payload_hash)
        case _:
            _unknown(run, audit, site, message)


def advance(run: Run) -> None:
    """Sites that are gone, or have not answered in time, are passed over. An accused site is judged as soon as nobody
    keeps what it would answer from: until it is judged it may lie on."""
    for audit in list(run.auditing.open):
        question = audit.question
        if question is None:
            continue
        site = run.members.by_id(question.site_id)
        is_over = run.now >= question.until or (audit.accused and sentencing.is_gone(run, audit))
        if site is None or not site.live or site.stream != question.stream or is_over:
            run.auditing.silent[question.site_id] += 1
            run.auditing.answered(question.number, question.site_id)
            if audit.accused:
                sentencing.passed_over(run, audit)
            else:
                _ask_next(run, audit)


def gone_back(run: Run, last: int) -> None:
    """Commits after the newest one are void: no site has their payloads any more. Who is found out already and was not
    heard yet can compute nothing either, and has bad memory in doubt. `last`: the newest of the void ones. (The store
    has forgotten these audits with the rollback.)"""
    for audit in run.auditing.void_after(run.log.last):
        sentencing.not_heard(run, audit, last)
        run.auditing.num_unknown += withholding.not_heard(run, audit)
    for site in run.members.sites.values():
        if site.conduct.went_back(run.log.last):
            run.persist_site(site)


# --- whom


def _ask_next(run: Run, audit: Audit) -> None:
    """The next site that is drawn of those that can tell; without one the audit ends without a judgement."""
    sites = _able(run, audit) if len(audit.asked_site_ids) < MAX_ASKED else []
    if not sites:
        _end_undecided(run, audit)
        return
    purpose = f"site for chunk {audit.asked.chunk}"
    site = sites[draw(run.auditing.secret, audit.payload_digest, purpose, len(audit.asked_site_ids), len(sites))]
    ask(run, audit, site)


def _able(run: Run, audit: Audit) -> list[Site]:
    """Contributors have the payload. Those who cannot dial some contributor are asked where nobody else is left: the
    contributor dials them."""
    ids = {c.site_id for c in audit.asked.contributors}
    found = []
    for member in audit.asked.contributors:
        site = may_be_asked(run, member)
        if site is not None and site.site_id not in {audit.reducer.site_id, *audit.asked_site_ids}:
            found.append(site)
    return [s for s in found if ids.isdisjoint(s.unreachable_site_ids)] or found


# --- what follows


def _right(run: Run, audit: Audit, site: Site) -> None:
    """A first word closes the audit. After an accusation it is one against one, and the reducer: two of three."""
    if not audit.accusers:
        run.auditing.num_right += 1
        end(run, audit)
        return
    why = f"it says that {_chunk(audit)} is wrong, and it comes out as it is at {site.label}"
    owns_up_by = AuditOutcome.RIGHT, None
    accused = [Accused(site_id=site_id, why=why, owns_up_by=owns_up_by) for site_id in audit.accusers]
    sentencing.accuse(run, audit, accused)


def _wrong(run: Run, audit: Audit, site: Site, payload_hash: bytes) -> None:
    """A first one is an accusation. A second one with the same hash is the judgement; with another one a word more."""
    agreeing = [other for other, found in audit.accusers.items() if found == payload_hash and payload_hash]
    audit.accusers[site.site_id] = payload_hash
    run.report(
        logging.WARNING,
        f"audit: {_chunk(audit)} comes out as {payload_hash.hex()[:12]} at {site.label}, and is another one",
    )
    if not agreeing:
        audit.hear_again(but=site.site_id)
        _ask_next(run, audit)
        return
    others = ", ".join(run.members.known(i).label for i in (*agreeing, site.site_id))
    why = f"{_chunk(audit)}, which it made, is not the average of what was contributed, as found by {others}"
    differing = f"{_chunk(audit)} comes out as something else there than at {others}"
    owns_up_by = AuditOutcome.WRONG, payload_hash
    accused = [Accused(site_id=audit.reducer.site_id, why=why, owns_up_by=owns_up_by)]
    accused += [
        Accused(site_id=other, why=differing, owns_up_by=owns_up_by)
        for other, found in audit.accusers.items()
        if found != payload_hash
    ]
    advice = f"commit {audit.asked.commit} holds a payload that is wrong, and every site has applied it; to undo it: "
    sentencing.accuse(run, audit, accused, f"{advice}atoll rollback --to {audit.asked.commit - 1}")


def _unknown(run: Run, audit: Audit, site: Site, message: m.ChunkAudited) -> None:
    """Another site is asked. A contributor that gives two sites what it had not said is found out; one that gives
    nothing may be gone."""
    ids = {c.site_id for c in audit.asked.contributors}
    run.report(logging.INFO, f"audit: {site.label} cannot tell whether {_chunk(audit)} is right: {message.text}")
    for site_id in ids.intersection(message.silent_site_ids):
        run.auditing.silent[site_id] += 1
    for site_id in ids.intersection(message.refuted_site_ids) - {site.site_id}:
        by = audit.refuted_by.setdefault(site_id, set())
        by.add(site.site_id)
        label = run.members.known(site_id).label
        what = f"something else than a root that it said in sync {audit.asked.sync} is over"
        run.report(logging.WARNING, f"audit: {label} gave {site.label} {what}")
        if len(by) == 2:
            why = f"what it gave is not what it has said, by a root, of sync {audit.asked.sync}"
            sentencing.accuse(run, audit, [Accused(site_id=site_id, why=why)])
            return
    if message.withheld and withholding.heard(run, audit, site):
        return
    _ask_next(run, audit)


def _end_undecided(run: Run, audit: Audit) -> None:
    """Nobody is left to ask. An accusation that no other site could look at is for a person."""
    run.auditing.num_unknown += 1
    withholding.undecided(run, audit)
    end(run, audit)
    if audit.accusers:
        says = " and ".join(run.members.known(i).label for i in audit.accusers)
        reducer = run.members.known(audit.reducer.site_id).label
        run.report(
            logging.ERROR,
            f"audit: {says} says that {_chunk(audit)}, which {reducer} made, is wrong, and no other site could tell: "
            "one of them lies, or has bad memory",
        )


def _chunk(audit: Audit) -> str:
    return f"the payload of chunk {audit.asked.chunk} in commit {audit.asked.commit}"
