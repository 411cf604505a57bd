"""A coordinator's store in memory. It survives its coordinator, not the process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from atoll.coordinator.core.events import AttestationRecord, CommitRecord, Record
from atoll.coordinator.core.persisted import HISTORY, Key, Persisted, Row, changes, kind_of
from atoll.coordinator.store import run_of
from atoll.protocol.errors import StaleError
from atoll.protocol.settings import RunSettings, settings_to_json


def fold(persisted: Persisted, *records: Row) -> Persisted:
    """What is kept once these records are, one after the other."""
    kept = dict(persisted.records)

    def keys(kind: str) -> list[Key]:
        return [key for key in kept if key.kind == kind]

    for record in records:
        for key, newest in changes(record, keys).items():
            if newest is None:
                kept.pop(key, None)
            else:
                kept[key] = newest
    return replace(persisted, records=kept)


def newest(kept: Persisted, settings: RunSettings) -> Persisted:
    """What a start reads of all that is kept: without the commits that are older than the log, but for the starting
    state's hash, and with settings that are whole."""
    commits = (key.number for key in kept.records if key.kind == kind_of(CommitRecord))
    oldest = max(commits, default=0) - settings.sync.most_log_commits
    records = {k: r for k, r in kept.records.items() if not isinstance(r, HISTORY) or not 0 < k.number <= oldest}
    return replace(kept, run=replace(kept.run, settings_json=settings_to_json(settings)), records=records)


class MemoryStore:
    def __init__(self) -> None:
        self._kept: Persisted | None = None
        self._times: dict[int, float] = {}

    def begin(self, settings: RunSettings, parent_json: str = "") -> Persisted:
        run, settings = run_of("the store", self._kept.run if self._kept is not None else None, settings, parent_json)
        kept = self._kept or Persisted(run=run, term=0)
        self._kept = replace(kept, term=kept.term + 1)
        return newest(self._kept, settings)

    def persist(self, term: int, records: Sequence[Record], wall_time_s: float) -> None:
        assert self._kept is not None
        if term != self._kept.term:
            raise StaleError(f"the store: term {term} is over, the newest is {self._kept.term}")
        self._kept = fold(self._kept, *records)
        self._times.update((r.commit.commit, wall_time_s) for r in records if isinstance(r, CommitRecord))

    def read_commits(self, first: int, last: int) -> tuple[tuple[CommitRecord, ...], tuple[AttestationRecord, ...]]:
        assert self._kept is not None
        commits, attestations = self._kept.all(CommitRecord), self._kept.all(AttestationRecord)
        return (
            tuple(r for r in commits if first <= r.commit.commit <= last),
            tuple(r for r in attestations if first <= r.commit <= last),
        )

    def commit_times(self) -> dict[int, float]:
        return dict(self._times)

    def close(self) -> None:
        pass
