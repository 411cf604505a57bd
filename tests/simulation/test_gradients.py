"""A site joins while the others exchange at every step: it comes to their state though each step is another commit."""

from __future__ import annotations

from dataclasses import replace

from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.coordinator_questions import of_server
from tests.simulation.sites import GROUPED
from tests.simulation.world import Shape, World, draw_shape_of, play

JOINER = "site3"
BYTES_PER_S = 20e3
"""Of the joiner's link while it fetches: a chunk is on its way for several commits."""
BEFORE, FETCHED = 20, 8
"""Commits before it comes; those that the others make at least until it holds a state."""
NUM_COMMITS = 192
STEP_S = 0.05
LIMIT_S = 120.0
MANIFEST = replace(GROUPED, tensors=tuple(replace(t, shape=(64, 64)) if t.name == "w" else t for t in GROUPED.tensors))
"""Of five chunks that travel as several frames each."""


def a_shape(seed: int) -> Shape:
    """Of 12 bytes a parameter a site fetches all, of a commit a 64th of that."""
    shape = draw_shape_of(seed, num_sites=3, num_fragments=1)
    sync = SyncSettings(
        strategy="gradient", every=1, codec="sign1", error_feedback=1.0, chunk_elements=1024, log_commits=NUM_COMMITS
    )
    settings = replace(
        shape.settings,
        steps=NUM_COMMITS,
        min_sites=2,
        quorum=2,
        save_every=0,
        sync=sync,
        outer=OuterSettings(optimizer="adamw", momentum=0.9),
    )
    return replace(
        shape,
        manifest=MANIFEST,
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


def test_a_joiner_comes_to_a_state_that_is_another_one_several_times_before_a_chunk_of_it_is_there() -> None:
    """It checks each chunk by the hashes of the commit at which a donor read it, which the donors and the coordinator
    still have. What it costs the others is that plans do not come with the commit before. Then it is one of those who
    make commits. Every state is compared with the reference, as in all schedules."""
    times: list[float] = []
    makers: list[set[int]] = []  # of each commit, by site id
    came, held, joiner = [0], [0], [0]

    async def join(world: World) -> None:
        world.lose_site(JOINER)  # before it has said anything
        limit = world.loop.time() + LIMIT_S
        while world.checks.finished is None and world.loop.time() < limit:
            await world.events(1, 1.0)
            times.extend([world.loop.time()] * (len(world.checks.commits) - len(times)))
            if len(times) >= BEFORE and not came[0]:
                came[0] = len(times)
                world.network.thin[JOINER] = BYTES_PER_S
                world.start_site(JOINER)
            server = world.server_that_answers()
            if came[0] and not held[0] and server is not None and of_server(server).is_known(JOINER):
                held[0] = of_server(server).holds(JOINER) or 0
                if held[0]:
                    joiner[0] = of_server(server).id_of(JOINER)
                    world.network.thin.clear()
        makers.extend({c.site_id for c in commit.contributors} for commit in world.checks.commits)

    outcome = play(1, join, a_shape(1))
    assert not outcome.problem, f"{outcome.problem}\n{outcome.story}"
    assert FETCHED <= held[0] - came[0] <= 3 * FETCHED, outcome.story
    alone_s = (times[came[0] - 1] - times[0]) / (came[0] - 1)
    beside_s = (times[held[0] - 1] - times[came[0] - 1]) / (held[0] - came[0])
    assert beside_s <= alone_s / 0.8, f"{beside_s} s a commit beside a joiner, {alone_s} s before\n{outcome.story}"
    assert joiner[0] not in set().union(*makers[: held[0]])
    assert any(joiner[0] in of_commit for of_commit in makers[held[0] :]), f"it only fetched\n{outcome.story}"
    assert all(len(of_commit) >= 2 for of_commit in makers)
