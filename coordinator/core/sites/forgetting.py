"""Sites that came, never contributed and have gone: only the newest of them stay known, and those
that were found out.

Whoever comes and goes under ever new names would fill the store, the status and the memory. A site that comes back soon
is the one it was; ids are never given again (rule 6).
"""

from __future__ import annotations

from atoll.coordinator.core.events import ForgetRecord
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site

KEPT_GONE = 64
KEPT_STRUCK = 1024
"""Of those that were found out: a crowd of passers-by does not clear anybody's name."""


def advance(run: Run) -> None:
    """Forgets sites beyond those that are kept, with their lines and what was held against them, and persists that."""
    gone = [s for s in run.members.gone() if not s.contributed]
    if len(gone) <= min(KEPT_GONE, KEPT_STRUCK):
        return
    named = set[int]().union(*(sync.named() for sync in run.lanes.values()))
    gone = [s for s in gone if s.site_id not in named]
    passers_by = _beyond(run, [s for s in gone if not s.conduct.strikes], KEPT_GONE)
    found_out = _beyond(run, [s for s in gone if s.conduct.strikes], KEPT_STRUCK)
    forgotten = [*passers_by, *found_out]
    if not forgotten:
        return
    run.persist_ledger()
    for site in forgotten:
        run.members.forget(site)
        run.ledger.forget(site.site_id)
        run.left_out.forget(site.site_id)
        run.trouble.forget(site.site_id)
        run.curves.forget(site.site_id)
    site_ids = tuple(sorted(site.site_id for site in forgotten))
    last_id, last_sync = run.members.last_id, run.last_sync
    run.persist(ForgetRecord(site_ids=site_ids, last_site_id=last_id, last_sync=last_sync))


def _beyond(run: Run, sites: list[Site], num_kept: int) -> list[Site]:
    """Those that go: with the fewest strikes, first who was not heard of for longest, or came first where that was
    before this start of the coordinator. Whoever may hold the newest commit is waited for by a rollback, and goes last
    of them."""
    num_beyond = len(sites) - num_kept
    if num_beyond <= 0:
        return []
    holds_newest = {s: s.left_with is not None and s.may_hold >= run.log.last for s in sites}
    return sorted(sites, key=lambda s: (s.conduct.strikes, holds_newest[s], s.heard_at, s.site_id))[:num_beyond]
