"""Contributions that cannot be used. See docs/decisions/0014-unusable-contributions.md.

Those that a reducer finds absurd are left out of the sync by name, and judged anew by others in the next one.
One reducer's word leaves a site out of one sync, and the reducer itself reduces nothing until that sync is committed
nor in the next. Only a site that is left out twice, without a commit that it contributed to in between, is evicted: the
second word is another's, wherever another could reduce.

Where most sites' loss is not finite since a commit, and was before, the run goes back by itself, once, without the site
whose contribution to that commit stood out, if one did. Where syncs are in flight sites may have applied more commits
by the time they see it, and a word of a later commit counts for an earlier one.
"""

from __future__ import annotations

import logging

from atoll.coordinator.core.events import ExclusionRecord
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.conduct import Cause
from atoll.coordinator.core.sites.membership import Site, Standing
from atoll.coordinator.core.sync.attempts import Attempt, NoAverage
from atoll.coordinator.core.sync.decision import GoBack
from atoll.coordinator.core.sync.exclusions import Kind
from atoll.coordinator.core.sync.syncs import Sync
from atoll.protocol import messages as m

LEAST_SHARE = 0.01
"""Of its limit: ten times the median of the others, where the limit is a thousand times it."""


def accuse(run: Run, sync: Sync, attempt: Attempt, reducer: Site, message: m.ExchangeFailed) -> None:
    """`reducer` has no average of a tensor, and names the contributions that it finds absurd."""
    reason = f"{reducer.label} cannot average {message.tensor!r}: {message.text}"
    sync.exclude(reducer.start, Kind.NO_AVERAGE, reason, run.now)
    accused = {
        o.site_id: f"its contribution to {message.tensor!r} has norm {o.norm:.3g}, above {o.limit:.3g}"
        for o in message.outliers
        if o.site_id in attempt.ids()
    }
    attempt.note_no_average(NoAverage(reason=reason, by_site_id=reducer.site_id, accused=accused))


def exclude(run: Run, sync: Sync, attempt: Attempt, found: NoAverage) -> str:
    """Who is accused contributes to this sync no more; why, in words.

    An absurd contribution stands out from most. Where most are said to be, that is believed of two attempts alone.
    """
    plan, accused = attempt.plan, found.accused
    reducer = run.members.known(found.by_site_id)
    if len(accused) > max(1, len(attempt.ids()) // 2):
        before = {i for other in sync.attempts[:-1] if other.no_average is not None for i in other.no_average.accused}
        accused = {i: words for i, words in accused.items() if i in before}
    reasons = []
    for site_id, words in sorted(accused.items()):
        site = run.members.by_id(site_id)
        if site is None or not site.live or not attempt.has(site.start):
            continue  # lost meanwhile
        reasons.append(f"{site.label} is left out of sync {plan.sync}: {words}, as {reducer.label} finds")
        again = run.left_out.stands(site.start)
        _leave_out(run, sync, site, reasons[-1], attempt=plan.attempt, by_site_id=reducer.site_id)
        if again:
            run.left_out.forget(site_id)
            run.trouble.receive_only.note([site_id], plan.sync)
            why = f"it was left out of two syncs in a row: {words}; it begins anew from the run's state"
            run.evict(site, why, Cause.CONTRIBUTION)
    return "; ".join(reasons) or found.reason


def leave_out(run: Run, site_id: int, commit: int) -> None:
    """From the syncs that were opened when the run had gone back to `commit`."""
    site = run.members.by_id(site_id)
    if site is None:
        return
    for sync in run.lanes.values():
        reason = f"{site.label} is left out of sync {sync.open.sync}: its contribution to commit {commit + 1} stood out"
        _leave_out(run, sync, site, reason, attempt=0, by_site_id=0)


def _leave_out(run: Run, sync: Sync, site: Site, reason: str, *, attempt: int, by_site_id: int) -> None:
    record = ExclusionRecord(
        sync=sync.open.sync,
        attempt=attempt,
        site_id=site.site_id,
        incarnation=site.incarnation,
        by_site_id=by_site_id,
        reason=reason[:1024],
        fragment=sync.open.fragment,
    )
    run.persist(record)
    run.left_out.note(record)
    sync.exclude(site.start, Kind.ABSURD, reason, run.now)
    run.report(logging.WARNING, reason)


# --- a commit after which losses are not finite


def diverged(run: Run, site: Site, message: m.Diverged) -> None:
    """The site's loss is not finite since the commit that it names; `decide` finds what follows."""
    if message.commit not in _newest(run) or site.standing is not Standing.MEMBER:
        return
    if run.members.is_void(site, message.commit):
        return  # it means the void commit of that number
    if run.diverged.get(site.site_id) != (run.branch, message.commit):
        run.note_divergence(site, message.commit)
        run.report(logging.ERROR, f"{site.label}: since commit {message.commit} {message.text}")


def _newest(run: Run) -> range:
    """Commits that may just have been applied: the last one, and as many more as syncs that are in flight with it."""
    return range(max(1, run.log.last - run.settings.sync.most_in_flight + 1), run.log.last + 1)


def decide(run: Run) -> GoBack | None:
    """Whether the run is to go back to before a commit: once, to the newest that most sites can mean."""
    last_said = max(run.diverged.values(), default=run.judged_divergence)
    for commit in reversed(_newest(run)):
        at = run.branch, commit
        if not run.judged_divergence < at <= last_said:
            continue
        # Strangers say what they like.
        members = [s for s in run.members.holding(commit) if s.conduct.has_contributed]
        names = [s.label for s in members if run.diverged.get(s.site_id, run.judged_divergence) >= at]
        if 2 * len(names) > len(members):
            return _to_before(run, commit, names)
    return None


def _to_before(run: Run, commit: int, names: list[str]) -> GoBack:
    went_back = bool(run.rollbacks) and commit <= run.rollbacks[-1].commit + 1
    obstacle = f"the run went back from commit {commit} before: it does not do so by itself again" if went_back else ""
    out = run.log.stood_out(commit)
    who = run.members.by_id(out.site_id) if out is not None else None
    without = f", without {who.label}, whose contribution to it stood out" if who is not None else ""
    reason = f"the loss of {', '.join(names)} is not finite since commit {commit}, and was before{without}"
    return GoBack(commit=commit - 1, reason=reason, without=who.site_id if who is not None else 0, obstacle=obstacle)


def stood_out(attempt: Attempt) -> m.Outlier | None:
    """The contribution that stood out most, as its reducers say; None if it did so little."""
    said = [done.stood_out for done in attempt.done.values() if done.stood_out is not None]
    found = max((o for o in said if o.site_id in attempt.ids() and o.limit > 0), key=_share, default=None)
    return found if found is not None and _share(found) >= LEAST_SHARE else None


def _share(outlier: m.Outlier) -> float:
    return outlier.norm / outlier.limit
