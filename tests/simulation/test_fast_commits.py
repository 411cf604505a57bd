"""A site joins where uplinks are so thin, and commits so fast, that payloads come as fast as they can be fetched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.protocol.layout import Manifest
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.coordinator_questions import of_server
from tests.simulation.sites import GROUPED, MANIFEST
from tests.simulation.world import Shape, World, draw_shape_of, play

pytestmark = pytest.mark.timeout(600)

SITES = "site1", "site2", "site3"
JOINER = SITES[-1]
BYTES_PER_S = 100e3
"""Of each site's link, in each direction."""
STEP_S = 0.05
BEFORE, AWAY = 4, 6
"""Commits before it goes, or without it from the start; and until it comes."""
MOST_BEHIND = 20
"""Commits until it contributes, since it held a state. Without what it receives meanwhile it never did."""
NUM_COMMITS = 44
LIMIT_S = 120.0


def a_shape(seed: int, base: Manifest, size: int, sync: SyncSettings, outer: OuterSettings) -> Shape:
    """Of one large matrix and what else the model has, whose payloads fill the links."""
    shape = draw_shape_of(seed, num_sites=3, num_fragments=1)
    tensors = tuple(replace(t, shape=(size, size)) if t.name == "w" else t for t in base.tensors)
    settings = replace(
        shape.settings,
        steps=NUM_COMMITS * sync.every,
        min_sites=2,
        quorum=2,
        save_every=0,
        time_limits="local",
        sync=sync,
        outer=outer,
    )
    return replace(
        shape,
        manifest=replace(base, tensors=tensors),
        settings=settings,
        step_s=(STEP_S,) * 3,
        publish_s=(0.0,) * 3,
        save_s=(0.0,) * 3,
        bf16=(False,) * 3,
        arrives_s=(),
        shares_s=(),
        reduce_buffer_bytes=1 << 30,
        coordinator_busy_s=0.0,
    )


SHAPES = {
    "averages": (
        MANIFEST,
        128,
        SyncSettings(every=2, codec="int8", chunk_elements=1024),
        OuterSettings(learning_rate=0.7, momentum=0.5),
    ),
    "gradients": (
        GROUPED,
        64,
        SyncSettings(strategy="gradient", every=1, codec="bf16", chunk_elements=1024),
        OuterSettings(optimizer="adamw", momentum=0.9),
    ),
}


@pytest.mark.parametrize(
    ("kind", "has_been_here"),
    [
        pytest.param("averages", False, marks=pytest.mark.slow),
        ("averages", True),
        ("gradients", False),
        pytest.param("gradients", True, marks=pytest.mark.slow),
    ],
)
def test_a_site_that_is_behind_comes_to_the_commits_of_others_and_contributes(kind: str, has_been_here: bool) -> None:
    """While it fetches what it lacks it receives what is made meanwhile. Every state is compared with the reference, as
    in all schedules."""
    makers: list[set[int]] = []  # of each commit, by site id
    came, held, joiner = [0], [0], [0]

    async def join(world: World) -> None:
        world.network.thin.update(dict.fromkeys(SITES, BYTES_PER_S))
        if not has_been_here:
            world.lose_site(JOINER)  # before it has said anything
        limit = world.loop.time() + LIMIT_S
        while world.checks.finished is None and world.loop.time() < limit:
            await world.events(1, 1.0)
            num_commits = len(world.checks.commits)
            if has_been_here and num_commits >= BEFORE and not came[0] and JOINER in world.nodes:
                world.kill_site(JOINER, "it comes back")
            if num_commits >= BEFORE + AWAY and not came[0]:
                came[0] = num_commits
                world.start_site(JOINER)
            server = world.server_that_answers()
            if came[0] and not held[0] and server is not None and of_server(server).is_known(JOINER):
                held[0] = num_commits if of_server(server).holds(JOINER) else 0
                joiner[0] = of_server(server).id_of(JOINER)
        makers.extend({c.site_id for c in commit.contributors} for commit in world.checks.commits)

    outcome = play(1, join, a_shape(1, *SHAPES[kind]))
    assert not outcome.problem, f"{outcome.problem}\n{outcome.story}"
    assert 0 < came[0] <= held[0], outcome.story
    first = next((number for number, ids in enumerate(makers, 1) if joiner[0] in ids and number > came[0]), None)
    assert first is not None, f"it only followed the run\n{outcome.story}"
    assert first - held[0] <= MOST_BEHIND, outcome.story
    assert all(joiner[0] in ids for ids in makers[first + 2 : -1]), outcome.story
