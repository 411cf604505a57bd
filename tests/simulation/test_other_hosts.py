"""Sites of several hosts that are all needed, and lose their other hosts again and again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.simulation.__main__ import one
from tests.simulation.faults import Fault
from tests.simulation.some import seeds
from tests.simulation.world import Outcome, Shape, draw_shape_of

NUM_LOSSES = 8


def a_shape(seed: int) -> Shape:
    """No commit is made without all sites, each of two hosts."""
    shape = draw_shape_of(seed, num_sites=2 + seed % 2)
    generator, num = random.Random(f"other hosts {seed}"), shape.num_sites
    arrives_s, shares_s = (tuple(generator.choice([0.03, 0.3, 1.0]) for _ in range(num)) for _ in range(2))
    settings = replace(shape.settings, min_sites=num, quorum=num)
    return replace(shape, settings=settings, arrives_s=arrives_s, shares_s=shares_s)


def losing_hosts(seed: int) -> Outcome:
    times = random.Random(f"losses {seed}")
    losses = [
        Fault(
            kind="lose_host",
            after_events=times.randrange(2, 60),
            delay_s=times.uniform(0, 0.5),
            lasts_s=times.uniform(0.1, 3.0),
            draw=times.randrange(1 << 30),
        )
        for _ in range(NUM_LOSSES)
    ]
    return one(seed, losses, a_shape(seed))


@seeds(40)
def test_whatever_is_lost_of_snapshots_with_a_host_the_run_goes_on(seeds: Sequence[int]) -> None:
    """What a lost host was to send is not promised for ever."""
    for seed in seeds:
        outcome = losing_hosts(seed)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert outcome.num_commits > 0


@seeds(12)
def test_without_losses_no_exchange_lacks_what_another_host_sends(seeds: Sequence[int]) -> None:
    for seed in seeds:
        outcome = one(seed, [], a_shape(seed))
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert "is not on all of its hosts" not in outcome.story
