"""Runs that average by influence (`sync.robust = "gram"`) on simulated time: whatever breaks, the state is what the
influences in the commit log say, and they are kept before anybody averages with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from atoll.coordinator.core.events import InfluencesRecord
from atoll.protocol.plans import influences
from tests.simulation.__main__ import drawn, one
from tests.simulation.some import seeds
from tests.simulation.world import Outcome, Shape, World, draw_shape_of, play

pytestmark = pytest.mark.timeout(360)


def by_influence(shape: Shape) -> Shape:
    settings = shape.settings
    sync = replace(settings.sync, robust="gram", trim=1, codec="int8", up="", down="", mean_over="senders")
    sync = replace(sync, error_feedback_down=0.0)
    min_sites = max(3, settings.min_sites)
    settings = replace(settings, sync=sync, min_sites=min_sites, quorum=3, max_sites=64)
    return replace(shape, settings=settings, arrives_s=(), shares_s=())


def schedule(seed: int) -> Outcome:
    shape = drawn(seed)
    return one(seed, shape=by_influence(shape if shape.num_sites > 3 else draw_shape_of(seed, num_sites=4)))


@seeds(40, every=5)
def test_whatever_breaks_the_invariants_hold(seeds: Sequence[int]) -> None:
    for seed in seeds:
        outcome = schedule(seed)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert outcome.num_commits > 0
