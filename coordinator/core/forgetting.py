"""Sites that came, never contributed and have gone: only the newest of them stay known.

Whoever comes and goes under ever new names would fill the store, the status and the memory. A site that comes back soon
is the one it was; ids are never given again (rule 6).
"""

from __future__ import annotations

from atoll.coordinator.core.events import ForgetRecord
from atoll.coordinator.core.membership import Site
from atoll.coordinator.core.run import Run

KEPT_GONE = 64


def advance(run: Run) -> None:
    gone = [s for s in run.members.gone() if not s.contributed and not _is_in_sync(run, s)]
    num_forgotten = len(gone) - KEPT_GONE
    if num_forgotten <= 0:
        return
    run.persist_ledger()
    # Whoever may hold the newest commit is waited for by a rollback, and goes last.
    gone.sort(key=lambda s: (s.left_with is not None and s.may_hold >= run.log.last, s.epoch))
    for site in gone[:num_forgotten]:
        run.members.forget(site)
        run.ledger.forget(site.site_id)
        run.exclusions.forget(site.site_id)
        run.trouble.forget(site.site_id)
    forgotten = tuple(sorted(site.site_id for site in gone[:num_forgotten]))
    run.persist(ForgetRecord(site_ids=forgotten, last_site_id=run.members.last_id))


def _is_in_sync(run: Run, site: Site) -> bool:
    sync = run.sync
    if sync is None:
        return False
    if site.site_id in sync.expected or site.site_id in sync.ready or site.voided_sync == sync.open.sync:
        return True
    plan = sync.attempt.plan if sync.attempt is not None else None
    return plan is not None and any(m.site_id == site.site_id for m in (*plan.contributors, *plan.receivers))
