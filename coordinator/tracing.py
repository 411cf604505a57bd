"""The coordinator's spans of syncs, from what the store keeps, as it is kept (`sync_times.py` alike). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from atoll.coordinator.core.records import (
    AbandonRecord,
    AttestationRecord,
    CommitRecord,
    OpenRecord,
    PlanRecord,
    Record,
)
from atoll.protocol import traces
from atoll.protocol.traces import Attribute, Place, Span

MOST_COMMITS = 64
"""That wait for their attestation; the oldest is not attested any more where there are more."""


@dataclass(slots=True)
class _Sync:
    begin_s: float
    fragment: int
    attempt: int = 0
    """0: there is no plan yet."""
    planned_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Committed:
    sync: int
    of: _Sync
    at_s: float
    contributors: tuple[str, ...]


class SyncTraces:
    """Since this start of the coordinator: of a sync that began before it there is a part."""

    def __init__(self, run_id: str, send: Callable[[Span], None]) -> None:
        self._run_id = run_id
        self._send = send
        self._open: dict[int, _Sync] = {}
        self._committed: dict[int, _Committed] = {}  # by commit, ascending

    def kept(self, records: Iterable[Record], now: float) -> None:
        """Together, at that time."""
        for record in records:
            match record:
                case OpenRecord(open=begun):
                    self._open.setdefault(begun.sync, _Sync(now, begun.fragment))
                case PlanRecord(plan=plan):
                    sync = self._open.setdefault(plan.sync, _Sync(now, plan.fragment))
                    if sync.attempt:
                        self._attempt(plan.sync, sync, now, "another attempt")
                    else:
                        self._part("collect", plan.sync, sync.begin_s, now)
                    sync.attempt, sync.planned_s = plan.attempt, now
                case CommitRecord(commit=commit):
                    sync = self._open.pop(commit.sync, _Sync(now, commit.fragment))
                    self._attempt(commit.sync, sync, now)
                    names = tuple(member.name for member in commit.contributors)
                    self._committed[commit.commit] = _Committed(commit.sync, sync, now, names)
                    if len(self._committed) > MOST_COMMITS:
                        self._whole(min(self._committed), now)
                case AbandonRecord(sync=number):
                    if (found := self._open.pop(number, None)) is not None:
                        self._attempt(number, found, now, "abandoned")
                        self._root(number, found, now, problem="abandoned")
                case AttestationRecord(commit=number, state_hash=state_hash):
                    for older in [older for older in self._committed if older <= number]:
                        self._whole(older, now, is_attested=bool(state_hash))
                case _:
                    pass

    def _attempt(self, number: int, sync: _Sync, now: float, problem: str = "") -> None:
        if sync.attempt:
            self._part("attempt", number, sync.planned_s, now, problem=problem, attempt=sync.attempt)

    def _whole(self, commit: int, now: float, *, is_attested: bool = False) -> None:
        """A commit needs nothing more."""
        found = self._committed.pop(commit)
        if is_attested:
            self._part("attest", found.sync, found.at_s, now)
        about: dict[str, Attribute] = {"atoll.commit": commit, "atoll.contributors": found.contributors}
        self._root(found.sync, found.of, now, about, problem="" if is_attested else "not attested")

    def _part(self, name: str, number: int, begin_s: float, now: float, *, problem: str = "", attempt: int = 0) -> None:
        root = traces.of_sync(self._run_id, number)
        place = Place(root.trace_id, traces.inside(root.trace_id, name, attempt))
        about: dict[str, Attribute] = {"atoll.attempt": attempt} if attempt else {}
        self._send(
            Span(
                name=name,
                place=place,
                parent=root,
                begin_s=begin_s,
                end_s=now,
                attributes=about,
                problem=problem,
            )
        )

    def _root(self, number: int, sync: _Sync, now: float, about: Mapping[str, Attribute] = {}, *, problem: str) -> None:
        known: dict[str, Attribute] = {"atoll.run": self._run_id, "atoll.sync": number, "atoll.fragment": sync.fragment}
        self._send(
            Span(
                name="sync",
                place=traces.of_sync(self._run_id, number),
                begin_s=sync.begin_s,
                end_s=now,
                attributes={**known, "atoll.attempts": sync.attempt, **about},
                problem=problem,
            )
        )
