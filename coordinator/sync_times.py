"""How long the parts of syncs take, as the store keeps them: since this start of the coordinator. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import inf

from atoll.coordinator.core.records import (
    AbandonRecord,
    AttestationRecord,
    CommitRecord,
    OpenRecord,
    PlanRecord,
    Record,
)

BOUNDS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0, inf)
"""From a cluster's network to a window of hours on a thin link."""
PARTS = ("collect", "exchange", "attest")
"""From the opening to the first plan; from the last plan to the commit; from the commit until its state is attested."""


class SyncTimes:
    def __init__(self) -> None:
        self._opened: dict[int, float] = {}  # by sync, those that are collected
        self._planned: dict[int, float] = {}  # by sync: its newest attempt
        self._committed: dict[int, float] = {}  # by commit, those that nobody has attested
        self._counts = {part: [0] * len(BOUNDS_S) for part in PARTS}
        self._totals = dict.fromkeys(PARTS, 0.0)

    def kept(self, records: Iterable[Record], now: float) -> None:
        """Together, at that time."""
        for record in records:
            match record:
                case OpenRecord():
                    self._opened[record.open.sync] = now
                case PlanRecord():
                    self._note("collect", self._opened.pop(record.plan.sync, None), now)
                    self._planned[record.plan.sync] = now
                case CommitRecord():
                    self._opened.pop(record.commit.sync, None)
                    self._note("exchange", self._planned.pop(record.commit.sync, None), now)
                    self._committed = {record.commit.commit: now}  # an older one is attested with it, or never
                case AbandonRecord():
                    self._opened.pop(record.sync, None)
                    self._planned.pop(record.sync, None)
                case AttestationRecord():
                    self._note("attest", self._committed.pop(record.commit, None), now)
                case _:
                    pass

    def _note(self, part: str, since: float | None, now: float) -> None:
        if since is not None:
            self._counts[part][bisect_left(BOUNDS_S, now - since)] += 1
            self._totals[part] += now - since

    def document(self) -> dict[str, dict[str, object]]:
        """By part: how many took at most each of BOUNDS_S and more than the bound before, and the sum of seconds."""
        return {part: {"counts": list(self._counts[part]), "total_s": self._totals[part]} for part in PARTS}
