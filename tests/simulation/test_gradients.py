"""A site joins while the others exchange at every step: it comes to their state though each step is another commit."""

from __future__ import annotations

from dataclasses import replace

from atoll.protocol.messages import Commit
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.coordinator_questions import of_server
from tests.simulation.sites import MANIFEST as SMALL
from tests.simulation.world import Shape, World, draw_shape_of, play

JOINER = "site3"
BYTES_PER_S = 100e3
"""Of the joiner's link while it fetches: some tens of commits are made meanwhile."""
BEFORE, FETCHED = 10, 20
"""Commits before it comes; those that the others make at least while it fetches."""
NUM_COMMITS = 120
STEP_S = 0.05
MANIFEST = replace(SMALL, tensors=tuple(replace(t, shape=(128, 128)) if t.name == "w" else t for t in SMALL.tensors))
"""A state of some hundred frames."""


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


def test_a_joiner_catches_up_while_the_others_go_on_at_their_pace() -> None:
    """Every state is compared with the reference, as in all schedules."""
    times: list[float] = []
    commits: list[Commit] = []
    fetched: list[int] = []
    joiner: list[int] = []

    async def join(world: World) -> None:
        world.lose_site(JOINER)  # before it has said anything
        while world.checks.finished is None:
            await world.events(1, 1.0)
            times.extend([world.loop.time()] * (len(world.checks.commits) - len(times)))
            server = world.server_that_answers()
            if len(times) >= BEFORE and JOINER not in world.nodes and not fetched:
                world.network.thin[JOINER] = BYTES_PER_S
                world.start_site(JOINER)
            if server is not None and JOINER in world.nodes and of_server(server).is_known(JOINER):
                asked = of_server(server)
                if asked.is_fetching(JOINER):
                    fetched.append(len(times))
                elif asked.has_contributed(JOINER):
                    world.network.thin.clear()
                    joiner[:] = [asked.id_of(JOINER)]
        commits.extend(world.checks.commits)

    outcome = play(1, join, a_shape(1))
    assert not outcome.problem, f"{outcome.problem}\n{outcome.story}"
    first, last = fetched[0], fetched[-1]
    assert last - first >= FETCHED, outcome.story
    alone_s = (times[BEFORE - 1] - times[0]) / (BEFORE - 1)
    beside_s = (times[last - 1] - times[first - 1]) / (last - first)
    assert beside_s <= 1.05 * alone_s, f"{beside_s} s a commit beside a joiner, {alone_s} s before\n{outcome.story}"
    assert all(joiner[0] in {c.site_id for c in commit.contributors} for commit in commits[-10:]), outcome.story
