"""Two coordinators on one store, in some dozens of schedules: the leader dies, hangs past its lease and goes on with a
write, or does not reach the store, amid faults of sites and links."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tests.simulation.__main__ import drawn
from tests.simulation.faults import Fault, draw_faults, strike
from tests.simulation.some import seeds
from tests.simulation.standby import OF_TWO
from tests.simulation.world import Outcome, World, play

ALONE = ("old_store", "another_run", "mute_coordinator", "stop_coordinator")
"""Not of two: something else in the coordinator's place, and what `OF_TWO` has in its own way."""


def with_a_standby(seed: int) -> tuple[Outcome, Counter[str]]:
    """And what happened to the store."""
    generator = random.Random(f"standby {seed}")
    usual = [fault for fault in draw_faults(seed) if fault.kind not in ALONE]
    chosen = usual[:2]
    for _ in range(generator.choice([1, 2, 3])):
        fault = Fault(
            kind=generator.choice(list(OF_TWO)),
            after_events=min(int(generator.expovariate(1 / 40)), 200),
            delay_s=generator.choice([0.0, generator.uniform(0, 0.05)]),
            lasts_s=generator.choice([generator.uniform(0.5, 5), generator.uniform(5, 30)]),
            draw=generator.randrange(1 << 30),
        )
        chosen.insert(generator.randrange(len(chosen) + 1), fault)
    happened: Counter[str] = Counter()

    async def faults(world: World) -> None:
        assert world.shared is not None
        world.shared.happened = happened
        await strike(world, chosen)

    return play(seed, faults, replace(drawn(seed), has_standby=True)), happened


@seeds(24, every=8)
def test_whichever_of_two_leads_the_invariants_hold(seeds: Sequence[int]) -> None:
    happened: Counter[str] = Counter()
    for seed in seeds:
        outcome, of_store = with_a_standby(seed)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert outcome.num_commits > 0
        happened += of_store
    assert happened["terms"] > len(seeds), "others took over"
