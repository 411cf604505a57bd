"""A store that was restored from an old copy, with what sites kept of the time since: which commits there were, and
what else has to be kept so that the run goes on from the newest of them. Pure.

What no site kept is not known: plans and leases that were given out, and whoever heard of them. So nobody goes on with
what it was at: each site is out and comes in again, the run goes on in a new branch, and numbers that were given
meanwhile are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.coordinator.core import events as e
from atoll.coordinator.core.audit import COORDINATOR
from atoll.coordinator.core.log import rollback
from atoll.coordinator.core.persisted import Persisted, Row
from atoll.coordinator.core.run import Run
from atoll.protocol.errors import StateError
from atoll.protocol.settings import RunSettings

PASSED_OVER = 1_000
"""Terms, syncs and ids of sites: more than were given since the newest that anybody kept."""
REASON = "the coordinator was restored from an old copy of its store"


def sites_in_the_run(copy: Persisted, records: Sequence[Row]) -> frozenset[str]:
    """Names, by the newest that is known of each. `records`: what sites kept of the time since the copy, in order."""
    live = {r.name: r.live for r in copy.all(e.SiteRecord)}
    for record in records:
        if isinstance(record, e.SiteRecord):
            live[record.name] = record.live
    return frozenset(name for name, is_live in live.items() if is_live)


def since(records: Sequence[Row]) -> list[e.CommitRecord]:
    """The commits that were not rolled back, in order. There are none of before the copy."""
    found: list[e.CommitRecord] = []
    for record in records:
        match record:
            case e.CommitRecord():
                found.append(record)
            case e.RollbackRecord(voided=voided):
                found = [r for r in found if r.commit.commit not in voided]
            case _:
                pass
    return found


def voided_of_copy(records: Sequence[Row]) -> frozenset[int]:
    """Numbers of commits that were rolled back since the copy; those made since are among them, if they are known."""
    return frozenset(n for record in records if isinstance(record, e.RollbackRecord) for n in record.voided)


def missing(last: int, records: Sequence[Row]) -> list[int]:
    """Commits that there must have been after commit `last`, the newest of the copy, and that nobody has shown."""
    last = min([last, *(r.commit for r in records if isinstance(r, e.RollbackRecord))])
    numbers = {record.commit.commit for record in since(records)}
    return [n for n in range(last + 1, max(numbers, default=last)) if n not in numbers]


def in_words(copy: Persisted, numbers: Sequence[int], records: Sequence[Row]) -> str:
    """Which commits are missing, and how many steps and tokens are in them."""
    known = {r.commit.commit: r.commit for r in (*copy.all(e.CommitRecord), *since(records))}
    before, after = known.get(numbers[0] - 1), known[next(n for n in sorted(known) if n > numbers[-1])]
    run_step, run_tokens = (before.run_step, before.run_tokens) if before is not None else (0, 0)
    which = f"commits {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"commit {numbers[0]}"
    return (
        f"{which} are missing: of the run's steps {run_step} to {after.run_step} and tokens {run_tokens} to "
        f"{after.run_tokens} nobody who has told knows which samples they were"
    )


def settled(
    settings: RunSettings,
    folded: Persisted,
    voided: Mapping[int, e.CommitRecord],
    records: Sequence[Row],
    wall_s: float,
) -> tuple[e.Record, ...]:
    """What has to be kept beside `records`, which are in `folded` by now. `voided`: commits of the copy that have been
    rolled back since. Raises StateError if samples would count twice."""
    run = Run(settings, folded, 0.0, wall_s)
    for site in run.members.live():
        run.remove(site, REASON, evicted=True)
    run.ledger.give_back_all()
    for record in voided.values():
        for line in record.commit.done:
            run.ledger.void(line.line, line.ranges)
    for commit in since(records):
        for line in commit.commit.done:
            try:
                run.ledger.finish_unheard(line.line, line.ranges)
            except StateError as error:
                raise StateError(f"commit {commit.commit.commit}: {error}") from None
    run.persist_ledger()
    run.has_used(run.last_sync + PASSED_OVER)
    last_id = run.members.last_id + PASSED_OVER
    run.persist(e.ForgetRecord(site_ids=(), last_site_id=last_id, last_sync=run.last_sync))
    if (run.started or run.log.last) and run.finished is None:
        newest = run.log.last
        rollback.go_back(run, newest, run.log.attested.get(newest, b""), REASON, holders=())
    run.note(COORDINATOR, "restore", f"from an old copy; the newest commit is {run.log.last}")
    (kept,) = (output.records for output in run.take_outputs() if isinstance(output, e.Persist))
    return kept
