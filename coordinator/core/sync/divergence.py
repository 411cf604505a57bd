"""Most sites' loss is not finite since a commit, and was before: the run goes back by itself, once, without the site
whose contribution to that commit stood out, if one did. See docs/decisions/0014-unusable-contributions.md.
"""

from __future__ import annotations

import logging

from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site, Standing
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.coordinator.core.sync.decision import GoBack
from atoll.coordinator.core.sync.syncs import Sync
from atoll.protocol import messages as m

LEAST_SHARE = 0.01
"""Of its limit: ten times the median of the others, where the limit is a thousand times it."""


def diverged(run: Run, site: Site, message: m.Diverged) -> None:
    """The site's loss is not finite since the commit that it names; `decide` finds what follows."""
    sync = next((s for s in run.lanes.values() if s.open.base_commit == message.commit), None)
    if sync is None or site.standing is not Standing.MEMBER:
        return
    if run.members.is_void(site, message.commit):
        return  # it means the void commit of that number
    if site.site_id not in sync.diverged:
        sync.note_diverged(site.site_id, message.text)
        run.report(logging.ERROR, f"{site.label}: since commit {message.commit} {message.text}")


def decide(run: Run, sync: Sync) -> GoBack | None:
    """Whether the run is to go back to before the sync's base: once."""
    if not sync.diverged or sync.has_gone_back:
        return None
    base = sync.open.base_commit
    # Strangers say what they like.
    members = [s for s in run.members.holding(base) if s.conduct.has_contributed]
    names = [s.label for s in members if s.site_id in sync.diverged]
    if base == 0 or 2 * len(names) <= len(members):
        return None
    went_back = bool(run.rollbacks) and base <= run.rollbacks[-1].commit + 1
    obstacle = f"the run went back from commit {base} before: it does not do so by itself again" if went_back else ""
    out = run.log.stood_out(base)
    who = run.members.by_id(out.site_id) if out is not None else None
    without = f", without {who.label}, whose contribution to it stood out" if who is not None else ""
    reason = f"the loss of {', '.join(names)} is not finite since commit {base}, and was before{without}"
    return GoBack(commit=base - 1, reason=reason, without=who.site_id if who is not None else 0, obstacle=obstacle)


def stood_out(attempt: Attempt) -> m.Outlier | None:
    """The contribution that stood out most, as its reducers say; None if it did so little."""
    said = [done.stood_out for done in attempt.done.values() if done.stood_out is not None]
    found = max((o for o in said if o.site_id in attempt.ids() and o.limit > 0), key=_share, default=None)
    return found if found is not None and _share(found) >= LEAST_SHARE else None


def _share(outlier: m.Outlier) -> float:
    return outlier.norm / outlier.limit
