"""One attempt at a sync: a plan that was persisted, and what sites said of it. Plain data; nobody else writes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from atoll.coordinator.core.events import PlanRecord
from atoll.coordinator.core.sync.blame import Pair
from atoll.coordinator.core.sync.exclusions import Start
from atoll.protocol.messages import DataRange, Done, Plan, Tree
from atoll.protocol.plans import is_weighed, top_of

Signature = tuple[tuple[int, ...], tuple[Tree, ...]]
"""Ids of contributors, and who of them reduces what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAverage:
    """A reducer's word that a tensor has none."""

    reason: str
    by_site_id: int
    accused: Mapping[int, str]
    """Sites whose contributions are to blame for it, and why."""


@dataclass(slots=True, kw_only=True)
class PayloadLists:
    """Hashes of payloads, asked for where Dones differ."""

    until: float
    asked: dict[int, int] = field(default_factory=dict)
    """Site id -> stream."""
    here: dict[int, bytes] = field(default_factory=dict)


class Attempt:
    def __init__(
        self, record: PlanRecord, now: float, *, suspects: frozenset[int] = frozenset(), weighed_late: bool = False
    ) -> None:
        """`suspects`: sites that reduce nothing in this plan, because exchanges failed in the one before.
        `weighed_late`: it was begun without weights, and each site said its own to the others."""
        self.record = record
        self.planned_at = now
        self.suspects = suspects
        self.weighed_late = weighed_late
        self.done: dict[int, Done] = {}
        self.failing: dict[Pair, bool] = {}  # whether the reporter lacks what its peer owes
        self.failed_at: float | None = None  # when the first of these was reported
        self.heard: set[int] = set()  # sites that did not report whom they wait for, and were taken to
        self.traffic_at: dict[int, float] = {}  # site id -> when it last got or gave chunk data
        self.no_average: NoAverage | None = None
        self.lists: PayloadLists | None = None
        self.spoiled = ""  # why it may not commit whatever Dones come
        self._ids = tuple(c.site_id for c in self.plan.contributors)
        self._incarnations = {c.site_id: c.incarnation for c in self.plan.contributors}

    # --- what it is

    @property
    def plan(self) -> Plan:
        """As it was sent, with the weights once they are known."""
        return self.record.plan

    @property
    def ranges(self) -> tuple[tuple[DataRange, ...], ...]:
        """What each contributor was trained on."""
        return self.record.ranges

    @property
    def said(self) -> tuple[int, ...]:
        """Tokens of each contributor's Ready, of which its weight may be less."""
        return self.record.said

    @property
    def is_weighed(self) -> bool:
        """Whether the contributors' weights are known. Those of a plan that came with the commit before are not, until
        all are ready."""
        return is_weighed(self.plan)

    @property
    def is_cut(self) -> bool:
        """Whether a weight is less than what its site said."""
        return any(c.tokens < tokens for c, tokens in zip(self.plan.contributors, self.said, strict=True))

    @property
    def signature(self) -> Signature:
        """Two attempts with the same one are the same exchange."""
        return self._ids, self.plan.trees

    def ids(self) -> tuple[int, ...]:
        """Of the contributors, ascending."""
        return self._ids

    def starts(self) -> list[Start]:
        """The contributors, in the order of ids."""
        return list(self._incarnations.items())

    def has(self, start: Start) -> bool:
        """Whether that start of the site contributes."""
        return self._incarnations.get(start[0]) == start[1]

    def ranges_of(self, site_id: int) -> tuple[DataRange, ...]:
        """Nothing if it does not contribute."""
        return next((r for i, r in zip(self._ids, self.ranges, strict=True) if i == site_id), ())

    def reducing(self) -> set[int]:
        """The sites that reduce something."""
        return {self._ids[top_of(tree)] for tree in self.plan.trees}

    def exchanges(self, site_id: int, peer_id: int) -> bool:
        """Whether the plan has these two contributors send each other anything: one of them reduces."""
        return peer_id in self._incarnations and not self.reducing().isdisjoint((site_id, peer_id))

    def reporters(self) -> set[int]:
        """Sites that could not exchange with somebody, and wait for the coordinator."""
        return self.heard.union(reporter for reporter, _ in self.failing)

    # --- what sites said of it

    def weigh(self, record: PlanRecord, now: float) -> None:
        """All contributors are ready: their weights and ranges are known. What they reported stays."""
        self.record, self.planned_at, self.weighed_late = record, now, True

    def note_done(self, site_id: int, message: Done) -> None:
        """The site has all payloads on its disk."""
        self.done[site_id] = message

    def note_failing(self, pairs: Mapping[Pair, bool], now: float) -> None:
        """Exchanges that failed. Of each: whether the reporter lacks what the peer owes, or else the peer takes
        nothing."""
        self.failing.update(pairs)
        if self.failed_at is None and pairs:
            self.failed_at = now

    def note_heard(self, site_ids: Collection[int]) -> None:
        """Sites that get no further were taken at their word."""
        self.heard.update(site_ids)

    def note_traffic(self, site_id: int, now: float) -> None:
        """The site got or gave chunk data."""
        self.traffic_at[site_id] = now

    def note_no_average(self, found: NoAverage) -> None:
        """The first word of an attempt counts; others judge in the next."""
        self.no_average = self.no_average or found

    def ask_for_lists(self, streams: Mapping[int, int], until: float) -> None:
        """Sites were asked, on these streams. The time for all of them runs from the first question on."""
        self.lists = self.lists or PayloadLists(until=until)
        self.lists.asked.update(streams)

    def note_list(self, site_id: int, hashes: bytes) -> None:
        """The answer to that."""
        if self.lists is not None:
            self.lists.here[site_id] = hashes

    def spoil(self, reason: str) -> None:
        """It may not commit whatever Dones come."""
        self.spoiled = reason
