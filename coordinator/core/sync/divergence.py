"""Most sites' loss is not finite since a commit, and was before: the run goes back by itself, once, without the site
whose contribution to that commit stood out, if one did. See docs/decisions/0014-unusable-contributions.md.
"""

from __future__ import annotations

import logging

from atoll.coordinator.core.log import going_back
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site, Standing
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.protocol import messages as m

LEAST_SHARE = 0.01
"""Of its limit: ten times the median of the others, where the limit is a thousand times it."""


def diverged(run: Run, stream: int, site: Site, message: m.Diverged) -> None:
    """The site's loss is not finite since the commit that it names; `advance` decides."""
    sync = run.sync
    if sync is None or site.standing is not Standing.MEMBER or message.commit != sync.open.base_commit:
        return
    if run.members.streams[stream].is_void(message.commit):
        return  # it means the void commit of that number
    if site.site_id not in sync.diverged:
        sync.note_diverged(site.site_id, message.text)
        run.report(logging.ERROR, f"{site.label}: since commit {message.commit} {message.text}")


def advance(run: Run) -> bool:
    """Whether the run begins to go back."""
    sync = run.sync
    if sync is None or not sync.diverged or sync.has_gone_back:
        return False
    base = sync.open.base_commit
    members = [s for s in run.members.at(base) if s.conduct.has_contributed]  # else strangers, who say what they like
    names = [s.label for s in members if s.site_id in sync.diverged]
    if base == 0 or 2 * len(names) <= len(members):
        return False
    sync.note_gone_back()
    if run.rollbacks and base <= run.rollbacks[-1].commit + 1:
        run.report(logging.ERROR, f"the run went back from commit {base} before: it does not do so by itself again")
        return False
    out = run.log.stood_out(base)
    who = run.members.by_id(out.site_id) if out is not None else None
    without = f", without {who.label}, whose contribution to it stood out" if who is not None else ""
    reason = f"the loss of {', '.join(names)} is not finite since commit {base}, and was before{without}"
    return not going_back.begin(run, base - 1, reason, without=who.site_id if who is not None else 0)


def stood_out(attempt: Attempt) -> m.Outlier | None:
    """The contribution that stood out most, as its reducers say; None if it did so little."""
    said = [done.stood_out for done in attempt.done.values() if done.stood_out is not None]
    found = max((o for o in said if o.site_id in attempt.ids() and o.limit > 0), key=_share, default=None)
    return found if found is not None and _share(found) >= LEAST_SHARE else None


def _share(outlier: m.Outlier) -> float:
    return outlier.norm / outlier.limit
