"""One attempt at a sync: a plan that was persisted, its weights once they are known, and what sites said of it. Plain
data; nobody else writes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from atoll.coordinator.core.events import InfluencesRecord, WeightsRecord
from atoll.coordinator.core.sync.blame import Pair
from atoll.coordinator.core.sync.exclusions import Start
from atoll.protocol.messages import DataRange, Done, Influences, Plan, Ready, Weights
from atoll.protocol.plans import reducing


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
    def __init__(self, plan: Plan, now: float, *, suspects: frozenset[int] = frozenset()) -> None:
        """`suspects`: sites that reduce nothing in this plan, because exchanges failed in the one before."""
        self.plan = plan
        self._weights: WeightsRecord | None = None  # until all contributors are ready
        self.planned_at = now  # or when all were ready
        self.products: dict[int, tuple[float, ...]] = {}  # inner products of contributions, by reducer
        self.influences: tuple[int, ...] = ()  # found by these, of the contributors
        self.averages_since = now  # when reducers heard that, if they wait for it
        self.suspects = suspects
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
    def is_weighed(self) -> bool:
        """Whether all contributors are ready, and their weights are said."""
        return self._weights is not None

    @property
    def weights(self) -> WeightsRecord:
        """Of an attempt that is weighed."""
        assert self._weights is not None, f"attempt {self.plan.attempt} of sync {self.plan.sync} is not weighed"
        return self._weights

    def readys(self) -> list[Ready]:
        """What is kept of each contributor's Ready, once it is weighed."""
        weights = self.weights
        errors = weights.error_commits or ((),) * len(weights.said)
        roots = weights.roots or (b"",) * len(weights.said)
        signatures = weights.signatures or (None,) * len(weights.said)
        return [
            Ready(
                sync=self.plan.sync,
                tokens=tokens,
                num_steps=self.plan.num_steps,
                ranges=ranges,
                error_commits=error_commits,
                rates=weights.rates,
                contributions_root=root,
                signature=signature,
            )
            for tokens, ranges, error_commits, root, signature in zip(
                weights.said, weights.ranges, errors, roots, signatures, strict=True
            )
        ]

    def weights_message(self) -> Weights:
        """What the plan's sites are told after it, once it is weighed."""
        plan = self.plan
        tokens, roots = self.weights.tokens, self.weights.roots
        return Weights(sync=plan.sync, attempt=plan.attempt, term=plan.term, tokens=tokens, roots=roots)

    def influences_message(self) -> Influences:
        """What they are told after that, if they average by influence."""
        plan = self.plan
        return Influences(sync=plan.sync, attempt=plan.attempt, term=plan.term, influences=self.influences)

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
        """What the site was trained on; nothing if it does not contribute, or that is not known."""
        ranges = self._weights.ranges if self._weights is not None else ()
        return next((r for i, r in zip(self._ids, ranges, strict=False) if i == site_id), ())

    def reducing(self) -> set[int]:
        """The sites that reduce something."""
        return reducing(self.plan)

    def exchanges(self, site_id: int, peer_id: int) -> bool:
        """Whether the plan has these two contributors send each other anything: one of them reduces."""
        return peer_id in self._incarnations and not self.reducing().isdisjoint((site_id, peer_id))

    @property
    def runs_since(self) -> float:
        """Its deadline is counted from then: anew once reducers hear what contributions count, if they wait for it."""
        return max(self.planned_at, self.averages_since)

    def reporters(self) -> set[int]:
        """Sites that could not exchange with somebody, and wait for the coordinator."""
        return self.heard.union(reporter for reporter, _ in self.failing)

    # --- what sites said of it

    def weigh(self, weights: WeightsRecord, now: float) -> None:
        """All contributors are ready: their time runs from now on. What they reported stays."""
        self._weights, self.planned_at = weights, now

    def note_products(self, site_id: int, products: tuple[float, ...]) -> None:
        """What a reducer says of all contributions to its chunks. It says it again on a new stream."""
        self.products.setdefault(site_id, products)

    def influence(self, found: InfluencesRecord, now: float) -> None:
        """Its reducers average from now on."""
        self.influences, self.averages_since = found.influences, now

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
