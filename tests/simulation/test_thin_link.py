"""One site's link is thin: it rests, the others keep their pace, and what it trained is in its turns' commits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from atoll.protocol import messages as m
from tests.simulation.__main__ import one
from tests.simulation.faults import Fault, draw_faults
from tests.simulation.sites import MANIFEST as SMALL
from tests.simulation.world import Outcome, Shape, World, draw_shape_of, play

pytestmark = pytest.mark.timeout(600)

THIN = "site1"
THIN_BYTES_PER_S = 200e3
EVERY = 8
STEP_S = 0.1
LEARNT = 16
"""Commits until it is known what a turn costs."""
MENDED = 33
NUM_SCHEDULES = 24
PARTS = 6
PARTS_IN_TEST = 2
"""In `make test`; the others are slow."""
NUM_SYNCS = 42
MANIFEST = replace(SMALL, tensors=tuple(replace(t, shape=(128, 128)) if t.name == "w" else t for t in SMALL.tensors))
"""Each contribution is several frames: only what follows the first one shows a link."""


@dataclass(frozen=True, slots=True)
class Found:
    outcome: Outcome
    commits: tuple[m.Commit, ...]
    times: tuple[float, ...]
    """Of the commits."""
    thin: int
    """Id of the site whose link is."""

    def steps_per_s(self, first: int, last: int) -> float:
        """Of the run, between these commits."""
        steps = self.commits[last - 1].run_step - self.commits[first - 1].run_step
        return steps / (self.times[last - 1] - self.times[first - 1])

    def turns(self, first: int, last: int) -> list[int]:
        """Commits to which the thin site contributed."""
        return [c.commit for c in self.commits[first - 1 : last] if self.thin in {x.site_id for x in c.contributors}]


def a_shape(seed: int, num_sites: int, num_syncs: int) -> Shape:
    """Of sites that are as fast as each other, and large contributions for a simulated network."""
    shape = draw_shape_of(seed, num_sites=num_sites, num_fragments=1)
    sync = replace(
        shape.settings.sync,
        every=EVERY,
        codec="fp32",
        up="",
        down="",
        error_feedback=0.0,
        overlap_steps=0,
        merge="keep",
        alpha=0.0,
        chunk_elements=1024,
        log_commits=32,
    )
    settings = replace(shape.settings, steps=num_syncs * EVERY, min_sites=num_sites, quorum=1, save_every=0, sync=sync)
    return replace(
        shape,
        manifest=MANIFEST,
        settings=settings,
        step_s=(STEP_S,) * num_sites,
        publish_s=(0.0,) * num_sites,
        bf16=(False,) * num_sites,
        reduce_buffer_bytes=1 << 30,
    )


def run(seed: int, num_sites: int, num_syncs: int, bytes_per_s: float | None = None) -> Found:
    """A link of that rate, which is like the others after commit `MENDED`."""
    times: list[float] = []
    commits: list[m.Commit] = []
    ids: list[int] = []

    async def thin_link(world: World) -> None:
        if bytes_per_s is not None:
            world.network.thin[THIN] = bytes_per_s
        while world.checks.finished is None:
            await world.events(1, 1.0)
            times.extend([world.loop.time()] * (len(world.checks.commits) - len(times)))
            if len(times) >= MENDED:
                world.network.thin.clear()
        assert world.coordinator is not None
        assert world.coordinator.asked is not None
        ids.append(world.coordinator.asked.id_of(THIN))
        commits.extend(world.checks.commits)

    outcome = play(seed, thin_link, a_shape(seed, num_sites, num_syncs))
    assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
    return Found(outcome, tuple(commits), tuple(times), ids[0])


def test_others_keep_their_pace_beside_a_thin_link_whose_site_counts_all_the_same_until_it_recovers() -> None:
    without = run(1, 4, 10)
    found = run(1, 5, NUM_SYNCS, THIN_BYTES_PER_S)
    assert found.steps_per_s(LEARNT, MENDED) >= 0.9 * without.steps_per_s(2, 9), found.outcome.story
    turns = found.turns(LEARNT, MENDED)
    assert 2 <= len(turns) <= 4, found.outcome.story
    assert found.turns(NUM_SYNCS - 2, NUM_SYNCS) == [NUM_SYNCS - 2, NUM_SYNCS - 1, NUM_SYNCS], found.outcome.story


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] * (part >= PARTS_IN_TEST)) for part in range(PARTS)]
)
def test_whatever_breaks_while_a_site_rests_the_invariants_hold(part: int) -> None:
    """In runs of many syncs, so that there are turns between the faults."""
    num_turns = 0
    for seed in range(part, NUM_SCHEDULES, PARTS):
        outcome = beside_faults(seed)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        num_turns += "as if its link were thin" in outcome.story
    assert num_turns


def beside_faults(seed: int) -> Outcome:
    shape = draw_shape_of(seed, num_sites=2 + seed % 3)
    settings = replace(shape.settings, steps=24 * shape.window_steps, quorum=1)
    rests = Fault(kind="thin_link", after_events=30 + seed, delay_s=0.0, lasts_s=30.0, draw=seed)
    return one(seed, [rests, *draw_faults(seed)], replace(shape, settings=settings))
