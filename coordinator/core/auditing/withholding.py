"""A reducer that gives auditors nothing of the error that it added to an average: without that nobody can average once
more, so a liar would keep silent.

A site may be dead, started again, or behind a link that is cut, and is not judged for that. What is judged is silence
towards two sites in several rounds, each after a commit in which the reducer exchanged with both of them. See
docs/decisions/0069-audited-reducers.md, "Errors of averages".
"""

from __future__ import annotations

import logging

from atoll.coordinator.core.auditing import sentencing
from atoll.coordinator.core.auditing.asking import ask, may_be_asked
from atoll.coordinator.core.auditing.audits import Accused, Audit
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site
from atoll.protocol import messages as m
from atoll.protocol.plans import reducing
from atoll.protocol.sync_settings import KEPT_SYNCS

WITNESSES = 2
ROUNDS = 3
"""In each of which both of them got nothing."""
MOST_SYNCS = KEPT_SYNCS - 2
"""Since the one that is audited: a reducer keeps its errors for longer."""


def heard(run: Run, audit: Audit, witness: Site) -> bool:
    """That site got nothing. Whether the audit goes on by this rule; else another site is asked."""
    reducer = may_be_asked(run, audit.reducer)
    if reducer is None or _is_old(run, audit) or reducer.site_id in witness.unreachable_site_ids:
        return False
    rounds = audit.withhold(witness.site_id)
    run.report(logging.WARNING, f"audit: {reducer.label} gives {witness.label} nothing of its error, time {rounds}")
    if len(audit.withheld) < WITNESSES:
        return False
    if min(audit.withheld.values()) >= ROUNDS:
        labels = " and ".join(run.members.known(site_id).label for site_id in audit.withheld)
        why = f"in {ROUNDS} rounds it gave {labels} nothing of the error that it says it added"
        why += f" to chunk {audit.asked.chunk}, and exchanged with both of them meanwhile"
        sentencing.accuse(run, audit, [Accused(site_id=reducer.site_id, why=why, is_silent=True)])
    elif not _ask_witness(run, audit, below=rounds):
        audit.rest(True)
    return True


def committed(run: Run, plan: m.Plan, commit: m.Commit) -> list[Audit]:
    """After a commit the next round begins, if the reducer has exchanged with its witnesses in it. Audits that can be
    settled no more."""
    ids, reducers, over = {c.site_id for c in commit.contributors}, reducing(plan), []
    for audit in [audit for audit in run.auditing.open if audit.rests]:
        reducer = may_be_asked(run, audit.reducer)
        if reducer is None or _is_old(run, audit):
            over.append(audit)
        elif ids.issuperset({reducer.site_id, *audit.withheld}) and (
            reducer.site_id in reducers or reducers.issuperset(audit.withheld)
        ):
            audit.rest(not _ask_witness(run, audit, below=ROUNDS))
    return over


def undecided(run: Run, audit: Audit) -> None:
    """It ends without an answer. Whoever gave its error to nobody, or was started again meanwhile, averages nothing for
    a while: that judges nobody, and a liar gains little by it."""
    is_gone = may_be_asked(run, audit.reducer) is None
    if len(audit.withheld) >= WITNESSES or (audit.withheld and is_gone):
        run.trouble.reduce_nothing.note([audit.reducer.site_id], run.last_sync)


def not_heard(run: Run, audit: Audit) -> bool:
    """The commit is void. A reducer that was silent to both of its witnesses averages nothing for a while, as where
    nobody is left to ask; one that was silent to a single site may be what it says, and cannot bring this about.
    Whether it was so."""
    was_silent = len(audit.withheld) >= WITNESSES and not audit.accused
    if was_silent:
        run.trouble.reduce_nothing.note([audit.reducer.site_id], run.last_sync)
    return was_silent


def _ask_witness(run: Run, audit: Audit, *, below: int) -> bool:
    """The first that has said so in fewer rounds. Whether one can be asked."""
    members = {member.site_id: member for member in audit.asked.contributors}
    for site_id in sorted(audit.withheld, key=lambda site_id: audit.withheld[site_id]):
        site = may_be_asked(run, members[site_id])
        if audit.withheld[site_id] < below and site is not None:
            ask(run, audit, site)
            return True
    return False


def _is_old(run: Run, audit: Audit) -> bool:
    return run.last_sync - audit.asked.sync > MOST_SYNCS
