"""Some hundred schedules of the simulator. `make sim` runs thousands; see tests/simulation/__main__.py."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import statistics
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atoll.coordinator.core.events import SiteRecord
from atoll.node.core.events import Content, Difference, Values
from atoll.node.dataplane.averages import Contributions
from atoll.node.dataplane.optim import OuterUpdate
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.sync.average_errors import AverageErrors
from atoll.node.exchange.sync.spill import Spilled
from atoll.protocol import messages as m
from atoll.protocol import wire
from atoll.protocol.codecs.arithmetic import NOTHING, Floats
from atoll.protocol.errors import DigestMismatch, RefusedError
from atoll.protocol.layout import Role
from tests.harness.site_questions import take_no_care_of_bases
from tests.simulation.__main__ import one
from tests.simulation.checks import Unsound
from tests.simulation.faults import FAULTS, MOST_WAIT_S, Fault, draw_faults, strike
from tests.simulation.large import LEAST_SITES, NUM_SYNCS, large
from tests.simulation.liars import SORTS
from tests.simulation.processes import SimDataPlane
from tests.simulation.some import seeds
from tests.simulation.world import Outcome, Shape, World, draw_shape_of, play, with_a_straggler

pytestmark = pytest.mark.timeout(600)

NUM_SCHEDULES = 200
PARTS = 10
PARTS_IN_TEST = 2
"""In `make test`; the others are slow."""
SEEDS_OVERTAKEN = 12
OF_EACH_SORT = (6, 10, 14, 19, 34, 37, 40, 41, 47, 50, 51, 59, 65, 68)
"""Of 96 schedules with a dispute those in which a liar does what `SORTS` names, each twice if there are so many."""


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] * (part >= PARTS_IN_TEST)) for part in range(PARTS)]
)
def test_whatever_breaks_the_invariants_hold(part: int) -> None:
    for seed in range(part, NUM_SCHEDULES, PARTS):
        outcome = one(seed)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert outcome.num_commits > 0


def behind_nat(seed: int) -> Outcome:
    """The schedule of that seed, with sites of which only the first can be dialled, ever."""
    chosen = [fault for fault in draw_faults(seed) if fault.kind not in ("undialable", "lose_site")]

    async def faults(world: World) -> None:
        world.network.undialable.update(f"site{i}" for i in range(2, 10))
        await strike(world, chosen)

    return play(seed, faults, draw_shape_of(seed, num_sites=2 + seed % 3))


@seeds(40)
def test_one_site_that_can_be_dialled_is_enough_whoever_holds_the_state(seeds: Sequence[int]) -> None:
    for seed in seeds:
        outcome = behind_nat(seed)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert outcome.num_commits > 0


def overtaken(seed: int) -> Outcome:
    """One site is far slower than the others, whose syncs are abandoned now and then: it hears of a sync on a later
    commit while it applies or publishes the one before."""
    times = random.Random(f"overtaken {seed}")
    abandons = [
        Fault(
            kind="abandon_syncs",
            after_events=0,
            delay_s=times.uniform(0, 2),
            lasts_s=0.0,
            draw=times.randrange(1 << 30),
        )
        for _ in range(8)
    ]
    return one(seed, abandons, with_a_straggler(draw_shape_of(seed, num_sites=3 + seed % 2, num_fragments=1), times))


@seeds(SEEDS_OVERTAKEN)
def test_a_site_that_is_overtaken_contributes_what_it_trained(seeds: Sequence[int]) -> None:
    for seed in seeds:
        outcome = overtaken(seed)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert outcome.num_commits > 0


@seeds(40, every=8)
def test_a_power_cut_while_one_site_has_the_starting_state_loses_nothing(seeds: Sequence[int]) -> None:
    for seed in seeds:
        cut = Fault(kind="power_cut", after_events=8 + seed % 20, delay_s=0.02, lasts_s=5.0, draw=seed)
        outcome = one(8300 + seed, [cut])
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"


def beside_one_that_only(kind: str, seed: int, shape: Shape | None = None) -> tuple[Outcome, list[str]]:
    """Waits, or pulls payloads. With what other sites were evicted for while the run went on."""
    evicted: list[str] = []

    async def faults(world: World) -> None:
        await world.events(10 + 5 * seed, MOST_WAIT_S)
        hostile = Fault(kind=kind, after_events=0, delay_s=0.0, lasts_s=300.0, draw=seed)
        ends_at = world.loop.time() + hostile.lasts_s
        FAULTS[kind][0](world, hostile, random.Random(seed))
        while world.checks.finished is None and world.loop.time() < ends_at:
            await world.events(1, 1.0)
        sites = [record for record in world.store.kept if isinstance(record, SiteRecord)]
        evicted.extend(f"{s.name}: {s.evicted}" for s in sites if s.evicted and s.name not in world.hostile)
        await asyncio.sleep(max(0.0, ends_at - world.loop.time()) + 1)

    return play(seed, faults, shape or draw_shape_of(seed, num_sites=2 + seed % 3)), evicted


@seeds(17)
def test_beside_a_reducer_that_only_waits_no_other_site_is_evicted(seeds: Sequence[int]) -> None:
    num_found = 0
    for seed in seeds:
        outcome, evicted = beside_one_that_only("waiting_only", seed)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert not evicted, f"seed {seed}: {evicted}\n{outcome.story}"
        num_found += "could not exchange" in outcome.story
    assert num_found > 2


@seeds(17)
def test_beside_a_member_that_pulls_payloads_again_and_again_no_other_site_is_evicted(seeds: Sequence[int]) -> None:
    num_found = 0
    for seed in seeds:
        shape = draw_shape_of(seed, num_sites=2 + seed % 3)
        settings = replace(shape.settings, min_sites=shape.num_sites, quorum=1)
        settings = replace(settings, steps=12 * shape.window_steps)
        outcome, evicted = beside_one_that_only("pulls_again", seed, replace(shape, settings=settings))
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert not evicted, f"seed {seed}: {evicted}\n{outcome.story}"
        num_found += "evicted" in outcome.story
    assert num_found > 2


def while_replaced(seed: int, kind: str, lasts_s: float) -> tuple[Outcome, list[tuple[int, str]], int]:
    """Something else is at the coordinator's address from some moment in mid-run on. With the exits of sites until it
    goes again, and how many steps beyond a boundary they did meanwhile."""
    exits: list[tuple[int, str]] = []
    num_steps = 0
    shape = draw_shape_of(seed, num_sites=2, num_fragments=1)

    async def faults(world: World) -> None:
        nonlocal num_steps
        while not any(commit.commit for commit in world.checks.commits):
            await world.events(10, 1.0)
        before = sum(hands.num_steps for hands in world.hands.values())
        strikes = Fault(kind=kind, after_events=0, delay_s=0.0, lasts_s=lasts_s, draw=seed)
        FAULTS[kind][0](world, strikes, random.Random(seed))
        await asyncio.sleep(lasts_s * 0.99)
        exits.extend(node.result for node in world.ended.values() if node.result is not None)
        num_steps = sum(hands.num_steps for hands in world.hands.values()) - before

    return play(seed, faults, replace(shape, settings=replace(shape.settings, steps=40))), exits, num_steps


@seeds(5)
def test_another_run_at_the_coordinators_address_refuses_every_site_in_words(seeds: Sequence[int]) -> None:
    for seed in seeds:
        outcome, exits, _ = while_replaced(seed, "another_run", 30.0)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert [code for code, _ in exits] == [RefusedError.exit_code] * 2, outcome.story
        assert all("belongs to run 'sim', this coordinator has run 'another'" in text for _, text in exits)


@seeds(5)
def test_streams_that_open_and_end_without_a_welcome_are_a_coordinator_that_is_away(seeds: Sequence[int]) -> None:
    for seed in seeds:
        outcome, exits, num_steps = while_replaced(seed, "mute_coordinator", 400.0)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        every = draw_shape_of(seed, num_fragments=1).settings.sync.every
        assert every <= num_steps <= 2 * 3 * every, "to the boundary and the overrun beyond it"
        assert len(exits) == 2, outcome.story
        assert all(text.startswith("no coordinator for 360 s") for _, text in exits), exits


@seeds(30)
def test_a_node_that_hangs_while_its_heartbeats_go_on_does_not_hold_up_the_run(seeds: Sequence[int]) -> None:
    """Whatever it was doing; a run that needs it goes on as soon as it is back, which is when it was evicted."""
    for seed in seeds:
        hang = Fault(kind="hang_node", after_events=10 + 5 * seed, delay_s=0.01, lasts_s=2.0, draw=seed)
        outcome = one(seed, [hang])
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"


@seeds(28, first=1)
def test_no_weight_is_beyond_the_ratio_of_the_others_pace(seeds: Sequence[int]) -> None:
    """Nor beyond it times the windows that a late site covers, of which there are at most eight here."""
    num_cut = 0
    for seed in seeds:
        liar = Fault(kind="absurd_weight", after_events=20 + seed, delay_s=0.01, lasts_s=3.0, draw=seed)
        commits: list[m.Commit] = []

        async def faults(world: World, liar: Fault = liar, commits: list[m.Commit] = commits) -> None:
            await strike(world, [liar])
            await world.settle()
            commits.extend(world.checks.commits)

        outcome = play(seed, faults, draw_shape_of(seed, num_sites=3))
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        for commit in commits:
            *others, most = sorted(c.tokens for c in commit.contributors)
            assert not others or most <= 16 * 8 * statistics.median_high(others), outcome.story
        num_cut += "which count as" in outcome.story
    assert num_cut > 2


@pytest.mark.parametrize("seeds", [(7, 22), pytest.param((8, 11, 14, 21), marks=pytest.mark.slow)])
def test_a_site_that_had_no_workers_for_many_windows_costs_the_other_no_weight(seeds: Sequence[int]) -> None:
    """Its workers crash, and take some forty windows to start."""
    for seed in seeds:
        shape = draw_shape_of(seed, num_sites=2)
        settings = replace(shape.settings, steps=75 * shape.window_steps, min_sites=2, quorum=1, save_every=0)
        crash = Fault(kind="crash_workers", after_events=40 + 5 * seed, delay_s=0.01, lasts_s=1.0, draw=seed)
        outcome = one(seed, [crash], replace(shape, settings=settings))
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"


@seeds(28, first=1)
def test_a_cut_weight_is_recorded_though_the_coordinator_dies_between_plan_and_commit(seeds: Sequence[int]) -> None:
    num_cut = 0
    for seed in seeds:
        fault = Fault(kind="absurd_weight_and_a_restart", after_events=20 + seed, delay_s=0.01, lasts_s=3.0, draw=seed)
        outcome = one(seed, [fault], draw_shape_of(seed, num_sites=3))
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        num_cut += "crashed while keeping a decision" in outcome.story
    assert num_cut > 2


@seeds(25, first=2)
def test_flipped_bits_on_sessions_are_seen_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch, seeds: Sequence[int]
) -> None:
    """No site believes another weight, range or commit: it would compute what the reference does not."""
    num_seen = 0
    parse = wire.parse

    def counted(cls: Any, data: bytes) -> Any:
        nonlocal num_seen
        try:
            return parse(cls, data)
        except DigestMismatch:
            num_seen += 1
            raise

    monkeypatch.setattr(wire, "parse", counted)
    for seed in seeds:
        faults = [
            Fault(kind="spoil_messages", after_events=20 + 3 * seed, delay_s=0.0, lasts_s=2.0, draw=seed)
            for _ in range(3)
        ]
        outcome = one(seed, faults)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
    assert num_seen > len(seeds)


@seeds(30)
def test_an_absurd_contribution_is_in_no_commit_and_its_site_goes_on(seeds: Sequence[int]) -> None:
    """Also where it is the only one, the quorum needs it, or it comes again."""
    for seed in seeds:
        strike = [
            Fault(kind="absurd_value", after_events=10 + 5 * seed, delay_s=0.01, lasts_s=1.0, draw=seed + i)
            for i in range(2)
        ]
        outcome = one(seed, strike)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"


def beside_a_hostile_member(kind: str, seed: int) -> Outcome:
    """From some moment on one of two, three or four sites misbehaves, for most of the run."""
    hostile = Fault(kind=kind, after_events=10 + 5 * seed, delay_s=0.01, lasts_s=20.0, draw=seed)
    return one(seed, [hostile], draw_shape_of(seed, num_sites=2 + seed % 3))


@pytest.mark.parametrize("kind", ["wrong_hash", "wrong_hash_at_the_end", "wrong_hash_of_most"])
@seeds(24)
def test_members_that_say_wrong_hashes_are_found_out_however_many_they_are(kind: str, seeds: Sequence[int]) -> None:
    """The states and models of the others are the reference's, and nobody needs a person."""
    num_found_out = num_named = 0
    for seed in seeds:
        outcome = beside_a_hostile_member(kind, seed)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert outcome.num_commits > 0
        num_found_out += "its state of commit" in outcome.story
        num_named += "and comes out as" in outcome.story
        assert "does not trust" not in outcome.story, f"seed {seed}\n{outcome.story}"
    assert num_found_out > len(seeds) // 2
    assert num_named, "some show what their hashes are made of"


@pytest.mark.parametrize(
    "seeds", [OF_EACH_SORT, pytest.param(sorted({*range(96)} - {*OF_EACH_SORT}), marks=pytest.mark.slow)]
)
def test_whatever_a_party_does_in_a_dispute_no_honest_site_is_evicted_and_the_run_goes_on(
    seeds: Sequence[int],
) -> None:
    """tests/simulation/disputes.py looks at every schedule."""
    num_asked: Counter[str] = Counter()
    for seed in seeds:
        outcome = beside_a_hostile_member("lies_in_a_dispute", seed)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert outcome.num_commits > 0
        is_disputed = "sites hold different states of commit" in outcome.story
        num_asked.update(sort for sort in SORTS if is_disputed and f"when it is asked {sort}" in outcome.story)
    assert set(num_asked) == set(SORTS) or seeds != OF_EACH_SORT, num_asked


@seeds(48)
def test_with_an_old_copy_of_the_store_the_run_goes_on_from_what_sites_keep(seeds: Sequence[int]) -> None:
    """Among other faults. Invariants hold as if nothing had been lost: commits, samples, bans, states."""
    num_restored = 0
    for seed in seeds:
        lost = Fault(kind="old_store", after_events=20 + 7 * seed, delay_s=0.01, lasts_s=4.0, draw=seed)
        outcome = one(seed, [lost, *draw_faults(seed)[:2]], draw_shape_of(seed, num_sites=2 + seed % 3))
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert outcome.num_commits > 0
        num_restored += "the run goes on from commit" in outcome.story
    assert num_restored > len(seeds) // 3


@seeds(24)
def test_a_reducer_that_only_says_that_it_waits_does_not_hold_up_the_run(seeds: Sequence[int]) -> None:
    num_attempts = 0
    for seed in seeds:
        outcome = beside_a_hostile_member("waiting_only", seed)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert outcome.num_commits > 0
        num_attempts += "attempt 2" in outcome.story
    assert num_attempts > len(seeds) // 2


def computes_wrong(world: World, name: str) -> None:
    """One chunk of the next commit, as a host does whose memory or processor errs once."""
    site = world.nodes[name]
    assert site.node is not None
    plane = site.node.disk.plane
    assert plane is not None
    world.checks.bad_hosts.append(site)
    apply_chunk, num_left = plane._apply_chunk, 1

    def apply_so(outer: OuterState, chunk: int, update: OuterUpdate) -> None:
        nonlocal num_left
        if outer.layout.chunks[chunk].role is not Role.TRAINABLE or not num_left:
            apply_chunk(outer, chunk, update)
            return
        num_left = 0
        payload = bytearray(plane.log.read(update.commit, chunk))
        payload[-1] ^= 1
        outer.apply(chunk, payload, update)

    plane._apply_chunk = apply_so  # type: ignore[method-assign]


@pytest.mark.parametrize("num_sites", [2, 3, 4])
@seeds(6, every=2, first=1)
def test_a_site_that_computes_a_chunk_wrong_is_named_and_repaired_whatever_the_others_are(
    num_sites: int, seeds: Sequence[int]
) -> None:
    num_named = 0
    for seed in seeds:

        async def faults(world: World) -> None:
            while not any(commit.commit for commit in world.checks.commits):
                await world.events(5, 1.0)
            computes_wrong(world, "site2")
            await world.events(40, MOST_WAIT_S)

        shape = draw_shape_of(7300 + seed, num_sites=num_sites)
        # No models in mid-run: one is in its place as soon as it is written, before the others' word on that state.
        settings = replace(shape.settings, min_sites=num_sites, quorum=num_sites, save_every=0)
        sync = replace(settings.sync, codec="int8", up="", down="")
        if (most := sync.most_in_flight) > 1:  # its snapshots reach back as many commits
            sync = replace(sync, log_commits=8 * most)
        settings = replace(settings, sync=sync)
        shape = replace(shape, settings=settings, step_s=(0.1,) * num_sites, publish_s=(0.0,) * num_sites)
        outcome = play(7300 + seed, faults, shape)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert "does not trust" not in outcome.story
        assert "evicted site1" not in outcome.story
        num_named += "evicted site2" in outcome.story and "and comes out as" in outcome.story
    assert num_named > len(seeds) // 2


@seeds(30)
def test_a_run_goes_back_by_itself_from_a_commit_after_which_most_sites_have_no_loss(seeds: Sequence[int]) -> None:
    num_back = 0
    for seed in seeds:
        fault = Fault(kind="diverge", after_events=60 + 10 * seed, delay_s=0.01, lasts_s=8.0, draw=seed)
        outcome = one(seed, [fault])
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        num_back += "rolled back from commit" in outcome.story
    assert num_back > len(seeds) // 3


@pytest.mark.slow
def test_many_sites_that_all_reduce() -> None:
    """As `make sim` plays with a hundred."""
    outcome = large(LEAST_SITES)
    assert not outcome.problem, f"{outcome.problem}\n{outcome.story}"
    assert set(outcome.num_faults) == {"kill_several", "coordinator_dies_before_it_sends", "partition"}
    assert outcome.num_commits == NUM_SYNCS


def test_a_story_has_each_line_whatever_was_logged_before_it(request: pytest.FixtureRequest) -> None:
    """A logger keeps what it found out about its level, and tests count lines."""
    logger = logging.getLogger("atoll")
    level = logger.level
    request.addfinalizer(lambda: logger.setLevel(level))
    num_lines = []
    for earlier in (logging.INFO, logging.WARNING):
        logger.setLevel(earlier)
        logging.getLogger("atoll.coordinator").info("of a test before it")
        num_lines.append(Counter(line.split()[1] for line in one(1, []).story.splitlines()))
    assert num_lines[0] == num_lines[1]
    assert num_lines[0]["coordinator.1"]


def test_every_fault_is_drawn_and_strikes() -> None:
    drawn = {fault.kind for seed in range(NUM_SCHEDULES) for fault in draw_faults(seed)}
    assert drawn == set(FAULTS)


@seeds(12, first=1)
def test_an_operator_goes_back_to_older_commits_and_the_run_ends_as_if_the_others_had_never_been(
    seeds: Sequence[int],
) -> None:
    num_returns = 0
    for seed in seeds:
        worlds: list[World] = []

        async def faults(world: World) -> None:
            worlds.append(world)  # noqa: B023
            go_back = Fault(kind="go_back", after_events=60, delay_s=0.02, lasts_s=1.0, draw=seed)  # noqa: B023
            await strike(world, [go_back, go_back])

        outcome = play(7000 + seed, faults, draw_shape_of(7000 + seed))
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        num_returns += worlds[0].num_returns
    assert num_returns > len(seeds) // 2


def test_contributions_are_on_the_disk_in_some_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0
    read = Spilled.read

    def counted(spilled: Spilled) -> bytes:
        nonlocal num_read
        num_read += 1
        return read(spilled)

    monkeypatch.setattr(Spilled, "read", counted)
    for seed in range(3, 6):
        assert not one(seed).problem
    assert num_read


def test_a_run_that_goes_back_to_its_start_and_is_stopped_ends_with_that() -> None:
    """Its sites are killed before they contribute to another commit."""

    class First(random.Random):
        def randrange(self, *_: Any) -> int:
            return 0

    async def faults(world: World) -> None:
        while not world.checks.commits:
            await world.events(1, 1.0)
        world.go_back(First())
        world.stop_run()
        while world.checks.commits:
            await world.events(1, 1.0)
        for name in sorted(world.nodes):
            world.kill_site(name, "kill -9")

    for seed in range(4):
        outcome = play(seed, faults, draw_shape_of(seed, num_sites=3))
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert outcome.num_commits == 0


@pytest.mark.parametrize("seed", [3, pytest.param(17, marks=pytest.mark.slow)])
def test_a_seed_is_one_schedule_in_every_process(seed: int) -> None:
    """The story, with its times, is the same to the last digit; hashes of strings differ between processes."""
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed)]
    stories = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        stories.append([line.split("atoll-sim-")[0] for line in done.stdout.splitlines()])
    assert stories[0] == stories[1]
    assert len(stories[0]) > 10


def test_a_schedule_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in a thread would come when it likes."""

    started: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name))
    for seed in range(6):
        outcome = one(seed)
        assert not started
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"


def test_a_broken_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks can fail: a reducer that weighs all sites alike is found out by the reference."""
    reduce = SyncData.reduce

    def weighs_alike(data: SyncData, chunk: int, parts: Contributions, *errors: Floats) -> bytes:
        return reduce(data, chunk, [(1, part) for _, part in parts], *errors)

    monkeypatch.setattr(SyncData, "reduce", weighs_alike)
    problems = (one(seed).problem for seed in range(40))
    assert any(Unsound.__name__ in problem and "its base and its" in problem for problem in problems)


def test_a_difference_that_is_made_of_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing takes time here: a difference that is kept back when a later sync opens is what the next one is made
    of, if neither the core nor the data plane minds. All sites agree on the garbage."""
    publish = SimDataPlane.publish

    async def publishes(plane: SimDataPlane, content: Content) -> None:
        if isinstance(content, Difference):
            plane.published.content[content.fragment] = Values(content.base, content.fragment)
        await publish(plane, content)

    take_no_care_of_bases(monkeypatch)
    monkeypatch.setattr(SimDataPlane, "publish", publishes)
    problem = next(filter(None, (overtaken(seed).problem for seed in range(SEEDS_OVERTAKEN))), "")
    assert "its base and its" in problem, problem


@pytest.mark.slow
def test_one_contribution_that_is_left_out_among_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = SyncData.reduce

    def leaves_one_out(data: SyncData, chunk: int, parts: Contributions, *errors: Floats) -> bytes:
        return reduce(data, chunk, parts[:-1], *errors)

    monkeypatch.setattr(SyncData, "reduce", leaves_one_out)
    problem = large(LEAST_SITES).problem
    assert "reference" in problem or "its base and its" in problem, problem


def test_errors_come_with_the_next_contribution_of_a_later_start_and_with_the_next_average() -> None:
    """The reference computes both: here they are seen to be there at all."""
    outcomes = [one(seed) for seed in (4, 23, 27, 31, 45)]
    assert not [outcome.problem for outcome in outcomes if outcome.problem]
    assert sum(outcome.num_errors_of_earlier_starts for outcome in outcomes) > 10
    assert sum(outcome.num_errors_of_averages for outcome in outcomes) > 100


def test_an_error_of_an_average_that_nobody_committed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reducer that adds what its last attempt left, whatever became of that, is found out by the reference."""

    def of(errors: AverageErrors, chunk: int, attempt: AttemptKey | None) -> Floats:
        kept = [items[chunk] for items in errors._kept.values() if chunk in items]
        return np.frombuffer(kept[-1].data, np.float32) if kept and isinstance(kept[-1], Encoded) else NOTHING

    monkeypatch.setattr(AverageErrors, "of", of)
    assert any("the error of " in one(seed).problem or "reference" in one(seed).problem for seed in (27, 35, 49))


def test_errors_that_a_power_cut_leaves_ahead_of_the_state_go_when_the_run_goes_back() -> None:
    """Else the site could contribute to no sync any more."""
    outcome = one(400150)
    assert not outcome.problem, f"{outcome.problem}\n{outcome.story}"
    assert "error feedback is dropped, and begins anew: the run went back to commit 1" in outcome.story
