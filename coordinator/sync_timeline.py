"""What the newest syncs spent their time on, as the store keeps it: since this start of the coordinator. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from atoll.coordinator.core.records import (
    AbandonRecord,
    AttestationRecord,
    CommitRecord,
    FinishedRecord,
    OpenRecord,
    PlanRecord,
    Record,
    WeightsRecord,
)

SHOWN_SYNCS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Times are seconds since 1970; None: not yet, or not seen."""

    sync: int
    opened_s: float
    """Sites train, and say that they are ready."""
    ready_s: float | None = None
    """All who are in its last plan were ready: from then on they exchange."""
    ended_s: float | None = None
    attested_s: float | None = None
    """They have applied it."""
    attempts: int = 0
    commit: int | None = None
    """None: it is open, or was abandoned."""


class SyncTimeline:
    def __init__(self) -> None:
        self._open: dict[int, Span] = {}
        self._ended: deque[Span] = deque(maxlen=SHOWN_SYNCS)

    def kept(self, records: Iterable[Record], now_s: float) -> None:
        """Together, at that time."""
        for record in records:
            match record:
                case OpenRecord():
                    self._open[record.open.sync] = Span(sync=record.open.sync, opened_s=now_s)
                case PlanRecord() if (span := self._open.get(record.plan.sync)) is not None:
                    self._open[span.sync] = replace(span, ready_s=None, attempts=record.plan.attempt)
                case WeightsRecord() if (span := self._open.get(record.sync)) is not None:
                    self._open[span.sync] = replace(span, ready_s=now_s)
                case CommitRecord():
                    self._end(record.commit.sync, now_s, record.commit.commit)
                case AbandonRecord():
                    self._end(record.sync, now_s, None)
                case FinishedRecord():
                    for sync in list(self._open):  # nothing comes of it any more
                        self._end(sync, now_s, None)
                case AttestationRecord() if self._ended and self._ended[-1].commit == record.commit:
                    self._ended.append(replace(self._ended.pop(), attested_s=now_s))
                case _:
                    pass

    def _end(self, sync: int, now_s: float, commit: int | None) -> None:
        if (span := self._open.pop(sync, None)) is not None:
            self._ended.append(replace(span, ended_s=now_s, commit=commit))

    def document(self, phases: Mapping[int, Mapping[str, float]]) -> list[dict[str, object]]:
        """The newest, ascending; those that are open come last. `phases`: what sites say of them, by sync."""
        return [asdict(span) | {"phases": phases.get(span.sync)} for span in (*self._ended, *self._open.values())]
