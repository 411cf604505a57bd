"""Several syncs are in flight, each of a fragment of its own, because a message takes longer than the ranks need from
one boundary to the next. A quarter of the schedules that are drawn have them, with faults: `draw_shape_of`."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest

from atoll.node.core.events import MergeMode
from tests.simulation.faults import FAULTS, Fault
from tests.simulation.some import seeds
from tests.simulation.world import Outcome, Shape, World, draw_shape_of, play

pytestmark = pytest.mark.timeout(600)

NUM, EVERY = 4, 8
WINDOW = EVERY // NUM
NUM_CYCLES = 5
STEP_S, DELAY_S = 0.05, 0.05
"""A sync takes several messages, one after the other, and is longer than a window of two steps."""
LIMIT_S = 60.0


def a_shape(
    seed: int, *, num_sites: int = 0, overlap_steps: int = EVERY, merge: str = "keep", steps: int = NUM_CYCLES * EVERY
) -> Shape:
    """Of sites that are all needed in every sync, and as fast as each other."""
    shape = draw_shape_of(seed, num_sites=num_sites or 1 + seed % 3, num_fragments=NUM)
    num_sites = shape.num_sites
    sync = replace(
        shape.settings.sync,
        every=EVERY,
        overlap_steps=overlap_steps,
        merge=merge,
        alpha=0.5 if merge == "mix" else 0.0,
    )
    settings = replace(shape.settings, steps=steps, min_sites=num_sites, quorum=num_sites, save_every=0, sync=sync)
    return replace(
        shape,
        settings=settings,
        step_s=(STEP_S,) * num_sites,
        publish_s=(0.0,) * num_sites,
        bf16=(False,) * num_sites,
        most_delay_s=DELAY_S,
    )


def played(seed: int, shape: Shape, happens: Callable[[World], Awaitable[None]]) -> Outcome:
    outcome = play(seed, happens, shape)
    assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
    return outcome


async def nothing(world: World) -> None:
    pass


def has_trained(world: World, num_steps: int) -> bool:
    """All sites together, more steps than these or as many."""
    return sum(hands.num_steps for hands in world.hands.values()) >= num_steps


def has_committed(world: World, num_commits: int) -> bool:
    """More than these."""
    return len(world.checks.commits) > num_commits


async def until(world: World, holds: Callable[[], bool]) -> None:
    """Looks after every event."""
    limit = world.loop.time() + LIMIT_S
    while not holds():
        assert world.loop.time() < limit, f"it is not so within {LIMIT_S:g} s"
        await world.events(1, 1.0)


def has_several(world: World) -> str:
    """A site with several snapshots in flight. Empty: none has."""
    return max(world.nodes, key=world.num_in_flight) if any(world.num_in_flight(n) > 1 for n in world.nodes) else ""


# --- nothing breaks


@pytest.mark.parametrize("merge", ["keep", "mix"])
@pytest.mark.parametrize("overlap_steps", [WINDOW + 1, EVERY])
@seeds(3, every=2, first=1)
def test_several_syncs_are_in_flight_and_each_step_is_in_one_commit(
    overlap_steps: int, merge: str, seeds: Sequence[int]
) -> None:
    for seed in seeds:
        outcome = played(seed, a_shape(seed, overlap_steps=overlap_steps, merge=merge), nothing)
        assert outcome.num_steps == outcome.num_steps_in_commits == NUM_CYCLES * EVERY * (1 + seed % 3), outcome.story
        assert outcome.num_commits == NUM_CYCLES * NUM, outcome.story
        assert 2 <= outcome.most_in_flight <= -(-overlap_steps // WINDOW), outcome.story
        assert not outcome.num_merges[MergeMode.SHIFT], outcome.story
        assert outcome.num_merges[MergeMode.MIX if merge == "mix" else MergeMode.MERGE] > NUM, outcome.num_merges


def test_with_an_overlap_of_a_window_one_is_in_flight() -> None:
    for seed in range(3):
        outcome = played(seed, a_shape(seed, overlap_steps=WINDOW), nothing)
        assert outcome.num_steps == outcome.num_steps_in_commits
        assert outcome.most_in_flight == 1


@pytest.mark.parametrize("steps", [EVERY - 1, 2 * EVERY + 1, 3 * EVERY - 1])
def test_a_run_of_an_odd_length_ends_there(steps: int) -> None:
    for seed in range(3):
        outcome = played(seed, a_shape(seed, steps=steps), nothing)
        assert outcome.num_steps == outcome.num_steps_in_commits == steps * (1 + seed % 3), outcome.story


@seeds(6, first=1)
def test_a_run_that_is_stopped_with_several_in_flight_ends_with_all_that_was_trained(seeds: Sequence[int]) -> None:
    async def stop(world: World) -> None:
        await until(world, lambda: len(world.checks.commits) > 2 and bool(has_several(world)))
        world.stop_run()

    for seed in seeds:
        outcome = played(seed, a_shape(seed, steps=400), stop)
        assert outcome.num_steps == outcome.num_steps_in_commits < 400, outcome.story


# --- what it is good for


@dataclass(frozen=True, slots=True)
class Utilization:
    share: float
    """Of the time between two commits in which the sites trained."""
    outcome: Outcome


def utilization(overlap_steps: int, delay_s: float = DELAY_S, seed: int = 2) -> Utilization:
    """Of three sites, each message on its way as long as the others. A snapshot and an update take time as well."""
    found: list[tuple[float, float]] = []
    first, last = 2 * EVERY, 7 * EVERY

    async def look(world: World) -> None:
        world.network.weather.least_delay_s = delay_s
        for step in (first, last):
            await until(world, partial(has_trained, world, 3 * step))
            found.append((world.loop.time(), sum(hands.trained_s for hands in world.hands.values())))

    shape = a_shape(seed, num_sites=3, overlap_steps=overlap_steps, steps=9 * EVERY)
    settings = replace(shape.settings, data="local")
    outcome = played(seed, replace(shape, data=None, settings=settings, most_delay_s=delay_s), look)
    (began_s, before_s), (ended_s, after_s) = found
    return Utilization((after_s - before_s) / 3 / (ended_s - began_s), outcome)


def test_on_links_slower_than_a_window_sites_hardly_wait_where_several_are_in_flight() -> None:
    seeds = (2, 5, 8, 11)  # a schedule alone says 0.92 to 1.00
    late = [utilization(EVERY, seed=n) for n in seeds]
    kept = [u.share / utilization(EVERY, delay_s=0.001, seed=n).share for n, u in zip(seeds, late, strict=True)]
    blocking, one, several = utilization(0, seed=seeds[0]), utilization(WINDOW, seed=seeds[0]), late[0]
    assert (blocking.outcome.most_in_flight, one.outcome.most_in_flight) == (1, 1)
    assert several.outcome.most_in_flight > 2, several.outcome.story
    assert sum(kept) / len(kept) > 0.95, kept
    assert several.share > 2 * one.share
    assert blocking.share < one.share < 0.5


# --- what breaks


@seeds(8, first=1)
def test_a_coordinator_that_dies_with_several_open_goes_on_with_each(seeds: Sequence[int]) -> None:
    async def dies(world: World) -> None:
        least = min(3, 1 + len(world.nodes))  # a site alone has nobody to exchange with
        for _ in range(3):
            await until(world, lambda: world.num_open_syncs() >= least and bool(has_several(world)))
            commits = len(world.checks.commits)
            world.kill_coordinator("kill -9")
            world.later(0.3, world.start_coordinator)
            await until(world, partial(has_committed, world, commits))

    for seed in seeds:
        outcome = played(seed, a_shape(seed, steps=6 * EVERY), dies)
        assert outcome.num_steps == outcome.num_steps_in_commits == 6 * EVERY * (1 + seed % 3), outcome.story


@pytest.mark.parametrize("kind", ["kill_site", "crash_workers", "stop_site"])
@seeds(10, first=1)
def test_what_a_site_had_in_flight_counts_once_whatever_becomes_of_it(kind: str, seeds: Sequence[int]) -> None:
    """Killed, with new workers, or gone on when the others have committed without it."""
    num_shifts = 0

    async def breaks(world: World) -> None:
        for lasts_s in (0.5, 4.0, 0.5):
            await until(world, lambda: bool(has_several(world)))
            fault = Fault(kind=kind, after_events=0, delay_s=0.0, lasts_s=lasts_s, draw=0)
            await_or_none = FAULTS[kind][0](world, fault, random.Random(world.seed))
            assert await_or_none is None
            await world.events(200, lasts_s + 2.0)

    for seed in seeds:
        shape = a_shape(seed, num_sites=3, steps=7 * EVERY)
        shape = replace(shape, settings=replace(shape.settings, min_sites=1, quorum=1))
        outcome = played(seed, shape, breaks)
        assert outcome.most_in_flight > 1
        num_shifts += outcome.num_merges[MergeMode.SHIFT]
    assert num_shifts or kind == "crash_workers"


@seeds(6, every=2, first=1)
def test_a_site_that_a_commit_leaves_out_lists_its_steps_again(seeds: Sequence[int]) -> None:
    """The others commit some fragments without it, while others of its snapshots are in flight."""
    num_shifts = 0

    async def is_cut_off(world: World) -> None:
        for draw in range(4):
            await until(world, lambda: bool(has_several(world)))
            fault = Fault(kind="cut_off", after_events=0, delay_s=0.0, lasts_s=1.5, draw=draw)
            FAULTS["cut_off"][0](world, fault, random.Random(world.seed + draw))
            await world.events(150, 3.5)

    for seed in seeds:
        shape = a_shape(seed, num_sites=3, steps=10 * EVERY)
        shape = replace(shape, settings=replace(shape.settings, min_sites=1, quorum=1))
        outcome = played(seed, shape, is_cut_off)
        num_shifts += outcome.num_merges[MergeMode.SHIFT]
        assert outcome.most_in_flight > 1
    assert num_shifts


@seeds(10, first=1)
def test_a_sync_that_is_held_up_while_the_other_fragment_goes_on_counts_once(seeds: Sequence[int]) -> None:
    """A reducer takes contributions and says for ever that it waits. The others come to the end of what the oldest
    snapshot lets them train; meanwhile commits of the other fragment come, some without them."""
    most_overtaken: list[int] = []

    async def waits(world: World) -> None:
        await until(world, lambda: bool(has_several(world)))
        fault = Fault(kind="waiting_only", after_events=0, delay_s=0.0, lasts_s=30.0, draw=world.seed)
        FAULTS["waiting_only"][0](world, fault, random.Random(world.seed))
        await world.events(2000, 30.0)
        await world.settle()
        syncs = [commit.sync for commit in world.checks.commits]
        most_overtaken.append(max(sum(later > sync for later in syncs[:at]) for at, sync in enumerate(syncs)))

    for seed in seeds:
        shape = a_shape(seed, num_sites=3, steps=6 * EVERY // 2)
        sync = replace(shape.settings.sync, every=EVERY // 2, fragments=2, overlap_steps=EVERY // 2)
        settings = replace(shape.settings, min_sites=2, quorum=1, sync=sync)
        played(seed, replace(shape, settings=settings), waits)
    assert sum(overtaken >= 2 for overtaken in most_overtaken) > len(seeds) // 2, most_overtaken


@seeds(8, first=1)
def test_a_run_that_goes_back_with_several_in_flight_ends_as_if_they_had_never_been(seeds: Sequence[int]) -> None:
    num_returns = 0

    async def goes_back(world: World) -> None:
        nonlocal num_returns
        for draw in range(2):
            before = len(world.checks.commits)
            await until(world, partial(has_committed, world, before + NUM))
            await until(world, lambda: bool(has_several(world)))
            world.go_back(random.Random(draw))
            await world.events(100, 3.0)
        num_returns += world.num_returns

    for seed in seeds:
        shape = a_shape(seed, steps=8 * EVERY)
        sync = replace(shape.settings.sync, log_commits=8 * NUM)  # back to any of them
        outcome = played(seed, replace(shape, settings=replace(shape.settings, sync=sync)), goes_back)
        assert outcome.most_in_flight > 1
    assert num_returns > len(seeds)
