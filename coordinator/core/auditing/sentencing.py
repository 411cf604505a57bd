"""Whom two sites have found out is asked to compute the chunk itself before it is judged. A site whose memory flipped a
bit finds what the others do, and owns up: it is sent away, with a word on its memory. One that denies, or says nothing,
has committed an offence: the first evicts, the second bans. So do more flipped bits than memory may have.

See docs/decisions/0069-audited-reducers.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from atoll.coordinator.core import events as e
from atoll.coordinator.core.audit import COORDINATOR
from atoll.coordinator.core.auditing.asking import ask, end, may_be_asked
from atoll.coordinator.core.auditing.audits import Accused, Audit
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.conduct import FAULT_COMMITS, Cause
from atoll.protocol import messages as m


def accuse(run: Run, audit: Audit, accused: Sequence[Accused], advice: str = "") -> None:
    """From now on nobody else is asked in this audit. It ends when all of them are judged; then people hear `advice`.
    (Not before: to follow it may make the commit void, and whoever is accused could not be asked any more.)"""
    audit.accused.extend(accused)
    audit.advice = advice
    _ask_next(run, audit)


def answered(run: Run, audit: Audit, found: m.ChunkAudited) -> None:
    """By the first of the accused."""
    if found.outcome is m.AuditOutcome.UNKNOWN:
        passed_over(run, audit)
        return
    accused = audit.accused.pop(0)
    _judge(run, audit, accused, Cause.MEMORY if accused.owns_up(found) else Cause.AUDIT)
    _ask_next(run, audit)


def passed_over(run: Run, audit: Audit) -> None:
    """The first of the accused has said nothing, in time or while it could."""
    accused = audit.accused.pop(0)
    if is_gone(run, audit):
        _judge(run, audit, accused, Cause.MEMORY, "when it was asked itself, what it takes was kept no more")
    else:
        _judge(run, audit, accused, Cause.AUDIT)
    _ask_next(run, audit)


def is_gone(run: Run, audit: Audit) -> bool:
    """Whether sites may keep no more what it takes to compute that chunk."""
    num_syncs, num_commits = run.last_sync - audit.asked.sync, run.log.last - audit.asked.commit
    return num_syncs >= run.settings.sync.num_kept_syncs or num_commits >= run.log.num_kept


def not_heard(run: Run, audit: Audit, newest: int) -> None:
    """The commit is void, so none of the accused can be asked any more: none denies. `newest`: when it was not yet."""
    run.auditing.num_wrong += bool(audit.accused)
    for accused in audit.accused:
        _judge(run, audit, accused, Cause.MEMORY, "the run has gone back, so it was not asked itself", newest=newest)


def _ask_next(run: Run, audit: Audit) -> None:
    members = {member.site_id: member for member in audit.asked.contributors}
    while audit.accused:
        accused = audit.accused[0]
        if accused.owns_up_by is not None and (site := may_be_asked(run, members[accused.site_id])) is not None:
            ask(run, audit, site)
            return
        _judge(run, audit, audit.accused.pop(0), Cause.SILENCE if accused.is_silent else Cause.AUDIT)
    if audit.advice:
        run.report(logging.ERROR, audit.advice)
    run.auditing.num_wrong += 1
    end(run, audit)


OWNED_UP = "computed once more there it is as the others say, so a bit flipped: test that machine's memory"


def _judge(
    run: Run, audit: Audit, accused: Accused, cause: Cause, owned_up: str = OWNED_UP, *, newest: int | None = None
) -> None:
    """`newest`: the commit of the run, if it is not the newest one now."""
    site = run.members.by_id(accused.site_id)
    if site is None:
        return  # it has gone, and is forgotten
    conduct, commit = site.conduct, audit.asked.commit
    newest = run.log.last if newest is None else newest
    match cause:
        case Cause.MEMORY:
            is_new = conduct.own_up(commit, newest)
        case Cause.SILENCE:
            is_new = conduct.withhold(commit, newest)
        case _:
            is_new = conduct.offend(commit, newest)
    if not is_new:
        return
    reason = f"an audit of commit {commit}: {accused.why}"
    too_often = ""
    if cause is Cause.SILENCE:
        if conduct.is_silent_too_often:
            too_often = f"this was the {len(conduct.silences)}th time within {FAULT_COMMITS} commits"
    elif cause is Cause.MEMORY:
        reason += f"; {owned_up}"
        if conduct.has_too_many_faults:
            too_often = f"this was the {len(conduct.faults)}th time within {FAULT_COMMITS} commits"
    elif conduct.is_second_offence:
        too_often = "this was not the first time"
    if too_often and (site.name not in run.banned or run.banned[site.name].until_s):
        run.ban(e.BanRecord(name=site.name, key_digest=site.key_digest, reason=reason[:1024]), cause)
        run.note(COORDINATOR, f"ban name={site.name!r}", reason)
        reason += f"; it is banned, as {too_often}"
    if site.live:
        run.evict(site, reason, cause, is_strike=False)
    run.persist_site(site)
