"""Contributions that a reducer finds absurd: left out of the sync by name, and judged anew by others in the next one.

One reducer's word leaves a site out of one sync, and the reducer itself reduces nothing until that sync is committed
nor in the next. Only a site that is left out twice, without a commit that it contributed to in between, is evicted: the
second word is another's, wherever another could reduce. See docs/decisions/0014-unusable-contributions.md.
"""

from __future__ import annotations

import logging

from atoll.coordinator.core.events import ExclusionRecord
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync.syncs import Attempt, Sync
from atoll.protocol import messages as m


def accuse(attempt: Attempt, sync: Sync, reducer: Site, message: m.ExchangeFailed) -> None:
    """`reducer` has no average of a tensor. The first one of an attempt counts; others judge in the next."""
    sync.no_average_at.add(reducer.site_id)
    if attempt.no_average:
        return
    attempt.no_average = f"{reducer.label} cannot average {message.tensor!r}: {message.text}"
    attempt.accused = {
        o.site_id: f"its contribution to {message.tensor!r} has norm {o.norm:.3g}, above {o.limit:.3g}"
        for o in message.outliers
        if o.site_id in attempt.ids()
    }
    attempt.accused_by = reducer.site_id


def exclude(run: Run, sync: Sync, attempt: Attempt) -> str:
    """Who is accused contributes to this sync no more; why, in words.

    An absurd contribution stands out from most. Where most are said to be, that is believed of two attempts alone.
    """
    plan, most = attempt.plan, max(1, len(attempt.ids()) // 2)
    reducer = run.members.by_id(attempt.accused_by)
    assert reducer is not None, "who was in the run keeps its id"
    sync.num_accused.update(tuple(attempt.accused))
    if len(attempt.accused) > most:
        attempt.accused = {i: words for i, words in attempt.accused.items() if sync.num_accused[i] > 1}
    reasons = []
    for site_id, words in sorted(attempt.accused.items()):
        site = run.members.by_id(site_id)
        if site is None or attempt.incarnation_of(site_id) != site.incarnation or not site.live:
            continue  # lost meanwhile
        reason = f"{site.label} is left out of sync {plan.sync}: {words}, as {reducer.label} finds"
        reasons.append(reason)
        again = run.exclusions.stands(site)
        record = ExclusionRecord(
            sync=plan.sync,
            attempt=plan.attempt,
            site_id=site_id,
            incarnation=site.incarnation,
            by_site_id=reducer.site_id,
            reason=reason[:1024],
        )
        run.persist(record)
        run.exclusions.note(record)
        sync.failed[site_id] = reason
        sync.excluded.add(site_id)
        run.report(logging.WARNING, reason)
        if again:
            run.exclusions.forget(site_id)
            run.trouble.receive_only.note([site_id], plan.sync)
            run.evict(site, f"it was left out of two syncs in a row: {words}; it begins anew from the run's state")
    return "; ".join(reasons) or attempt.no_average


def leave_out(run: Run, site_id: int, commit: int) -> None:
    """From the sync that was opened when the run had gone back to `commit`."""
    site, sync = run.members.by_id(site_id), run.sync
    if site is None or sync is None:
        return
    reason = f"{site.label} is left out of sync {sync.open.sync}: its contribution to commit {commit + 1} stood out"
    record = ExclusionRecord(
        sync=sync.open.sync, attempt=0, site_id=site_id, incarnation=site.incarnation, by_site_id=0, reason=reason
    )
    run.persist(record)
    run.exclusions.note(record)
    sync.failed[site_id] = reason
    sync.excluded.add(site_id)
    run.report(logging.WARNING, reason)
