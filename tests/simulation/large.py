"""One schedule of very many sites: few chunks, few syncs, and a fault of each scale in the middle of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from atoll.coordinator.core.events import CommitRecord, PlanRecord, WeightsRecord
from atoll.protocol import messages as m
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.plans import top_of
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.simulation.loop import START_S
from tests.simulation.sites import MANIFEST, Data
from tests.simulation.world import Outcome, Shape, World, play

NUM_SYNCS = 3
LEAST_SITES = 30
LOST = 0.01
"""Of the sites: killed in the middle of a sync."""
CUT_OFF = 0.03
"""Of the sites: one region, away from everybody else for longer than the lease."""
MOST = 0.9
"""Of the sites: contribute to every commit."""
BUSY_S = 0.005
"""Of the coordinator, each time that it decides: a look at a thousand sites takes some milliseconds."""
LOOK_S = 0.02
CHUNK_ELEMENTS = 4
ALL_REDUCE = 100
"""With more sites a few reduce: the streams of a sync are the square of those that do."""
FAULT_LIMIT_S = 60.0
SAY_EVERY_S = 10.0

Say = Callable[[str], None]


def large(num_sites: int, seed: int = 0, say: Say = lambda text: None) -> Outcome:
    """`say` hears of the progress, every ten seconds of real time."""
    return play(seed, lambda world: _Large(world, say).faults(), large_shape(num_sites, seed))


def large_shape(num_sites: int, seed: int) -> Shape:
    """Up to ALL_REDUCE sites every one reduces, and each has a stream to each other one."""
    generator = random.Random(f"large {seed}")
    settings = RunSettings(
        run_id="sim",
        data="some text",
        steps=NUM_SYNCS,
        min_sites=num_sites,
        quorum=num_sites // 2,
        time_limits="local",
        save_every=0,
        sync=SyncSettings(every=1, codec="int8", chunk_elements=CHUNK_ELEMENTS, log_commits=32),
        outer=OuterSettings(learning_rate=0.7, momentum=0.5),
    )
    num_wide = CHUNK_ELEMENTS * (num_sites if num_sites <= ALL_REDUCE else 1)
    wide = TensorSpec(name="wide", shape=(num_wide,), dtype="F32", role=Role.TRAINABLE)
    return Shape(
        num_sites=num_sites,
        settings=settings,
        data=Data(num_samples=100 * num_sites, batch_size=2, batches_ahead=1, fingerprint=b"f" * 32),
        bf16=tuple(generator.random() < 0.2 for _ in range(num_sites)),
        step_s=tuple(generator.choice([0.02, 0.05, 0.2]) for _ in range(num_sites)),
        publish_s=(0.0,) * num_sites,
        save_s=(0.0,) * num_sites,
        reduce_buffer_bytes=1 << 20,
        coordinator_busy_s=BUSY_S,
        manifest=Manifest.canonical([*MANIFEST.tensors, wide]),
    )


class _Large:
    def __init__(self, world: World, say: Say) -> None:
        self._world = world
        self._say = say
        self._random = random.Random(f"large faults {world.seed}")
        self._began_s = self._said_s = time.monotonic()

    async def faults(self) -> None:
        """One after the other, each at its place in the run; returns when the last has struck."""
        world = self._world
        speaking = asyncio.get_running_loop().create_task(self._speak())
        try:
            await self._until("sync 1 is planned", lambda: self._plan(1) is not None)
            self._kill_some()
            await self._until("commit 1", lambda: self._num_commits() >= 1)
            world.store.crash_after_commit = 2
            await self._until("the coordinator has died", lambda: world.coordinator is None)
            self._struck("coordinator_dies_before_it_sends", "commit 2 is kept, and nobody has heard of it")
            world.later(0.5, world.start_coordinator)
            await self._until("sync 3 is planned", lambda: self._plan(3) is not None)
            self._cut_off_a_region()
            await self._until("commit 3", lambda: self._num_commits() >= 3)
        finally:
            speaking.cancel()
        least = min(len(commit.contributors) for commit in world.checks.commits)
        enough = least >= MOST * world.shape.num_sites
        world.checks.require(enough, f"a commit has {least} contributors: not what this schedule is meant to be")

    def _kill_some(self) -> None:
        """A reducer among them."""
        world, plan = self._world, self._plan(1)
        assert plan is not None
        addresses = [plan.contributors[top_of(tree)].address for tree in plan.trees]
        reducer = self._random.choice(addresses).rpartition(":")[0]
        others = sorted(name for name in world.nodes if name != reducer)
        for name in (reducer, *self._random.sample(others, int(LOST * world.shape.num_sites))):
            world.kill_site(name, "kill -9, with others")
            world.later(self._random.uniform(2.0, 6.0), lambda name=name: world.start_site(name))  # type: ignore[misc]
        self._struck("kill_several", f"a reducer and {int(LOST * world.shape.num_sites)} others")

    def _cut_off_a_region(self) -> None:
        world = self._world
        region = self._random.sample(sorted(world.nodes), int(CUT_OFF * world.shape.num_sites))
        world.partition(region, 5.0)
        self._struck("partition", f"{len(region)} sites from all others and the coordinator")

    def _struck(self, kind: str, what: str) -> None:
        self._world.num_faults[kind] += 1
        self._world.story.tell("fault", f"{kind}: {what}")

    # --- looking on

    def _num_commits(self) -> int:
        return sum(isinstance(record, CommitRecord) for record in self._world.store.kept)

    def _plan(self, sync: int) -> m.Plan | None:
        """The last one, if its weights are said: all are exchanging."""
        kept = self._world.store.kept
        found = [r.plan for r in kept if isinstance(r, PlanRecord) and r.plan.sync == sync]
        weighed = {r.attempt for r in kept if isinstance(r, WeightsRecord) and r.sync == sync}
        return found[-1] if found and found[-1].attempt in weighed else None

    async def _until(self, what: str, happens: Callable[[], bool]) -> None:
        deadline = self._world.loop.time() + FAULT_LIMIT_S
        while not happens():
            if self._world.loop.time() > deadline:
                self._world.checks.failed(f"not within {FAULT_LIMIT_S:g} s of simulated time: {what}")
            await asyncio.sleep(LOOK_S)
        self._speak_of(what)

    async def _speak(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            if time.monotonic() - self._said_s > SAY_EVERY_S:
                self._speak_of("")

    def _speak_of(self, what: str) -> None:
        self._said_s = time.monotonic()
        world = self._world
        took_s, simulated_s = self._said_s - self._began_s, world.loop.time() - START_S
        self._say(
            f"{took_s:5.0f} s: {simulated_s:.1f} s simulated, {len(world.nodes)} sites, {self._num_commits()} commits, "
            f"{world.checks.num_events} events of nodes{': ' if what else ''}{what}"
        )
