"""Two coordinators on one store: the store as each of them sees it, the lease on its clock, and faults of the two."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from atoll.coordinator.core.events import CommitRecord, Record
from atoll.coordinator.core.persisted import Persisted
from atoll.coordinator.lease import LEASE_S, SEEN_WITHIN_S, Claim, Held, Standby
from atoll.coordinator.stage import Stage
from atoll.protocol.errors import HostError, StaleError
from atoll.protocol.messages import Deposit
from atoll.protocol.settings import RunSettings

if TYPE_CHECKING:
    from tests.simulation.faults import Fault, Strike
    from tests.simulation.processes import SimStore
    from tests.simulation.world import World


class Shared:
    """What a database has beside the records. Its clock is that of the simulation."""

    def __init__(self, store: SimStore, clock: Callable[[], float]) -> None:
        self.store = store
        self.clock = clock
        self.holder = self.address = ""
        self.until = 0.0
        self.seen: dict[str, tuple[str, float]] = {}
        """Who stands by: its address, and when it said so."""
        self.cut: set[str] = set()
        """Machines that the database does not answer."""
        self.loses_answer = False
        """Of the next COMMIT of a commit: it is kept, and nobody hears that."""
        self.happened: Counter[str] = Counter()

    def answers(self, machine: str) -> None:
        if machine in self.cut:
            raise HostError("the store does not answer")


class SharedView:
    """The store as one start of a coordinator has it."""

    def __init__(self, shared: Shared, claim: Claim, machine: str, takes: Callable[[], None]) -> None:
        self._shared = shared
        self._claim = claim
        self._machine = machine
        self._takes = takes
        store = shared.store
        self.read_commits, self.deposits_after = store.read_commits, store.deposits_after
        self.last_seq, self.restore, self.copy_to = store.last_seq, store.restore, store.copy_to
        self.commit_times, self.close = store.commit_times, store.close

    def begin(self, settings: RunSettings, parent_json: str = "") -> Persisted:
        shared = self._shared
        shared.answers(self._machine)
        held = Held(shared.holder, shared.address, shared.until - shared.clock())
        self._claim.check("the store", held)
        persisted = shared.store.begin(settings, parent_json)
        self._takes()
        shared.holder, shared.address, shared.until = self._claim.holder, self._claim.address, shared.clock() + LEASE_S
        shared.seen.pop(self._claim.holder, None)
        shared.happened["terms"] += 1
        return persisted

    def persist(self, term: int, records: Sequence[Record], wall_time_s: float) -> tuple[Deposit, ...]:
        shared = self._shared
        shared.answers(self._machine)
        if term != shared.store._term:
            shared.happened["refused"] += 1
            raise StaleError(f"the store: term {term} is over, the newest is {shared.store._term}")
        deposits = shared.store.persist(term, records, wall_time_s)
        if shared.loses_answer and any(isinstance(record, CommitRecord) for record in records):
            shared.loses_answer = False
            shared.happened["answers lost"] += 1
            raise HostError("the connection to the store broke")
        return deposits


class SimLease:
    def __init__(self, shared: Shared, claim: Claim, machine: str) -> None:
        self._shared = shared
        self._claim = claim
        self._machine = machine

    def stand_by(self, roots: frozenset[str]) -> Held:
        shared, claim = self._shared, self._claim
        shared.answers(self._machine)
        shared.seen[claim.holder] = claim.address, shared.clock()
        return Held(shared.holder, shared.address, shared.until - shared.clock())

    def renew(self) -> tuple[Standby, ...] | None:
        shared, now = self._shared, self._shared.clock()
        shared.answers(self._machine)
        if shared.holder != self._claim.holder or shared.until <= now:
            return None
        shared.until = now + LEASE_S
        seen = sorted(address for address, at in shared.seen.values() if at > now - SEEN_WITHIN_S)
        return tuple(Standby(address, frozenset()) for address in seen)

    def keep_stage(self, stage: Stage) -> bool:
        raise AssertionError("no root is rotated here")

    def end(self) -> None:
        if self._shared.holder == self._claim.holder:
            self._shared.until = self._shared.clock()


# --- faults, as in faults.py


def kill_leader(world: World, fault: Fault, generator: random.Random) -> None:
    world.kill_coordinator("kill -9")
    world.later(fault.lasts_s, world.start_coordinator)


def kill_both(world: World, fault: Fault, generator: random.Random) -> None:
    for coordinator in list(world.coordinators.values()):
        world.end_coordinator(coordinator, "kill -9, with the other one")
    world.later(fault.lasts_s, world.start_coordinator)


def kill_who_stands_by(world: World, fault: Fault, generator: random.Random) -> None:
    for coordinator in list(world.coordinators.values()):
        if coordinator is not world.coordinator:
            world.end_coordinator(coordinator, "kill -9")
    world.later(fault.lasts_s, world.start_coordinator)


def hang_leader(world: World, fault: Fault, generator: random.Random) -> None:
    if world.coordinator is not None:
        world.stop(world.coordinator.process, fault.lasts_s)


def hang_in_front_of_commit(world: World, fault: Fault, generator: random.Random) -> None:
    """It goes on with just that, when its lease may be another one's."""
    if world.coordinator is not None:
        world.coordinator.hangs_before_commit_s = generator.choice([0.5, LEASE_S - 0.5, 2 * LEASE_S, 6 * LEASE_S])


def cut_leader_from_store(world: World, fault: Fault, generator: random.Random) -> None:
    if world.coordinator is not None:
        _cut_from_store(world, world.coordinator.process.machine, fault.lasts_s)


def cut_who_stands_by_from_store(world: World, fault: Fault, generator: random.Random) -> None:
    for machine, coordinator in world.coordinators.items():
        if coordinator is not world.coordinator:
            _cut_from_store(world, machine, fault.lasts_s)


def _cut_from_store(world: World, machine: str, lasts_s: float) -> None:
    assert world.shared is not None
    world.story.tell("world", f"the store does not answer {machine}")
    cut = world.shared.cut
    cut.add(machine)

    def mend() -> None:
        cut.discard(machine)
        world.start_coordinator()

    world.later(lasts_s, mend)


def lose_answer(world: World, fault: Fault, generator: random.Random) -> None:
    assert world.shared is not None
    world.shared.loses_answer = True
    world.later(fault.lasts_s, world.start_coordinator)


OF_TWO: dict[str, Strike] = {
    "kill_leader": kill_leader,
    "kill_both": kill_both,
    "kill_who_stands_by": kill_who_stands_by,
    "hang_leader": hang_leader,
    "hang_in_front_of_commit": hang_in_front_of_commit,
    "cut_leader_from_store": cut_leader_from_store,
    "cut_who_stands_by_from_store": cut_who_stands_by_from_store,
    "lose_answer": lose_answer,
}
