"""What survives the coordinator: one interface, in memory and in SQLite.

The core decides what is kept (`core/events.py`, records); a store keeps each `persist` whole or not at all, and only
for the newest term.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from atoll.coordinator.core.events import (
    AbandonRecord,
    AttestationRecord,
    CommitRecord,
    DoneRecord,
    ExclusionRecord,
    FinishedRecord,
    ForgetRecord,
    KeptOutRecord,
    LeaseRecord,
    LetInRecord,
    LineRecord,
    ManifestRecord,
    OpenRecord,
    Persisted,
    PlanRecord,
    Record,
    ResetRecord,
    RollbackRecord,
    SiteRecord,
    StopRecord,
)
from atoll.coordinator.core.sync.exclusions import KEPT_EXCLUSIONS
from atoll.protocol.errors import ConfigError, StaleError, UnsupportedError
from atoll.protocol.settings import RunSettings, read_settings, settings_to_json

log = logging.getLogger("atoll.coordinator")

RESTORE = "restore it from a copy (deploy/README.md), or start a new run in another file"
"""What to do about a store that is damaged."""


class Store(Protocol):
    """One run. Not thread-safe: one call at a time, from any thread."""

    def begin(self, settings: RunSettings, parent_json: str = "") -> Persisted:
        """Starts a new term: what was kept, for `Core`. The first call makes the run.

        Raises ConfigError if the store has another run, other settings or another parent.
        """

    def persist(self, term: int, records: Sequence[Record], wall_time_s: float) -> None:
        """All records or none. `wall_time_s` (since 1970) is kept with commits, for people.

        Raises StaleError if `term` is not the newest, HostError if the records cannot be kept: then the process ends,
        because nobody knows whether they were.
        """

    def read_commits(self, first: int, last: int) -> tuple[tuple[CommitRecord, ...], tuple[AttestationRecord, ...]]:
        """Commits `first` to `last`, which were kept, and what is attested of them; both ascending.

        Raises StateError if one of them is missing.
        """

    def commit_times(self) -> dict[int, float]:
        """Commit -> seconds since 1970."""

    def close(self) -> None: ...


def check_same_run(
    where: str, *, stored_run_id: str, stored_settings: str, stored_parent: str, settings: RunSettings, parent_json: str
) -> None:
    """Raises ConfigError, naming what differs, unless the store has this run."""
    if stored_run_id != settings.run_id:
        raise ConfigError(
            f"{where} holds run {stored_run_id!r}, the settings name run {settings.run_id!r}: give the new run a store "
            "of its own (--store PATH, or a copy of the file under another name), or the old run its own settings"
        )
    try:
        stored, unknown = read_settings(stored_settings)
    except UnsupportedError as error:
        raise ConfigError(f"{where}: {error}") from error
    if unknown:
        log.warning(
            "%s: run %s was begun by a newer version of atoll; settings that this one does not know have no effect: %s",
            where, stored_run_id, ", ".join(unknown),
        )  # fmt: skip
    if stored != settings:
        differences = "; ".join(_differences(asdict(stored), asdict(settings)))
        raise ConfigError(
            f"{where}: run {stored_run_id!r} was begun with other settings ({differences}): change them back, or start "
            "a new run (with --resume from a saved model)"
        )
    if parent_json and parent_json != stored_parent:
        raise ConfigError(
            f"{where}: run {stored_run_id!r} was begun {'from another saved model' if stored_parent else 'afresh'}: "
            "leave --resume out to go on with it, or choose another run id and store"
        )


def _differences(stored: dict[str, object], wanted: dict[str, object], prefix: str = "") -> list[str]:
    found = []
    for key in sorted({*stored, *wanted}):
        a, b = stored.get(key), wanted.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key} was {json.dumps(a)}, now {json.dumps(b)}")
    return found


@dataclass(slots=True)
class _Kept:
    """What a MemoryStore holds; changed as a whole."""

    run_id: str
    settings_json: str
    parent_json: str
    term: int = 0
    manifest: ManifestRecord | None = None
    sites: dict[int, SiteRecord] = field(default_factory=dict)
    last_site_id: int = 0
    opens: dict[int, OpenRecord] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    plans: list[PlanRecord] = field(default_factory=list)
    commits: list[CommitRecord] = field(default_factory=list)
    times: dict[int, float] = field(default_factory=dict)
    attestations: dict[int, AttestationRecord] = field(default_factory=dict)
    lines: dict[int, LineRecord] = field(default_factory=dict)
    done: dict[int, DoneRecord] = field(default_factory=dict)
    leases: dict[tuple[int, int, int], LeaseRecord] = field(default_factory=dict)
    rollbacks: list[RollbackRecord] = field(default_factory=list)
    exclusions: dict[tuple[int, int], ExclusionRecord] = field(default_factory=dict)
    kept_out: dict[str, KeptOutRecord] = field(default_factory=dict)
    void_starts: set[bytes] = field(default_factory=set)
    num_abandoned: int = 0
    stop_reason: str = ""
    finished: FinishedRecord | None = None


class MemoryStore:
    """For tests and the simulator. Survives its coordinator, not the process."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def begin(self, settings: RunSettings, parent_json: str = "") -> Persisted:
        kept = self._kept
        if kept is None:
            kept = self._kept = _Kept(settings.run_id, settings_to_json(settings), parent_json)
        else:
            check_same_run(
                "the store",
                stored_run_id=kept.run_id,
                stored_settings=kept.settings_json,
                stored_parent=kept.parent_json,
                settings=settings,
                parent_json=parent_json,
            )
        kept.term += 1
        last_sync = max(kept.opens, default=0)
        is_open = last_sync > 0 and last_sync not in kept.ended
        attested = [kept.attestations[n] for n in sorted(kept.attestations)]
        return Persisted(
            run_id=kept.run_id,
            settings_json=settings_to_json(settings),
            parent_json=kept.parent_json,
            term=kept.term,
            manifest=kept.manifest,
            sites=tuple(kept.sites[i] for i in sorted(kept.sites)),
            last_site_id=kept.last_site_id,
            open=kept.opens[last_sync] if is_open else None,
            plans=tuple(kept.plans) if is_open else (),
            last_sync=last_sync,
            commits=tuple(kept.commits[-settings.sync.log_commits :]),
            losses=tuple(
                (r.commit.commit, r.commit.run_step, r.commit.run_tokens, r.median_loss)
                for r in kept.commits
                if r.median_loss is not None
            ),
            attestations=tuple(attested[-settings.sync.log_commits :]),
            lines=tuple(kept.lines[n] for n in sorted(kept.lines)),
            done=tuple(kept.done[n] for n in sorted(kept.done)),
            leases=tuple(kept.leases[key] for key in sorted(kept.leases)),
            rollbacks=tuple(kept.rollbacks),
            exclusions=tuple(kept.exclusions[key] for key in sorted(kept.exclusions)),
            kept_out=tuple(kept.kept_out[name] for name in sorted(kept.kept_out)),
            void_starts=tuple(sorted(kept.void_starts)),
            num_abandoned=kept.num_abandoned,
            stop_reason=kept.stop_reason,
            finished=kept.finished,
        )

    def persist(self, term: int, records: Sequence[Record], wall_time_s: float) -> None:
        kept = self._kept
        assert kept is not None
        if term != kept.term:
            raise StaleError(f"the store: term {term} is over, the newest is {kept.term}")
        for record in records:
            self._keep(kept, record, wall_time_s)

    def _keep(self, kept: _Kept, record: Record, wall_time_s: float) -> None:
        match record:
            case SiteRecord():
                kept.sites[record.site_id] = record
            case ForgetRecord():
                kept.last_site_id = record.last_site_id
                for site_id in record.site_ids:
                    del kept.sites[site_id]
                    kept.lines.pop(site_id, None)
                    kept.done.pop(site_id, None)
                kept.leases = {key: lease for key, lease in kept.leases.items() if key[0] not in record.site_ids}
                kept.exclusions = {k: r for k, r in kept.exclusions.items() if r.site_id not in record.site_ids}
            case ManifestRecord():
                kept.manifest = record
            case OpenRecord():
                kept.opens[record.open.sync] = record
                kept.plans.clear()
            case PlanRecord():
                if kept.plans and kept.plans[-1].plan.attempt == record.plan.attempt:
                    kept.plans.pop()  # the same one, with weights
                kept.plans.append(record)
            case CommitRecord():
                kept.commits.append(record)
                kept.times[record.commit.commit] = wall_time_s
                kept.ended.add(record.commit.sync)
            case AbandonRecord():
                kept.num_abandoned += 1
                kept.ended.add(record.sync)
            case AttestationRecord():
                kept.attestations[record.commit] = record
            case LineRecord():
                kept.lines[record.line] = record
            case DoneRecord():
                kept.done[record.line] = record
            case LeaseRecord():
                key = (record.line, record.site_id, record.incarnation)
                kept.leases.pop(key, None)
                if record.ranges:
                    kept.leases[key] = record
            case RollbackRecord():
                kept.rollbacks.append(record)
                kept.commits = [r for r in kept.commits if r.commit.commit <= record.commit]
                for known in (kept.times, kept.attestations):
                    for number in [n for n in known if n > record.commit]:
                        del known[number]
            case ExclusionRecord():
                kept.exclusions[record.sync, record.site_id] = record
                for older in sorted(kept.exclusions)[:-KEPT_EXCLUSIONS]:
                    if older[0] < record.sync:
                        del kept.exclusions[older]
            case KeptOutRecord():
                kept.kept_out[record.name] = record
            case LetInRecord(name):
                kept.kept_out.pop(name, None)
            case ResetRecord():
                kept.manifest = None
                kept.void_starts |= set(record.void_starts)
                kept.last_site_id = record.last_site_id
                for forgotten in (kept.sites, kept.attestations, kept.lines, kept.done, kept.leases):
                    forgotten.clear()
            case StopRecord():
                kept.stop_reason = record.reason
            case FinishedRecord():
                kept.finished = record

    def read_commits(self, first: int, last: int) -> tuple[tuple[CommitRecord, ...], tuple[AttestationRecord, ...]]:
        assert self._kept is not None
        known = self._kept.attestations
        return (
            tuple(r for r in self._kept.commits if first <= r.commit.commit <= last),
            tuple(known[n] for n in range(first, last + 1) if n in known),
        )

    def commit_times(self) -> dict[int, float]:
        return dict(self._kept.times) if self._kept else {}

    def close(self) -> None:
        pass
