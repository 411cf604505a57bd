"""One sync: who is ready, its attempts, who is done. Decides about plans; `driver` turns decisions into outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.coordinator.core.events import OpenRecord, PlanRecord
from atoll.coordinator.core.sync.blame import Blame, Demotion, Pair, in_words
from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.coordinator.core.sync.topology import Reducer, direct
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import DataRange, Done, Open, Plan, Ready, Tree
from atoll.protocol.plans import is_weighed, top_of

MAX_ATTEMPTS = 8
MAX_DIGEST_CONFLICTS = 2
MIN_TRIES = 3
"""With the same contributors, where there are fewer ways to assign them than that: a link may be bad for a moment, and
after the second failure it is known who is to receive only."""

Signature = tuple[tuple[int, ...], tuple[Tree, ...]]


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A plan that was persisted, and what is known of it."""

    plan: Plan
    ranges: tuple[tuple[DataRange, ...], ...]  # of each contributor
    said: tuple[int, ...]  # tokens of each contributor's Ready, of which its weight may be less
    planned_at: float
    done: dict[int, Done] = field(default_factory=dict)
    lost: dict[int, str] = field(
        default_factory=dict
    )  # contributors that are gone: another attempt unless all are done
    departed: set[int] = field(default_factory=set)  # left after Done: not waited for
    replan_at: float | None = None  # somebody is lost: until then others that are silent may turn out to be as well
    failing: dict[Pair, bool] = field(default_factory=dict)  # whether the reporter lacks what its peer owes
    heard: set[int] = field(default_factory=set)  # sites that did not report whom they wait for, and were taken to
    traffic_at: dict[int, float] = field(default_factory=dict)  # site id -> when it last got or gave chunk data
    retry_at: float | None = None
    no_average: str = ""  # of which tensor, and who says so
    accused: dict[int, str] = field(default_factory=dict)  # whose contributions are to blame for that, and why
    accused_by: int = 0
    lists: dict[int, bytes] = field(default_factory=dict)  # hashes of payloads, asked for where Dones differ
    list_asked: dict[int, int] = field(default_factory=dict)  # site id -> stream
    lists_due: float | None = None
    spoiled: str = ""  # why it may not commit whatever Dones come
    weighed_late: bool = False  # it was begun without weights: each site said its own to the others

    @property
    def is_weighed(self) -> bool:
        """Whether the contributors' weights are known. Those of a plan that came with the commit before are not, until
        all are ready."""
        return is_weighed(self.plan)

    @property
    def is_cut(self) -> bool:
        """Whether a weight is less than what its site said."""
        return any(c.tokens < tokens for c, tokens in zip(self.plan.contributors, self.said, strict=True))

    def ids(self) -> tuple[int, ...]:
        return tuple(c.site_id for c in self.plan.contributors)

    def exchanges(self, site_id: int, peer_id: int) -> bool:
        """Whether the plan has these two contributors send each other anything: one of them reduces."""
        return peer_id in self.ids() and (self.reduces(site_id) or self.reduces(peer_id))

    def reduces(self, site_id: int) -> bool:
        ids = self.ids()
        return any(ids[top_of(tree)] == site_id for tree in self.plan.trees)

    def incarnation_of(self, site_id: int) -> int | None:
        return next((c.incarnation for c in self.plan.contributors if c.site_id == site_id), None)

    def ranges_of(self, site_id: int) -> tuple[DataRange, ...]:
        return next((r for i, r in zip(self.ids(), self.ranges, strict=True) if i == site_id), ())

    def reporters(self) -> set[int]:
        """Sites that could not exchange with somebody, and wait for the coordinator."""
        return self.heard.union(reporter for reporter, _ in self.failing)

    def survivors(self, failed: Mapping[int, str]) -> list[int]:
        """Contributors that are still there and able, ascending."""
        return [i for i in self.ids() if i not in self.lost and i not in self.departed and i not in failed]


class Sync:
    """COLLECTING (no attempt, one without weights yet, or too few survivors of the last one) -> PLANNED -> committed or
    abandoned."""

    def __init__(
        self,
        record: OpenRecord,
        now: float,
        plans: Sequence[PlanRecord] = (),
        live: Collection[tuple[int, int]] = (),
        earlier: Collection[Pair] = (),
    ) -> None:
        """`plans` of a sync that was open when the coordinator ended, and who was in the run then: (site id,
        incarnation). `earlier`: which exchanges failed in the syncs before."""
        self.open: Open = record.open
        self.expected: set[int] = set(record.expected)
        self.ready: dict[int, Ready] = {}
        self.losses: dict[int, float] = {}
        self.opened_at = now
        self.first_ready_at: float | None = None
        self.wait_until: float | None = None  # for those who are not ready
        self.late: frozenset[int] = frozenset()  # of these, those who are not waited for
        self.not_before = now
        self.attempt: Attempt | None = None
        self.last_attempt = 0
        self.failed: dict[int, str] = {}  # sites that cannot contribute to this sync, and why
        self.no_room: dict[int, str] = {}  # sites that cannot hold what they were to reduce, and why
        self.blame = Blame(earlier)
        self.num_digest_conflicts = 0
        self.voided: set[tuple[int, int]] = set()  # (site id, incarnation) whose planned contribution is discarded
        self.suspects: frozenset[int] = frozenset()  # reduce nothing in the last plan, because exchanges failed
        self.demoted: set[int] = set()  # receive only, because exchanges failed
        self.ended_attempts: set[int] = set()  # sites that left, or could not go on, while others exchanged with them
        self.diverged: dict[int, str] = {}  # sites whose loss is not finite since the base, and was before
        self.has_gone_back = False  # because of these, or that was tried
        self.num_accused: Counter[int] = Counter()  # attempts in which a contribution was said to be absurd
        self.excluded: set[int] = set()  # contribute nothing, because of what they contributed
        self.no_average_at: set[int] = set()  # sites that found a tensor without an average: others look at it again
        self._planned: set[tuple[int, int]] = set()
        self._issued: set[Signature] = set()
        self._num_tried: Counter[tuple[int, ...]] = Counter()  # attempts with these contributors
        for planned in plans:
            self.begin(planned, now)
        if self.attempt is not None:
            self.attempt.weighed_late = self.last_attempt == 1  # perhaps; the store has the weights alone
            self._resume(self.attempt, live, now)

    def _resume(self, attempt: Attempt, live: Collection[tuple[int, int]], now: float) -> None:
        """Who was planned once and is not in the run or in the last plan any more may have discarded its part."""
        plan = attempt.plan
        self.voided = self._planned - ({(c.site_id, c.incarnation) for c in plan.contributors} & set(live))
        for member, tokens in zip(plan.contributors, attempt.said, strict=True):
            if (member.site_id, member.incarnation) in self.voided:
                attempt.lost[member.site_id] = f"site {member.site_id} had left when the coordinator ended"
            elif attempt.is_weighed:
                self.ready[member.site_id] = Ready(
                    sync=plan.sync,
                    tokens=tokens,
                    num_steps=plan.num_steps,
                    ranges=attempt.ranges_of(member.site_id),
                )
        self.first_ready_at = now if self.ready else None

    def begin(self, record: PlanRecord, now: float) -> Attempt:
        plan = record.plan
        self._planned.update((c.site_id, c.incarnation) for c in plan.contributors)
        self.attempt = Attempt(plan=plan, ranges=record.ranges, said=record.said, planned_at=now)
        self.last_attempt = plan.attempt
        if self.attempt.is_weighed:
            self._note_tried(self.attempt)
        return self.attempt

    def weigh(self, record: PlanRecord, now: float) -> None:
        """All contributors of the attempt are ready; these are their weights and ranges. What they reported stays."""
        attempt = self.attempt
        assert attempt is not None
        attempt.plan, attempt.ranges, attempt.said = record.plan, record.ranges, record.said
        attempt.planned_at = now
        attempt.weighed_late = True
        self._note_tried(attempt)  # one that gave way before has not been tried

    def _note_tried(self, attempt: Attempt) -> None:
        self._issued.add((attempt.ids(), attempt.plan.trees))
        self._num_tried[attempt.ids()] += 1

    def has_planned(self, site_id: int, incarnation: int) -> bool:
        """In any attempt."""
        return (site_id, incarnation) in self._planned

    def drop(self, site_id: int, incarnation: int) -> None:
        """The site's contribution is void. If it was planned, peers may hold it: another one cannot take its place."""
        if (site_id, incarnation) in self._planned:
            self.voided.add((site_id, incarnation))
        self.failed.pop(site_id, None)
        self.no_room.pop(site_id, None)
        self.ready.pop(site_id, None)
        self.losses.pop(site_id, None)
        self.expected.discard(site_id)
        if not self.ready:
            self.first_ready_at = None

    # --- choosing reducers

    def trees(
        self,
        sizes: ChunkSizes,
        reducers: Sequence[Reducer],
        on_probation: frozenset[int],
        not_reducing: frozenset[int] = frozenset(),
    ) -> tuple[Tree, ...] | None:
        """Trees that were not tried with these contributors yet, away from pairs that could not exchange, and at first
        from those `on_probation`; never with those `not_reducing`, of whom some are left, or those without room.

        Where these are few, the first of them again. None if everything was tried. Raises ConfigError if the
        contributions fit nowhere.
        """
        ids = tuple(r.site_id for r in reducers)
        problem: ConfigError | None = None
        tried: list[tuple[frozenset[int], tuple[Tree, ...]]] = []
        not_reducing |= self.no_room.keys()
        if not not_reducing | self.no_average_at >= set(ids):
            not_reducing |= self.no_average_at
        suspects = self._suspects(ids)
        for avoid, rotation in self._choices(ids, suspects, on_probation):
            if avoid | not_reducing >= set(ids):
                continue
            try:
                trees = direct(sizes, reducers, avoid=avoid | not_reducing, rotation=rotation)
            except ConfigError as error:
                problem = problem or error
                continue
            if (ids, trees) not in self._issued:
                break
            tried.append((avoid, trees))
        else:
            if problem is not None and not tried:
                raise problem
            if not tried or self._num_tried[ids] >= MIN_TRIES:
                return None
            avoid, trees = tried[0]
        self.suspects = suspects if avoid == suspects else frozenset()
        return trees

    def _suspects(self, ids: tuple[int, ...]) -> frozenset[int]:
        """The one site that is in all failing pairs, or all that are in one; none if nobody else would be left."""
        pairs = [frozenset(pair) for pair in sorted(self.attempt.failing)] if self.attempt else []
        if not pairs:
            return frozenset()
        common = frozenset.intersection(*pairs)
        suspects = common if len(common) == 1 else frozenset.union(*pairs)
        return suspects if not suspects >= set(ids) else frozenset()

    def _choices(
        self, ids: tuple[int, ...], suspects: frozenset[int], on_probation: frozenset[int]
    ) -> Iterator[tuple[frozenset[int], int]]:
        known = (suspects | on_probation) & set(ids)
        if known and known != set(ids):
            yield known, 0
        if suspects:
            yield suspects, 0
        yield frozenset(), 0
        for rotation in range(1, len(ids)):
            yield frozenset(), rotation
        # One reducer for all, the least blamed first.
        for only in sorted(ids, key=lambda i: (self.blame.of(i), i)):
            yield frozenset(ids) - {only}, 0

    # --- what went wrong

    def settle_failures(self, ids: Sequence[int], quorum: int) -> list[tuple[Demotion, str]]:
        """Notes what failed in this attempt. Who is to be a receiver from now on, and why."""
        assert self.attempt is not None
        self.blame.note(self.attempt.failing)
        what = "an attempt" if self.blame.num_failures == 1 else f"{self.blame.num_failures} attempts"
        why = f"{what} could not be exchanged (sites {in_words(self.attempt.failing)})"
        return [(demotion, why) for demotion in self.blame.to_demote(ids, quorum)]
