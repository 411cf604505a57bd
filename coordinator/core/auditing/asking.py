"""A site is asked to average a chunk once more."""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.core.auditing.audits import Audit
from atoll.coordinator.core.events import AuditsEndedRecord
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites import liveness
from atoll.coordinator.core.sites.membership import Site, Standing
from atoll.protocol import messages as m


def may_be_asked(run: Run, member: m.Member) -> Site | None:
    """The contributor, if it is here as it was: it has the payload, and what it contributed."""
    site = run.members.by_id(member.site_id)
    if site is None or site.start != (member.site_id, member.incarnation) or site.stream is None:
        return None
    return site if site.standing is Standing.MEMBER else None


def ask(run: Run, audit: Audit, site: Site) -> None:
    """Contributors that it cannot dial are to dial it. Requires that it may be asked."""
    assert site.stream is not None
    until = run.now + _limit_s(run, audit)
    question = run.auditing.ask(audit, site_id=site.site_id, stream=site.stream, until=until)
    run.send(site, replace(audit.asked, number=question.number))
    for member in audit.asked.contributors:
        contributor = run.members.by_id(member.site_id)
        if contributor is not None and member.site_id in site.unreachable_site_ids:
            run.send(contributor, m.DialBack(member=site.member()))


def end(run: Run, audit: Audit) -> None:
    """Nobody is asked about it any more, after a restart neither."""
    if run.auditing.end(audit):
        run.persist(AuditsEndedRecord(audit.asked.commit))


def _limit_s(run: Run, audit: Audit) -> float:
    """To fetch the chunk of each contributor, after the audits that the site has before it."""
    num_bytes = len(audit.asked.contributors) * run.chunk_sizes.bytes_of(audit.asked.chunk, 1)
    one_s = liveness.IDLE_STALLS * run.limits.stall_s + num_bytes / run.limits.slowest_bytes_per_s
    return one_s * max(1, len(run.auditing.open))
