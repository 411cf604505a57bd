"""What survives the coordinator: of each key the newest record. `changes` is the only rule of what a record replaces or
ends; the store in a file and the one of tests, in memory, follow it alike. Pure.

Commits and what is attested of them are a history that is read by number; all other records are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast, get_args

from atoll.coordinator.core import events as e

KEPT_EXCLUSIONS = 32
"""In memory and in the store, for people, and to find those who were left out again. The store has all of the newest
sync as well."""
MAX_LOSSES = 1024
THINNED_EVERY = 64
"""Commits: so many points more there may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Which run a store has. Kept at the first start, and never changed."""

    run_id: str
    settings_json: str
    parent_json: str = ""
    """Parent run, commit, run_step and run_tokens of a resumed run; empty otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRecord:
    """A point of the run's curve. It outlives its commit in the log, and goes when the curve gets too long."""

    commit: int
    run_step: int
    run_tokens: int
    median_loss: float


Row = e.Record | RunRecord | LossRecord
R = TypeVar("R")


class Key(NamedTuple):
    kind: str
    number: int = 0
    """Of a commit, sync, branch or line."""
    part: int = 0
    """The id of a site, or the number of an attempt."""
    name: str = ""


HISTORY = (e.CommitRecord, e.AttestationRecord)
KEPT_COMMITS = 1 << 16
"""Of which the store has records: in a run that exchanges at every step there are millions. A rollback to an older
commit would need payloads that no site has."""
KEPT_AUDIT = 1 << 14
"""Entries of the audit log."""
_OF_ONE_SYNC = (e.OpenRecord, e.PlanRecord, e.WeightsRecord, e.InfluencesRecord)
_OF_ONE_START = (
    e.ManifestRecord, e.SiteRecord, e.AttestationRecord, e.LineRecord, e.DoneRecord, e.LeaseRecord,
    e.CurveRecord,
)  # fmt: skip
DEPOSITED = (
    e.OpenRecord, e.CommitRecord, e.AttestationRecord, e.RollbackRecord, e.AbandonRecord, e.SiteRecord, e.ForgetRecord,
    e.ResetRecord, e.BanRecord, e.BanLiftedRecord, e.InviteRecord, e.InviteForgottenRecord, e.PausedRecord,
    e.ResumedRecord, e.ChangedRecord, e.StopRecord, e.FinishedRecord, e.LineRecord,
)  # fmt: skip
Keys = Callable[[str], Iterable[Key]]
"""All keys of a kind that there are."""


def kind_of(cls: type[Any]) -> str:
    """The name of a record's class in the store."""
    return cls.__name__.removesuffix("Record").lower()


KINDS: dict[str, type[Row]] = {kind_of(cls): cls for cls in (*get_args(e.Record), RunRecord, LossRecord)}


def is_deposited(record: Row) -> bool:
    """With sites, which keep it for a coordinator that has lost its store: what a run cannot be without. What samples
    commits list says what is done; a line of them is deposited as it begins, for its length."""
    return isinstance(record, DEPOSITED) and not (isinstance(record, e.LineRecord) and record.frontier)


def as_deposited(record: Row) -> Row | None:
    """What of a record that is kept is deposited with a site that comes later; None if nothing is."""
    if isinstance(record, e.LineRecord):
        return replace(record, frontier=0, returned=())
    return record if is_deposited(record) else None


def key_of(record: Row) -> Key:
    """A later record of the same key replaces this one."""
    kind = kind_of(type(record))
    match record:
        case e.SiteRecord():
            return Key(kind, part=record.site_id)
        case e.OpenRecord():
            return Key(kind, record.open.sync)
        case e.PlanRecord():
            return Key(kind, record.plan.sync, record.plan.attempt)
        case e.WeightsRecord() | e.InfluencesRecord():
            return Key(kind, record.sync, record.attempt)
        case e.CommitRecord():
            return Key(kind, record.commit.commit)
        case e.AttestationRecord() | LossRecord():
            return Key(kind, record.commit)
        case e.LineRecord() | e.DoneRecord():
            return Key(kind, record.line)
        case e.LeaseRecord():
            return Key(kind, record.line, record.site_id, str(record.incarnation))
        case e.RollbackRecord():
            return Key(kind, record.branch)
        case e.ExclusionRecord():
            return Key(kind, record.sync, record.site_id)
        case e.BanRecord() | e.BanLiftedRecord():
            return Key(kind_of(e.BanRecord), name=record.name)
        case e.AuditRecord():
            return Key(kind, record.number)
        case e.OpenAuditsRecord() | e.AuditsEndedRecord():
            return Key(kind_of(e.OpenAuditsRecord), record.commit)
        case e.ResumedRecord():
            return Key(kind_of(e.PausedRecord))
        case e.InviteRecord() | e.InviteForgottenRecord():
            return Key(kind_of(e.InviteRecord), name=record.invite_id)
        case e.CurveRecord():
            return Key(kind, int(record.of_outer), record.site_id, record.name)
        case _:
            return Key(kind)


def changes(record: Row, keys: Keys) -> dict[Key, Row | None]:
    """What is kept otherwise from now on: the newest record of a key, None where a start needs none any more."""
    own = key_of(record)

    def all_of(*classes: type[Row]) -> list[Key]:
        return [key for cls in classes for key in keys(kind_of(cls))]

    def of_sync(sync: int) -> list[Key]:
        return [key for key in all_of(*_OF_ONE_SYNC) if key.number == sync]

    ended: list[Key] = []
    made: dict[Key, Row | None] = {own: record}
    match record:
        case e.CommitRecord():
            ended = of_sync(record.commit.sync)
            oldest = record.commit.commit - KEPT_COMMITS
            ended += [Key(kind_of(cls), oldest) for cls in HISTORY if oldest > 0]  # the starting state stays attested
            if record.median_loss is not None:
                point = LossRecord(
                    commit=record.commit.commit,
                    run_step=record.commit.run_step,
                    run_tokens=record.commit.run_tokens,
                    median_loss=record.median_loss,
                )
                made[key_of(point)] = point
                if record.commit.commit % THINNED_EVERY == 0:
                    points = all_of(LossRecord)
                    kept = set(thinned(sorted(key.number for key in points)))
                    ended += [key for key in points if key.number not in kept]
        case e.AbandonRecord():
            ended = of_sync(record.sync)
        case e.RollbackRecord():
            ended = [key for key in all_of(*HISTORY, LossRecord, e.OpenAuditsRecord) if key.number > record.commit]
            ended += all_of(e.ChangedRecord)
        case e.ForgetRecord(site_ids=gone):
            ended = [key for key in all_of(e.SiteRecord, e.ExclusionRecord, e.CurveRecord) if key.part in gone]
            ended += [key for key in all_of(e.LineRecord, e.DoneRecord, e.LeaseRecord) if key.number in gone]
        case e.ExclusionRecord():
            newest = sorted({own, *all_of(e.ExclusionRecord)})
            ended = [key for key in newest[:-KEPT_EXCLUSIONS] if key.number < record.sync]
        case e.AuditRecord():
            ended = [key for key in (Key(own.kind, own.number - KEPT_AUDIT),) if key.number > 0]
        case e.ResetRecord():
            ended = all_of(*_OF_ONE_START)
        case e.BanLiftedRecord() | e.InviteForgottenRecord() | e.ResumedRecord() | e.AuditsEndedRecord():
            made[own] = None
        case e.LeaseRecord(ranges=()):
            made[own] = None
    return made | dict.fromkeys(ended)


def thinned(commits: Sequence[int]) -> list[int]:
    """Which of these have a point on a curve that stays bounded: all; of too many every 2nd, 4th, ... commit."""
    kept, stride = list(commits), 1
    while len(kept) > MAX_LOSSES:
        stride *= 2
        kept = [n for n in kept if n % stride == 0]
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisted:
    """What a start of the coordinator reads. `term` is already the new one. The history is its newest part."""

    run: RunRecord
    term: int = 1
    records: Mapping[Key, Row] = field(default_factory=dict)

    def all(self, cls: type[R]) -> tuple[R, ...]:
        """By key, ascending."""
        kind = kind_of(cls)
        return tuple(cast(R, self.records[key]) for key in sorted(k for k in self.records if k.kind == kind))

    def one(self, cls: type[R]) -> R | None:
        """The newest, of what there is one of."""
        return cast(R | None, self.records.get(Key(kind_of(cls))))

    @property
    def last_sync(self) -> int:
        """The highest sync number that may have been used; 0 if none was."""
        used = [record.open.sync for record in self.all(e.OpenRecord)]
        used += [record.commit.sync for record in self.all(e.CommitRecord)]
        used += [record.sync for record in self.all(e.AbandonRecord)]
        used += [record.last_sync for record in self.all(e.ForgetRecord)]
        return max(used, default=0)

    @property
    def last_site_id(self) -> int:
        """The highest ever given when sites were forgotten; those that are here may have higher ones."""
        found = (self.one(e.ForgetRecord), self.one(e.ResetRecord))
        return max((record.last_site_id for record in found if record is not None), default=0)
