"""One sync: who is ready, its attempts, what keeps sites from it, and its phase. Everything of it is written here."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from enum import Enum

from atoll.coordinator.core.events import OpenRecord, PlanRecord
from atoll.coordinator.core.sync.assignments import assign, suspects_of
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.coordinator.core.sync.blame import Blame, Pair
from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.coordinator.core.sync.decision import Propose
from atoll.coordinator.core.sync.exclusions import Exclusion, Exclusions, Kind, Start
from atoll.coordinator.core.sync.topology import Reducer
from atoll.protocol.messages import Open, Ready, Tree

MAX_ATTEMPTS = 8
MAX_DIGEST_CONFLICTS = 2
STORY_STEPS = 16


class Phase(Enum):
    COLLECTING = "collecting"
    """Sites become ready; there is no plan."""
    PLANNED_AHEAD = "planned ahead"
    """Sites become ready, and have a plan that came with the commit before. It counts once all of them are."""
    EXCHANGING = "exchanging"
    """The contributors of an attempt are ready, and their weights are known."""
    ENDED = "ended"


class Step(Enum):
    PLAN_AHEAD = "is planned with the commit before"
    GIVE_WAY = "does not keep that plan"
    WEIGH = "has everybody ready who was planned"
    PROPOSE = "has an attempt proposed"
    COLLECT_AGAIN = "is collected again"
    COMMIT = "is committed"
    ABANDON = "is abandoned"


TRANSITIONS = {
    (Phase.COLLECTING, Step.PLAN_AHEAD): Phase.PLANNED_AHEAD,
    (Phase.COLLECTING, Step.PROPOSE): Phase.EXCHANGING,
    (Phase.COLLECTING, Step.ABANDON): Phase.ENDED,
    (Phase.PLANNED_AHEAD, Step.GIVE_WAY): Phase.COLLECTING,
    (Phase.PLANNED_AHEAD, Step.WEIGH): Phase.EXCHANGING,
    (Phase.PLANNED_AHEAD, Step.PROPOSE): Phase.EXCHANGING,
    (Phase.PLANNED_AHEAD, Step.COLLECT_AGAIN): Phase.COLLECTING,
    (Phase.PLANNED_AHEAD, Step.ABANDON): Phase.ENDED,
    (Phase.EXCHANGING, Step.PROPOSE): Phase.EXCHANGING,
    (Phase.EXCHANGING, Step.COLLECT_AGAIN): Phase.COLLECTING,
    (Phase.EXCHANGING, Step.COMMIT): Phase.ENDED,
    (Phase.EXCHANGING, Step.ABANDON): Phase.ENDED,
}


class IllegalStep(Exception):
    """A step that the sync's phase does not have: a fault of this code, whatever sites say."""


class Sync:
    def __init__(
        self,
        record: OpenRecord,
        now: float,
        *,
        plans: Sequence[PlanRecord] = (),
        live: Collection[Start] = (),
        earlier: Collection[Pair] = (),
        not_before: float = 0.0,
    ) -> None:
        """`plans` of a sync that was open when the coordinator ended, and who was in the run then. `earlier`: which
        exchanges failed in the syncs before. Nothing is planned `not_before`."""
        self.open: Open = record.open
        self.phase = Phase.COLLECTING
        self.expected: set[int] = set(record.expected)
        self.ready: dict[int, Ready] = {}
        self.losses: dict[int, float] = {}
        self.opened_at = now
        self.first_ready_at: float | None = None
        self.late: frozenset[int] = frozenset()  # who is slower than most, and was not waited for
        self.not_before = not_before
        self.attempts: list[Attempt] = []
        self.exclusions = Exclusions()
        self.blame = Blame(earlier)
        self.num_digest_conflicts = 0
        self.diverged: dict[int, str] = {}  # sites whose loss is not finite since the base, and was before
        self.has_gone_back = False  # because of these, or that was tried
        self.story: deque[str] = deque(maxlen=STORY_STEPS)
        for planned in plans:
            # Its weights may have come late if it is the first: the store has the weights alone.
            self._begin(Attempt(planned, now, weighed_late=planned.plan.attempt == 1))
        if self.attempt is not None:
            self._resume(self.attempt, live, now)

    def _resume(self, attempt: Attempt, live: Collection[Start], now: float) -> None:
        """Who was planned once and is not in the run or in the last plan any more may have discarded its part."""
        plan = attempt.plan
        here = set(attempt.starts()) & set(live)
        for start in {start for before in self.attempts for start in before.starts()} - here:
            self.exclude(start, Kind.GONE, f"site {start[0]} had left when the coordinator ended", now)
        for member, tokens in zip(plan.contributors, attempt.said, strict=True):
            if attempt.is_weighed and (member.site_id, member.incarnation) in here:
                self.ready[member.site_id] = Ready(
                    sync=plan.sync,
                    tokens=tokens,
                    num_steps=plan.num_steps,
                    ranges=attempt.ranges_of(member.site_id),
                )
        self.first_ready_at = now if self.ready else None
        if lost := self.lost():  # what they contributed may be leased to others by now
            attempt.spoil("; ".join(e.reason for e in lost.values()))

    # --- its attempts

    @property
    def attempt(self) -> Attempt | None:
        """The one that its sites know of; None while the sync is collected."""
        return self.attempts[-1] if self.phase in (Phase.PLANNED_AHEAD, Phase.EXCHANGING) else None

    @property
    def last_attempt(self) -> int:
        """Its number; 0 before the first."""
        return self.attempts[-1].plan.attempt if self.attempts else 0

    @property
    def exchange(self) -> Attempt | None:
        """The attempt whose weights are known."""
        return self.attempts[-1] if self.phase is Phase.EXCHANGING else None

    def has_planned(self, start: Start) -> bool:
        """In any attempt."""
        return any(attempt.has(start) for attempt in self.attempts)

    def named(self) -> set[int]:
        """Ids of all sites that the sync may still ask for: expected, ready, or in any of its plans, which outlive the
        coordinator. None of them is forgotten before it ends."""
        planned = (m.site_id for a in self.attempts for m in (*a.plan.contributors, *a.plan.receivers))
        return {*self.expected, *self.ready, *planned}

    def survivors(self) -> list[int]:
        """Contributors of the attempt that are still there and able, ascending."""
        return [start[0] for start in self._contributors() if not self.exclusions.bars(start)]

    def lost(self) -> dict[int, Exclusion]:
        """Contributors of the attempt that went without being done, ascending: it needs another one, unless all others
        are done."""
        return self._gone(Kind.GONE)

    def departed(self) -> dict[int, Exclusion]:
        """Contributors of the attempt that were done and left."""
        return self._gone(Kind.LEFT_DONE)

    def failed(self) -> dict[int, str]:
        """Contributors of the attempt that are here and do not take part any more, ascending, and why."""
        return {start[0]: why for start in self._contributors() if (why := self.exclusions.why_failed(start))}

    def _contributors(self) -> list[Start]:
        return self.attempt.starts() if self.attempt is not None else []

    def _gone(self, kind: Kind) -> dict[int, Exclusion]:
        found = self.exclusions.of(kind)
        return {start[0]: found[start] for start in self._contributors() if start in found} if found else {}

    def trees(
        self,
        sizes: ChunkSizes,
        reducers: Sequence[Reducer],
        on_probation: frozenset[int],
        not_reducing: frozenset[int] = frozenset(),
    ) -> tuple[tuple[Tree, ...], frozenset[int]] | None:
        """Who reduces what in the next attempt, and who does not because exchanges failed in this one. Never those
        `not_reducing`, of whom some are left, nor those without room. None if everything was tried. Raises ConfigError
        if the contributions fit nowhere."""
        ids = {r.site_id for r in reducers}
        not_reducing |= self.exclusions.reasons(Kind.NO_ROOM).keys()
        found_none = self.exclusions.ids(Kind.NO_AVERAGE)
        if not not_reducing | found_none >= ids:
            not_reducing |= found_none
        suspects = suspects_of(self.attempt.failing, ids) if self.attempt is not None else frozenset()
        found = assign(
            sizes,
            reducers,
            suspects=suspects,
            on_probation=on_probation,
            not_reducing=not_reducing,
            tried=[attempt.signature for attempt in self.attempts if attempt.is_weighed],
            blamed=self.blame.of,
        )
        return found and (found[0], suspects if found[1] == suspects else frozenset())

    # --- its phase

    def plan_ahead(self, record: PlanRecord, now: float) -> None:
        """The plan came with the commit before; its weights are not known."""
        self._step(Step.PLAN_AHEAD, f"attempt {record.plan.attempt}")
        self._begin(Attempt(record, now))

    def give_way(self, reason: str) -> None:
        """That plan no longer holds."""
        self._step(Step.GIVE_WAY, reason)

    def weigh(self, record: PlanRecord, now: float) -> None:
        """All contributors of the plan that came with the commit before are ready: their weights and ranges."""
        self._step(Step.WEIGH, "")
        self.attempts[-1].weigh(record, now)

    def propose(self, decision: Propose, now: float) -> Attempt:
        """Another attempt, with weights."""
        self._step(Step.PROPOSE, decision.why)
        self.late = decision.late
        self._begin(Attempt(decision.record, now, suspects=decision.suspects))
        return self.attempts[-1]

    def collect_again(self, reason: str, expected: Iterable[int], now: float) -> None:
        """The attempt has failed, and too few are left for another one."""
        self._step(Step.COLLECT_AGAIN, reason)
        self.expected = set(expected)
        self.first_ready_at = now if self.ready else None

    def commit(self) -> None:
        """Its payloads are the run's next step."""
        self._step(Step.COMMIT, "")

    def abandon(self, reason: str) -> None:
        """It ends without a commit."""
        self._step(Step.ABANDON, reason)

    def _step(self, step: Step, reason: str) -> None:
        """Raises IllegalStep, with what happened before, and changes nothing."""
        then = TRANSITIONS.get((self.phase, step))
        words = f"{step.value}{f' ({reason})' if reason else ''}"
        if then is None:
            story = "; ".join(self.story) or "nothing happened before"
            raise IllegalStep(f"sync {self.open.sync} {words} while it is {self.phase.value}: {story}")
        self.story.append(words)
        self.phase = then

    def _begin(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        self.phase = Phase.EXCHANGING if attempt.is_weighed else Phase.PLANNED_AHEAD

    # --- what sites say

    def take_ready(self, site_id: int, message: Ready, now: float) -> None:
        """The site has sealed what it contributes."""
        self.ready[site_id] = message
        if message.num_steps:  # a snapshot that is taken again, or a script without a loss, says nothing about it
            self.losses[site_id] = message.mean_loss
        if self.first_ready_at is None:
            self.first_ready_at = now

    def note_diverged(self, site_id: int, text: str) -> None:
        """The site's loss is not finite since the base."""
        self.diverged[site_id] = text

    def note_gone_back(self) -> None:
        """The run goes back because of these, or that was tried: once."""
        self.has_gone_back = True

    def note_digest_conflict(self) -> None:
        """Contributors are done with different payloads."""
        self.num_digest_conflicts += 1

    # --- what keeps sites from it

    def exclude(self, start: Start, kind: Kind, reason: str, now: float) -> None:
        """Of this start of the site, until the sync ends."""
        exchange = self.exchange
        attempt = exchange.plan.attempt if exchange is not None and exchange.has(start) else 0
        self.exclusions.note(start, Exclusion(kind=kind, reason=reason, since=now, attempt=attempt))

    def drop(self, start: Start, reason: str, now: float, *, after_done: bool) -> None:
        """The site's contribution is void. If it was planned, peers may hold it: another one cannot take its place.
        `after_done`: it left by itself; if it was done, the attempt goes on without waiting for it."""
        site_id, attempt = start[0], self.attempt
        if self.has_planned(start) or start in self.exclusions:
            was_done = after_done and attempt is not None and attempt.has(start) and site_id in attempt.done
            self.exclude(start, Kind.LEFT_DONE if was_done else Kind.GONE, reason, now)
        self.unexpect(site_id)
        self.ready.pop(site_id, None)
        self.losses.pop(site_id, None)
        if not self.ready:
            self.first_ready_at = None

    def unexpect(self, site_id: int) -> None:
        """The site has nothing to contribute: it is not waited for."""
        self.expected.discard(site_id)
