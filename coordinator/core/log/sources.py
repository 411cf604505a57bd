"""Who has a state, for those who fetch one."""

from __future__ import annotations

from atoll.coordinator.core.log import donors as listed
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site
from atoll.protocol import messages as m
from atoll.protocol.messages import RefusedKind


def find_sources(run: Run, site: Site, message: m.FindSources) -> None:
    """Tells a site that fetches a state who has it; a site for which there is nobody yet is told later."""
    asked_from = max(message.after_commit, message.lacks_commit)
    if run.members.is_void(site, asked_from):
        return  # or it means a void commit, and asks again when its disk is rolled back
    site.num_sources_asked += 1
    sources = sources_for(run, site, message)
    own_log_ends = not message.has_state or message.lacks_commit == message.after_commit + 1
    if run.finished is not None and not sources.donors and (own_log_ends or not sources.commits):
        run.refuse(
            site.stream,
            RefusedKind.STATE,
            f"run {run.run_id!r} is over at commit {run.finished.commit} and no site that holds its state is left",
        )
        return
    site.looks_for_sources(message, newest=run.log.last, found=bool(sources.donors))
    run.send(site, sources)
    _have_it_dialled(run, site, sources, message.undialled_site_ids)


def _have_it_dialled(run: Run, site: Site, sources: m.Sources, donor_ids: tuple[int, ...]) -> None:
    """By those of its donors that it cannot dial."""
    named = {donor.site_id for donor in sources.donors}
    call = m.DialBack(member=site.member())
    for donor_id in dict.fromkeys(donor_ids):
        donor = run.members.by_id(donor_id)
        if donor is not None and donor_id in named:
            run.send(donor, call)


def sources_for(run: Run, site: Site, request: m.FindSources) -> m.Sources:
    """Donors hold a state that is attested, or, before commit 0 is, the one that the seeder claims."""
    known = run.log.attested
    if not known and run.claim is not None:
        known = {0: run.claim}
    if not known:
        return m.Sources()
    commits = _listed_after(run, request.after_commit) if request.has_state else ()
    least = request.after_commit + 1 if commits else 0  # whoever lacks payloads gets nothing from others who do
    holders = [
        s
        for s in run.members.connected()
        if s is not site
        and s.applied is not None
        and s.applied >= least
        and known.get(s.applied, s.state_hash) == s.state_hash
    ]
    donors = tuple(
        m.Donor(
            site_id=s.site_id,
            incarnation=s.incarnation,
            address=s.address,
            commit=s.applied or 0,
            name=s.certified_name,
        )
        for s in listed.chosen(holders, site, request.undialled_site_ids)
    )
    if run.log.attested:
        attested = run.log.attestations({d.commit for d in donors})
    else:
        attested = tuple(m.Attestation(commit=n, state_hash=h) for n, h in known.items())
    if not commits and not (request.has_state and request.after_commit == run.log.last):
        commits = next((c for a in attested if (c := _listed_after(run, a.commit))), ())
    touched = run.log.touched(commits[0].commit - 1 if commits else run.log.last)
    return m.Sources(attested=attested, donors=donors, commits=commits, touched=touched)


def _listed_after(run: Run, commit: int) -> tuple[m.Commit, ...]:
    """Empty if more commits follow than one message may list."""
    found = run.log.after(commit)
    return found if len(found) <= m.MAX_LOG_COMMITS else ()


def answer_waiting(run: Run) -> None:
    """Sites for which there was nobody yet, once there is."""
    for site in run.members.connected():
        if site.waits_for_sources is not None:
            sources = sources_for(run, site, site.waits_for_sources)
            if sources.donors:
                site.finds_sources()
                run.send(site, sources)
