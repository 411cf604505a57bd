"""A coordinator's store in memory. It survives its coordinator, not the process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from atoll.coordinator.core.events import AttestationRecord, CommitRecord, Record
from atoll.coordinator.core.persisted import Persisted, fold
from atoll.coordinator.store import run_of
from atoll.protocol.errors import StaleError
from atoll.protocol.settings import RunSettings


class MemoryStore:
    def __init__(self) -> None:
        self._kept: Persisted | None = None
        self._times: dict[int, float] = {}

    def begin(self, settings: RunSettings, parent_json: str = "") -> Persisted:
        run = run_of("the store", self._kept.run if self._kept is not None else None, settings, parent_json)
        kept = self._kept or Persisted(run=run, term=0)
        self._kept = replace(kept, term=kept.term + 1)
        return self._kept.newest(settings)

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
