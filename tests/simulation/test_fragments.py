"""Sites sync their model in several fragments, on a network where that takes as long as some steps. Half of the
schedules that are drawn do, with faults: `draw_shape_of`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.node.core.events import MergeMode
from tests.simulation.test_overlap import on_a_slow_network
from tests.simulation.world import Shape, draw_shape_of

pytestmark = pytest.mark.timeout(600)

EVERY = 8
NUM_CYCLES = 3


def a_shape(
    seed: int, num: int, *, merge: str = "keep", overlaps: bool = True, steps: int = NUM_CYCLES * EVERY
) -> Shape:
    """Of sites that are all needed in every sync, and as fast as each other."""
    shape = draw_shape_of(seed, num_sites=1 + seed % 3, num_fragments=num)
    num_sites = shape.num_sites
    sync = replace(
        shape.settings.sync,
        every=EVERY,
        overlap_steps=EVERY // num if overlaps else 0,
        merge=merge,
        alpha=0.5 if merge == "mix" else 0.0,
    )
    settings = replace(shape.settings, steps=steps, min_sites=num_sites, quorum=num_sites, sync=sync)
    return replace(shape, settings=settings, step_s=(0.05,) * num_sites, bf16=(False,) * num_sites)


@pytest.mark.parametrize("num", [2, 3, 8])
@pytest.mark.parametrize(("merge", "overlaps"), [("keep", False), ("keep", True), ("mix", True)])
def test_each_step_is_in_a_commit_and_the_last_one_is_of_all(num: int, merge: str, overlaps: bool) -> None:
    for seed in range(3):
        outcome = on_a_slow_network(seed, a_shape(seed, num, merge=merge, overlaps=overlaps))
        assert outcome.num_steps == outcome.num_steps_in_commits == NUM_CYCLES * EVERY * (1 + seed % 3), outcome.story
        assert outcome.num_commits == NUM_CYCLES * num, outcome.story
        assert not outcome.num_merges[MergeMode.SHIFT], "what a commit did not touch is not taken again"


@pytest.mark.parametrize("num", [2, 8])
def test_a_run_of_an_odd_length_ends_there(num: int) -> None:
    for seed in range(3):
        steps = NUM_CYCLES * EVERY - 1 - seed
        outcome = on_a_slow_network(seed, a_shape(seed, num, steps=steps))
        assert outcome.num_steps == outcome.num_steps_in_commits == steps * (1 + seed % 3), outcome.story


@pytest.mark.parametrize(("num", "overlaps"), [(2, False), (2, True), (8, True)])
def test_a_stopped_run_ends_with_all_that_was_trained(num: int, overlaps: bool) -> None:
    for seed in range(4):
        outcome = on_a_slow_network(seed, a_shape(seed, num, overlaps=overlaps, steps=400), stop=True)
        assert outcome.num_steps == outcome.num_steps_in_commits < 400, outcome.story
