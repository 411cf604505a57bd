"""What reducers have signed of the errors that their codec left, of the last commits: an audit of an average needs what
its reducer had signed of the one before. In memory: errors of another start of the coordinator do not count."""

from __future__ import annotations

from atoll.coordinator.core.auditing.signed import made_by
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.protocol import messages as m
from atoll.protocol.plans import reducing


def note(run: Run, commit: m.Commit, attempt: Attempt) -> None:
    """The commit is made."""
    if not run.settings.sync.error_feedback_down:
        return
    places = {member.site_id: place for place, member in enumerate(attempt.plan.contributors)}
    made = (made_by(attempt, places[site_id]) for site_id in sorted(reducing(attempt.plan)))
    said = {one.site_id: one for one in made if one is not None and one.errors is not None}
    run.auditing.note_errors(commit, said, run.settings.sync)


def before(run: Run, plan: m.Plan, chunk: int, reducer: m.Member) -> m.ErrorsBefore | None:
    """What the reducer of that chunk had signed in the last commit that touched it before; None if nothing, or if it
    was started since."""
    commit = plan.base_commit
    if run.settings.sync.fragments > 1:
        sizes, touched = run.chunk_sizes, run.log.touched(commit)
        fragment = next(i for i in range(run.settings.sync.fragments) if sizes.of_sync(i).has_payload(chunk))
        commit = touched[fragment] if touched else 0
    found = run.auditing.errors_of(commit)
    if found is None:
        return None
    of, said = found
    was_there = (reducer.site_id, reducer.incarnation) in {(c.site_id, c.incarnation) for c in of.contributors}
    made = said.get(reducer.site_id) if was_there else None
    return None if made is None else m.ErrorsBefore(sync=of.sync, term=of.term, attempt=of.attempt, made=made)
