"""One sync: who is ready, its attempts, what keeps sites from it, and its phase. Everything of it is written here."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from enum import Enum

from atoll.coordinator.core.events import InfluencesRecord, OfPlan, OpenRecord, PlanRecord, WeightsRecord
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.coordinator.core.sync.blame import Blame, Pair
from atoll.coordinator.core.sync.decision import Wait
from atoll.coordinator.core.sync.exclusions import VOID, Exclusion, Exclusions, Kind, Start
from atoll.protocol.messages import Open, Plan, Ready

MAX_ATTEMPTS = 8
MAX_DIGEST_CONFLICTS = 2
STORY_STEPS = 16


class Phase(Enum):
    COLLECTING = "collecting"
    """Sites become ready; there is no plan."""
    PLANNED = "planned"
    """There is a plan, which counts once all its contributors are ready: at once, if it was not made ahead."""
    EXCHANGING = "exchanging"
    """The contributors of an attempt are ready, and their weights are known."""
    ENDED = "ended"


class Step(Enum):
    PROPOSE = "has an attempt proposed"
    GIVE_WAY = "does not keep that plan"
    WEIGH = "has everybody ready who was planned"
    COLLECT_AGAIN = "is collected again"
    COMMIT = "is committed"
    ABANDON = "is abandoned"


TRANSITIONS = {
    (Phase.COLLECTING, Step.PROPOSE): Phase.PLANNED,
    (Phase.COLLECTING, Step.ABANDON): Phase.ENDED,
    (Phase.PLANNED, Step.PROPOSE): Phase.PLANNED,
    (Phase.PLANNED, Step.GIVE_WAY): Phase.COLLECTING,
    (Phase.PLANNED, Step.WEIGH): Phase.EXCHANGING,
    (Phase.PLANNED, Step.COLLECT_AGAIN): Phase.COLLECTING,
    (Phase.PLANNED, Step.ABANDON): Phase.ENDED,
    (Phase.EXCHANGING, Step.PROPOSE): Phase.PLANNED,
    (Phase.EXCHANGING, Step.COLLECT_AGAIN): Phase.COLLECTING,
    (Phase.EXCHANGING, Step.COMMIT): Phase.ENDED,
    (Phase.EXCHANGING, Step.ABANDON): Phase.ENDED,
}


class IllegalStep(Exception):
    """A step that the sync's phase does not have: a fault of this code, whatever sites say."""

    def __init__(self, sync: int, text: str) -> None:
        super().__init__(f"sync {sync} {text}")
        self.sync = sync


class Sync:
    def __init__(
        self,
        record: OpenRecord,
        now: float,
        *,
        plans: Sequence[PlanRecord] = (),
        said: Sequence[OfPlan] = (),
        live: Collection[Start] = (),
        earlier: Collection[Pair] = (),
        not_before: float = 0.0,
    ) -> None:
        """`plans` of a sync that was open when the coordinator ended, what was `said` of these after them, and who was
        in the run then. `earlier`: which exchanges failed in the syncs before. Nothing is planned `not_before`."""
        self.open: Open = record.open
        self.phase = Phase.COLLECTING
        self.expected: set[int] = set(record.expected)
        self.ready: dict[int, Ready] = {}
        self.ready_at: dict[int, float] = {}
        self.losses: dict[int, float] = {}
        self.opened_at = now
        self.first_ready_at: float | None = None
        self.late: frozenset[int] = frozenset()  # who is slower than most, and was not waited for
        self.not_before = not_before
        self.attempts: list[Attempt] = []
        self.exclusions = Exclusions()
        self.blame = Blame(earlier)
        self.num_digest_conflicts = 0
        self.wait = ""
        self.story: deque[str] = deque(maxlen=STORY_STEPS)
        if plans:
            self._resume(plans, said, live, now)

    def _resume(
        self,
        plans: Sequence[PlanRecord],
        said: Sequence[OfPlan],
        live: Collection[Start],
        now: float,
    ) -> None:
        """Who was planned once and is not in the run or in the last plan any more may have discarded its part."""
        self.attempts = [Attempt(record.plan, now) for record in plans]
        known = {attempt.plan.attempt: attempt for attempt in self.attempts}
        for found in said:
            if isinstance(found, WeightsRecord):
                known[found.attempt].weigh(found, now)
            else:
                known[found.attempt].influence(found, now)
        last = self.attempts[-1]
        self.phase = Phase.EXCHANGING if last.is_weighed else Phase.PLANNED
        here = set(last.starts()) & set(live)
        for start in {start for attempt in self.attempts for start in attempt.starts()} - here:
            self.exclude(start, Kind.GONE, f"site {start[0]} had left when the coordinator ended", now)
        for start, ready in zip(last.starts(), last.readys(), strict=True) if last.is_weighed else ():
            if start in here:
                self.ready[start[0]] = ready
        self.first_ready_at = now if self.ready else None
        if lost := self.gone(Kind.GONE):  # what they contributed may be leased to others by now
            last.spoil("; ".join(e.reason for e in lost.values()))

    # --- its window

    @property
    def end_step(self) -> int:
        """Of the run: the last step of its window."""
        return self.open.run_step + self.open.num_steps

    # --- its attempts

    @property
    def is_exchanged(self) -> bool:
        """The contributors of the attempt are ready."""
        return self.phase is Phase.EXCHANGING

    @property
    def attempt(self) -> Attempt | None:
        """The one that its sites know of; None while the sync is collected."""
        return self.attempts[-1] if self.phase in (Phase.PLANNED, Phase.EXCHANGING) else None

    @property
    def last_attempt(self) -> int:
        """Its number; 0 before the first."""
        return self.attempts[-1].plan.attempt if self.attempts else 0

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

    def gone(self, *kinds: Kind) -> dict[int, Exclusion]:
        """Contributors of the attempt that are not here any more, ascending. It needs another one without those that
        are GONE, unless all others are done."""
        found = self.exclusions.of(*kinds or VOID)
        return {start[0]: found[start] for start in self._contributors() if start in found}

    def failed(self) -> dict[int, str]:
        """Contributors of the attempt that are here and do not take part any more, ascending, and why."""
        failed = self.exclusions.failed()
        return {start[0]: failed[start[0]] for start in self._contributors() if start[0] in failed}

    def _contributors(self) -> list[Start]:
        return self.attempt.starts() if self.attempt is not None else []

    # --- its phase

    def propose(
        self,
        plan: Plan,
        why: str,
        now: float,
        *,
        suspects: frozenset[int] = frozenset(),
        late: frozenset[int] = frozenset(),
    ) -> None:
        """The next attempt. `suspects`: who reduces nothing in it, because exchanges failed in the one before. `late`:
        who is slower than most, and was not waited for."""
        self._step(Step.PROPOSE, why)
        self.late = late
        self.attempts.append(Attempt(plan, now, suspects=suspects))

    def give_way(self, reason: str) -> None:
        """The plan that was made ahead no longer holds."""
        self._step(Step.GIVE_WAY, reason)

    def weigh(self, weights: WeightsRecord, now: float) -> None:
        """All contributors of the attempt are ready."""
        self._step(Step.WEIGH, "")
        self.attempts[-1].weigh(weights, now)

    def influence(self, found: InfluencesRecord, now: float) -> None:
        """What the reducers of the attempt average with."""
        self.attempts[-1].influence(found, now)

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
            raise IllegalStep(self.open.sync, f"{words} while it is {self.phase.value}: {story}")
        self.story.append(words)
        self.phase = then

    # --- what sites say

    def take_ready(self, site_id: int, message: Ready, now: float) -> None:
        """The site has sealed what it contributes."""
        self.ready[site_id] = message
        self.ready_at.setdefault(site_id, now)
        if message.num_steps:  # a snapshot that is taken again, or a script without a loss, says nothing about it
            self.losses[site_id] = message.mean_loss
        if self.first_ready_at is None:
            self.first_ready_at = now

    def note_digest_conflict(self) -> None:
        """Contributors are done with different payloads."""
        self.num_digest_conflicts += 1

    def waits(self, wait: Wait) -> None:
        """For what, as `deciding` has it."""
        self.wait = wait.reason

    # --- what keeps sites from it

    def exclude(self, start: Start, kind: Kind, reason: str, now: float) -> None:
        """Of this start of the site, until the sync ends."""
        current = self.attempts[-1] if self.phase is Phase.EXCHANGING else None
        attempt = current.plan.attempt if current is not None and current.has(start) else 0
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
        self.ready_at.pop(site_id, None)
        self.losses.pop(site_id, None)
        if not self.ready:
            self.first_ready_at = None

    def unexpect(self, site_id: int) -> None:
        """The site has nothing to contribute: it is not waited for."""
        self.expected.discard(site_id)
