"""A store that was restored from an old copy, with what sites kept of the time since: which commits there were, and
what else has to be kept so that the run goes on from the newest of them. Pure.

What no site kept is not known: plans and leases that were given out, and whoever heard of them. So nobody goes on with
what it was at: each site is out and comes in again, the run goes on in a new branch, and numbers that were given
meanwhile are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from atoll.coordinator.core import events as e
from atoll.coordinator.core.audit import COORDINATOR
from atoll.coordinator.core.log import rollback
from atoll.coordinator.core.persisted import Key, Persisted, Row, changes
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites import invites
from atoll.protocol.errors import StateError
from atoll.protocol.settings import RunSettings

PASSED_OVER = 1_000
"""Terms, branches, syncs and ids of sites: more than were given since the newest that anybody kept."""
REASON = "the coordinator was restored from an old copy of its store"
OF_THE_WAY = (e.CommitRecord, e.AttestationRecord, e.RollbackRecord)
OF_MEMBERS = (
    e.SiteRecord, e.ForgetRecord, e.ResetRecord, e.BanRecord, e.BanLiftedRecord, e.InviteRecord, e.InviteForgottenRecord
)  # fmt: skip


def members(settings: RunSettings, copy: Persisted, records: Sequence[Row], wall_s: float) -> Run:
    """The run's sites, bans and invites as they are known by now, and nothing else of it. `records`: what sites kept of
    the time since the copy, in order."""
    kept: dict[Key, Row] = {key: row for key, row in copy.records.items() if isinstance(row, OF_MEMBERS)}

    def keys(kind: str) -> list[Key]:
        return [key for key in kept if key.kind == kind]

    for record in records:
        for key, row in changes(record, keys).items() if isinstance(record, OF_MEMBERS) else ():
            kept.pop(key, None)
            if row is not None:
                kept[key] = row
    return Run(settings, replace(copy, records=kept), 0.0, wall_s)


def refusal(known: Run, role: str, name: str, key_digest: bytes) -> str:
    """Why a key is not even heard; empty if it is. One of which nothing is known may have come since the copy, and be
    the only one to tell that. `known`: see `members`."""
    if banned := invites.refusal(known, role, name, key_digest, is_new=True):
        return banned
    keys = {i.key_digest for i in known.invites.values()} | {s.key_digest for s in known.members.sites.values()}
    return invites.refusal(known, role, name, key_digest) if key_digest in keys else ""


def sites_in_the_run(copy: Persisted, records: Sequence[Row]) -> frozenset[str]:
    """Names, by the newest that is known of each. `records`: what sites kept of the time since the copy, in order."""
    live = {r.name: r.live for r in copy.all(e.SiteRecord)}
    for record in records:
        if isinstance(record, e.SiteRecord):
            live[record.name] = record.live
    return frozenset(name for name, is_live in live.items() if is_live)


def known_sites(copy: Persisted, records: Sequence[Row]) -> frozenset[str]:
    """Names of those that were ever in the run and are not banned, as far as is known."""
    names = {r.name for r in (*copy.all(e.SiteRecord), *records) if isinstance(r, e.SiteRecord)}
    banned = {r.name for r in copy.all(e.BanRecord) if not r.is_over}
    for record in records:
        match record:
            case e.BanRecord(name=name, is_over=False):
                banned.add(name)
            case e.BanRecord(name=name):
                banned.discard(name)
            case e.BanLiftedRecord(name):
                banned.discard(name)
            case _:
                pass
    return frozenset(names - banned)


def given_up(records: Sequence[Row]) -> frozenset[int]:
    """Which of these, by place, an earlier restore from the same copy had not heard of: from the first rollback in a
    branch that it did not know, and the end of the run. What it did then has taken their place."""
    found: set[int] = set()
    rollbacks = {i: r for i, r in enumerate(records) if isinstance(r, e.RollbackRecord)}
    for end in (i for i, r in rollbacks.items() if r.reason == REASON):
        newest_known = rollbacks[end].branch - 1 - PASSED_OVER
        begin = next(i for i, r in rollbacks.items() if r.branch > newest_known)
        found |= {i for i in range(begin, end) if isinstance(records[i], OF_THE_WAY)}
        found |= {i for i in range(end) if isinstance(records[i], e.FinishedRecord)}
    return frozenset(found)


def since(records: Sequence[Row]) -> list[e.CommitRecord]:
    """The commits that were not rolled back, in order. There are none of before the copy."""
    found: list[e.CommitRecord] = []
    for record in records:
        match record:
            case e.CommitRecord():
                found.append(record)
            case e.RollbackRecord(commit=commit):
                found = [r for r in found if r.commit.commit <= commit]
            case _:
                pass
    return found


def left_of_copy(last: int, records: Sequence[Row]) -> int:
    """The newest commit of the copy that was not rolled back since."""
    return min([last, *(r.commit for r in records if isinstance(r, e.RollbackRecord))])


def newest(last: int, records: Sequence[Row]) -> int:
    """The commit that the run is at, as far as is known."""
    return max((r.commit.commit for r in since(records)), default=left_of_copy(last, records))


def missing(last: int, records: Sequence[Row], held: int = 0) -> range:
    """From the first to the last of the commits that there must have been after commit `last`, the newest of the copy,
    and that nobody has shown. `held`: the highest that a site says to hold, which may be any number."""
    numbers = {record.commit.commit for record in since(records)}
    first, end = left_of_copy(last, records) + 1, max(newest(last, records), held) + 1
    while first in numbers:
        first += 1
    while end > first and end - 1 in numbers:
        end -= 1
    return range(first, end)


def held(copy: Persisted, records: Sequence[Row], branch: int, commit: int) -> int:
    """The highest commit that the run must have, as a site in that branch says that it holds `commit`: what was rolled
    back since need not be there."""
    return min([commit, *(r.commit for r in _rollbacks(copy, records) if r.branch > branch)])


def is_unknown(copy: Persisted, records: Sequence[Row], branch: int) -> bool:
    """Whether a site in that branch knows of a rollback of which no record is here."""
    return branch > max((r.branch for r in _rollbacks(copy, records)), default=0)


def _rollbacks(copy: Persisted, records: Sequence[Row]) -> list[e.RollbackRecord]:
    return [r for r in (*copy.all(e.RollbackRecord), *records) if isinstance(r, e.RollbackRecord)]


def in_words(copy: Persisted, numbers: range, records: Sequence[Row]) -> str:
    """Which commits are missing, and how many steps and tokens are in them."""
    known = {r.commit.commit: r.commit for r in (*copy.all(e.CommitRecord), *since(records))}
    before, after = known.get(numbers[0] - 1), next((known[n] for n in sorted(known) if n > numbers[-1]), None)
    run_step, run_tokens = (before.run_step, before.run_tokens) if before is not None else (0, 0)
    which = f"commits {numbers[0]} to {numbers[-1]} are" if numbers[0] < numbers[-1] else f"commit {numbers[0]} is"
    steps, tokens = (f" to {n}" if n else " on" for n in ((after.run_step, after.run_tokens) if after else (0, 0)))
    return (
        f"{which} missing: of the run's steps from {run_step}{steps} and tokens from {run_tokens}{tokens} nobody who "
        "has told knows which samples they were"
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
    if run.manifest is None and (run.started or run.log.attested):
        raise StateError("the copy is of before the run had a model: take one from after its first site was admitted")
    for site in run.members.live():
        run.remove(site, REASON, evicted=True)
    run.ledger.give_back_all()
    for record in voided.values():
        for line in record.commit.done:
            run.ledger.void(line.line, line.ranges)
    found = [(f"commit {r.commit.commit}", r.commit.done) for r in since(records)]
    found += [(f"the rollback to commit {r.commit}", r.skipped) for r in records if isinstance(r, e.RollbackRecord)]
    for name, done in found:
        for line in done:
            try:
                run.ledger.finish_unheard(line.line, line.ranges)
            except StateError as error:
                raise StateError(f"{name}: {error}") from None
    run.persist_ledger()
    run.has_used(run.last_sync + PASSED_OVER)
    last_id = run.members.last_id + PASSED_OVER
    run.persist(e.ForgetRecord(site_ids=(), last_site_id=last_id, last_sync=run.last_sync))
    for opened in folded.all(e.OpenRecord):
        if run.sync_of(opened.open.sync) is None:  # ended since, of which one record stands for all
            run.note_abandoned(opened.open.sync, REASON)
    if (run.started or run.log.last) and run.finished is None:
        last, changed_json = run.log.last, run.changes.changed_json
        rollback.go_back(run, last, run.log.attested.get(last, b""), REASON, holders=(), passed_over=PASSED_OVER)
        if changed_json != run.changes.changed_json:  # set since that commit, which is the last one still
            run.changes.take(changed_json)
            run.persist(e.ChangedRecord(changed_json))
    run.note(COORDINATOR, "restore", f"from an old copy; the newest commit is {run.log.last}")
    (kept,) = (output.records for output in run.take_outputs() if isinstance(output, e.Persist))
    return kept
