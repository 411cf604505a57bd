"""A coordinator's store in memory. It survives its coordinator, not the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from atoll.coordinator import rows
from atoll.coordinator.core.events import AttestationRecord, CommitRecord, LineRecord, Record
from atoll.coordinator.core.persisted import (
    HISTORY,
    Key,
    Persisted,
    Row,
    RunRecord,
    as_deposited,
    changes,
    is_deposited,
    key_of,
    kind_of,
)
from atoll.coordinator.store import KEPT_AT_JOIN, run_of
from atoll.protocol.errors import HostError, StaleError
from atoll.protocol.messages import Deposit
from atoll.protocol.settings import RunSettings, settings_from_json, settings_to_json


def fold(persisted: Persisted, *records: Row) -> Persisted:
    """What is kept once these records are, one after the other."""
    kept = dict(persisted.records)
    for record in records:
        keep(kept, record)
    return replace(persisted, records=kept)


def keep(kept: dict[Key, Row], record: Row) -> list[Key]:
    """Of which keys there is something else now."""

    def keys(kind: str) -> list[Key]:
        return [key for key in kept if key.kind == kind]

    made = []
    for key, newest in changes(record, keys).items():
        if newest is None:
            kept.pop(key, None)
        else:
            kept[key] = newest
            made.append(key)
    return made


def newest(kept: Persisted, settings: RunSettings) -> Persisted:
    """What a start reads of all that is kept: without the commits that are older than the log, but for the starting
    state's hash, and with settings that are whole."""
    commits = (key.number for key in kept.records if key.kind == kind_of(CommitRecord))
    oldest = max(commits, default=0) - settings.sync.most_log_commits
    records = {k: r for k, r in kept.records.items() if not isinstance(r, HISTORY) or not 0 < k.number <= oldest}
    return replace(kept, run=replace(kept.run, settings_json=settings_to_json(settings)), records=records)


class MemoryStore:
    def __init__(self) -> None:
        self._run: RunRecord | None = None
        self._term = 0
        self._seq = 0
        self._records: dict[Key, Row] = {}
        self._kept: dict[Key, tuple[int, float]] = {}
        """The seq of each, and when it was kept."""
        self._times: dict[int, float] = {}

    def copied(self) -> MemoryStore:
        """A backup."""
        made = MemoryStore()
        made.becomes(self)
        return made

    def all_kept(self) -> Sequence[Row]:
        return list(self._records.values())

    def has_more_than(self, other: MemoryStore) -> bool:
        """Training had begun when `other` was made, and something was kept since."""
        return Key("manifest") in other._records and self.last_seq() > other.last_seq()

    def becomes(self, other: MemoryStore) -> None:
        """With all that `other` keeps, and nothing else."""
        self._run, self._term, self._seq = other._run, other._term, other._seq
        self._records, self._kept, self._times = dict(other._records), dict(other._kept), dict(other._times)

    def begin(self, settings: RunSettings, parent_json: str = "") -> Persisted:
        self._run, settings = run_of("the store", self._run, settings, parent_json)
        self._begin(self._term + 1)
        return self._persisted(settings)

    def _begin(self, term: int) -> None:
        self._term, self._seq = term, max(self._seq, term << rows.TERM_BITS)

    def _persisted(self, settings: RunSettings) -> Persisted:
        assert self._run is not None
        return newest(Persisted(run=self._run, term=self._term, records=self._records), settings)

    def persist(self, term: int, records: Sequence[Record], wall_time_s: float) -> tuple[Deposit, ...]:
        if term != self._term:
            raise StaleError(f"the store: term {term} is over, the newest is {self._term}")
        return tuple(d for record in records if (d := self._keep(record, wall_time_s)) is not None)

    def _keep(self, record: Row, wall_time_s: float) -> Deposit | None:
        self._seq += 1
        seq = self._seq
        for key in keep(self._records, record):
            self._seq += key != key_of(record)
            self._kept[key] = self._seq, wall_time_s
        if isinstance(record, CommitRecord):
            self._times[record.commit.commit] = wall_time_s
        return rows.deposit_of(record, seq, wall_time_s) if is_deposited(record) else None

    def deposits_after(self, seq: int, most_bytes: int, *, is_new: bool = False) -> tuple[Deposit, ...]:
        last = max((key.number for key in self._records if key.kind == kind_of(CommitRecord)), default=0)
        oldest = last - KEPT_AT_JOIN if is_new else 0
        found: list[Deposit] = []
        for key, record in sorted(self._records.items(), key=lambda item: self._kept[item[0]]):
            (number, kept_at), deposited = self._kept[key], as_deposited(record)
            is_old = isinstance(record, HISTORY) and 0 < key.number <= oldest
            if number <= seq or is_old or deposited is None:
                continue
            deposit = rows.deposit_of(deposited, number, kept_at)
            most_bytes -= len(deposit.body)
            if found and most_bytes < 0:
                break
            found.append(deposit)
        return tuple(found)

    def last_seq(self) -> int:
        return max((self._kept[key][0] for key in self._records), default=0)

    def restore(self, term: int, deposits: Sequence[Deposit], settle: Callable[[Persisted], Sequence[Record]]) -> None:
        assert self._run is not None
        for deposit in deposits:
            record = rows.decode(deposit.record, deposit.body)
            if not (isinstance(record, LineRecord) and key_of(record) in self._records):
                self._seq = deposit.seq - 1
                self._keep(record, deposit.kept_at)
        self._begin(term)
        for settled in settle(self._persisted(settings_from_json(self._run.settings_json))):
            self._keep(settled, 0.0)

    def read_commits(self, first: int, last: int) -> tuple[tuple[CommitRecord, ...], tuple[AttestationRecord, ...]]:
        assert self._run is not None
        kept = Persisted(run=self._run, records=self._records)
        commits, attestations = kept.all(CommitRecord), kept.all(AttestationRecord)
        return (
            tuple(r for r in commits if first <= r.commit.commit <= last),
            tuple(r for r in attestations if first <= r.commit <= last),
        )

    def copy_to(self, path: Path) -> None:
        raise HostError(f"no copy at {path}: this store is no file")

    def commit_times(self) -> dict[int, float]:
        return dict(self._times)

    def close(self) -> None:
        pass
