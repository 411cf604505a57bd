"""A site that is late in a run whose windows are of several steps of its own: a commit without it voids its window."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.protocol.messages import Commit
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.simulation.sites import GROUPED
from tests.simulation.world import Shape, World, draw_shape_of, play

LATE = "site1"
PAUSED_AFTER, NUM_COMMITS = 9, 36
PAUSE_S, STEP_S = 10.0, 1.0


def a_shape(seed: int) -> Shape:
    """Three sites, windows of up to 16 steps."""
    shape = draw_shape_of(seed, num_sites=3, num_fragments=1)
    sync = SyncSettings(
        strategy="momentum", every=1, warmup_commits=2, local_doubling=1, codec="fp32", chunk_elements=4, log_commits=32
    )
    settings = replace(
        shape.settings,
        steps=sync.phases.steps_until(NUM_COMMITS),
        min_sites=3,
        quorum=1,
        save_every=0,
        time_limits="local",
        sync=sync,
        outer=OuterSettings(optimizer="adamw", momentum=0.9),
    )
    return replace(
        shape,
        settings=settings,
        manifest=GROUPED,
        step_s=(STEP_S,) * 3,
        publish_s=(0.0,) * 3,
        save_s=(0.0,) * 3,
        bf16=(False,) * 3,
        reduce_buffer_bytes=1 << 30,
        coordinator_busy_s=0.0,
    )


@pytest.mark.parametrize("seed", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_site_that_missed_a_commit_is_in_later_ones_though_it_is_a_little_slower(seed: int) -> None:
    """Each of its windows would begin as late as the one before ended: it has to hear of commits in mid-window."""
    commits: list[Commit] = []
    late: list[int] = []

    async def pause(world: World) -> None:
        hands = world.nodes[LATE].hands
        while len(world.checks.commits) < PAUSED_AFTER:
            await world.events(1, 1.0)
        begun, hands.step_s = hands.num_steps, PAUSE_S
        while hands.num_steps <= begun + 1:
            await world.events(1, 0.2)
        hands.step_s = 1.05 * STEP_S
        while world.checks.finished is None:
            await world.events(1, 1.0)
        assert world.coordinator is not None
        assert world.coordinator.asked is not None
        late.append(world.coordinator.asked.id_of(LATE))
        commits.extend(world.checks.commits)

    outcome = play(seed, pause, a_shape(seed))
    assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
    holds = [late[0] in {member.site_id for member in commit.contributors} for commit in commits]
    assert len(holds) == NUM_COMMITS
    assert not all(holds[PAUSED_AFTER:]), "it was late"
    assert all(holds[PAUSED_AFTER + 12 :]), holds
