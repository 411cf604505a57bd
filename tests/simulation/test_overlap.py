"""Sites train on while they exchange, on a network where that takes as long as some steps. Half of the schedules that
are drawn do, with faults: `draw_shape_of`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from atoll.node.core.events import MergeMode
from tests.simulation.some import seeds
from tests.simulation.world import Outcome, Shape, World, draw_shape_of, play

pytestmark = pytest.mark.timeout(600)

EVERY = 4
NUM_SYNCS = 6


def a_shape(seed: int, overlap_steps: int, merge: str, steps: int = NUM_SYNCS * EVERY) -> Shape:
    """Of sites that are all needed in every sync, and as fast as each other."""
    shape = draw_shape_of(seed, num_sites=1 + seed % 3, num_fragments=1)
    num_sites = shape.num_sites
    alpha = 0.5 if merge == "mix" else 0.0
    sync = replace(shape.settings.sync, every=EVERY, overlap_steps=overlap_steps, merge=merge, alpha=alpha)
    settings = replace(shape.settings, steps=steps, min_sites=num_sites, quorum=num_sites, sync=sync)
    return replace(shape, settings=settings, step_s=(0.05,) * num_sites, bf16=(False,) * num_sites)


def on_a_slow_network(seed: int, shape: Shape, *, stop: bool = False) -> Outcome:
    async def nothing_breaks(world: World) -> None:
        world.network.weather.most_delay_s = 0.05
        while stop and len(world.checks.commits) < 2:
            await world.events(5, 1.0)
        if stop:
            world.stop_run()

    outcome = play(seed, nothing_breaks, shape)
    assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
    return outcome


@pytest.mark.parametrize("merge", ["keep", "mix"])
@pytest.mark.parametrize("overlap_steps", [1, 2, EVERY])
@seeds(6, first=1)
def test_steps_beyond_snapshots_are_trained_and_each_is_in_a_commit(
    overlap_steps: int, merge: str, seeds: Sequence[int]
) -> None:
    """Until the end of the run: the last sync is not overlapped."""
    how = MergeMode.MIX if merge == "mix" else MergeMode.MERGE
    for seed in seeds:
        outcome = on_a_slow_network(seed, a_shape(seed, overlap_steps, merge))
        assert outcome.num_steps == outcome.num_steps_in_commits, outcome.story
        assert outcome.num_merges[how] >= NUM_SYNCS - 2, outcome.num_merges
        assert not outcome.num_merges[MergeMode.SHIFT]


@pytest.mark.parametrize("overlap_steps", [1, EVERY])
def test_a_run_of_an_odd_length_ends_there(overlap_steps: int) -> None:
    for seed in range(4):
        steps = NUM_SYNCS * EVERY - 1 - seed
        outcome = on_a_slow_network(seed, a_shape(seed, overlap_steps, "keep", steps))
        assert outcome.num_steps == outcome.num_steps_in_commits == steps * (1 + seed % 3), outcome.story


@pytest.mark.parametrize("overlap_steps", [0, 1, EVERY])
@seeds(6, first=1)
def test_a_stopped_run_ends_with_all_that_was_trained(overlap_steps: int, seeds: Sequence[int]) -> None:
    for seed in seeds:
        outcome = on_a_slow_network(seed, a_shape(seed, overlap_steps, "keep", 400), stop=True)
        assert outcome.num_steps == outcome.num_steps_in_commits < 400, outcome.story
        assert outcome.num_commits <= 5


def test_without_overlap_nothing_is_trained_beyond_a_snapshot() -> None:
    outcome = on_a_slow_network(2, a_shape(2, 0, "keep"))
    assert set(outcome.num_merges) == {MergeMode.REPLACE}
