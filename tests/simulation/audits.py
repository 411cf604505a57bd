"""Reducers that lie, auditors that lie, and bits that flip at either, in runs with audits."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from atoll.coordinator.core.events import BanRecord, SiteRecord
from atoll.node.core.events import LeaveAsked
from atoll.node.exchange.auditing import Auditor
from atoll.node.exchange.sync.exchange import Exchange
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.messages import AuditChunk, AuditOutcome, ChunkAudited
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness import hostile
from tests.simulation.faults import (
    MOST_WAIT_S,
    Fault,
    cut,
    cut_two_sites,
    cut_two_sites_one_way,
    kill_coordinator,
    kill_site,
    lose_host,
)
from tests.simulation.processes import COORDINATOR, SimNode
from tests.simulation.sites import GROUPED, MANIFEST
from tests.simulation.world import Outcome, Shape, World, draw_shape_of, play

NUM_AUDITS = 2
WIDE = Manifest.canonical([*MANIFEST.tensors, TensorSpec(name="wide", shape=(96,), dtype="F32", role=Role.TRAINABLE)])
"""Every site reduces chunks of it."""
WIDE_GROUPED = Manifest.canonical([*GROUPED.tensors, *(tensor for tensor in WIDE.tensors if tensor.name == "wide")])


@dataclass(slots=True)
class Found:
    """What became of a schedule."""

    offences: dict[str, int] = field(default_factory=dict)
    """By name of the site; so are the next."""
    faults: dict[str, int] = field(default_factory=dict)
    """To which it owned up."""
    silences: dict[str, int] = field(default_factory=dict)
    """Where it gave auditors nothing of its errors."""
    banned: set[str] = field(default_factory=set)
    liar: str = ""
    first_lie: int = 0
    """The commit in which the first false payload was, at the earliest; 0: there was none."""
    num_right: int = 0
    num_unknown: int = 0


def audited_shape(seed: int, *, num_sites: int, num_syncs: int) -> Shape:
    """A run of so many sites that all contribute, in averages that can be audited."""
    shape = draw_shape_of(seed, num_sites=num_sites, num_fragments=1)
    robust = "off" if seed % 2 else "warn"
    sync = replace(
        shape.settings.sync,
        audits=NUM_AUDITS,
        error_feedback_down=0.0,
        codec="int8",
        up="",
        down="",
        mean_over="senders",
        robust=robust,
        clip=SyncSettings().clip if robust == "off" else shape.settings.sync.clip,
        trim=1,
        every=2,
        overlap_steps=0,
        merge="keep",
        alpha=0.0,
    )
    settings = replace(
        shape.settings,
        sync=sync,
        steps=2 * num_syncs,
        min_sites=num_sites,
        quorum=2,
        save_every=0,
        overrun_steps=0,
    )
    return replace(
        shape,
        settings=settings,
        step_s=(0.02,) * num_sites,
        publish_s=(0.0,) * num_sites,
        save_s=(0.0,) * num_sites,
        arrives_s=(),
        shares_s=(),
        bf16=(False,) * num_sites,
        manifest=WIDE,
    )


def with_errors(seed: int, *, num_syncs: int) -> Shape:
    """The same, where what codecs lose of averages is fed back."""
    shape = audited_shape(seed, num_sites=4, num_syncs=num_syncs)
    sync = replace(shape.settings.sync, error_feedback_down=0.75 + 0.25 * (seed % 2), log_commits=16)
    return replace(shape, settings=replace(shape.settings, sync=sync))


def with_gradients(seed: int, *, num_steps: int, warmup: int = 0) -> Shape:
    """The same, where sites exchange at every step, and `warmup`: momenta, after so many commits."""
    shape = audited_shape(seed, num_sites=4, num_syncs=num_steps)
    sync = replace(shape.settings.sync, strategy="gradient", every=1, error_feedback=0.5, log_commits=0)
    if warmup:
        sync = replace(sync, strategy="momentum", warmup_commits=warmup, warmup_codec="bf16")
    outer = OuterSettings(optimizer="adamw", momentum=0.9)
    settings = replace(shape.settings, sync=sync, outer=outer, steps=num_steps)
    return replace(shape, settings=settings, manifest=WIDE_GROUPED)


def with_hosts(seed: int, *, num_syncs: int) -> Shape:
    """The same, where each site has another host."""
    shape, generator = audited_shape(seed, num_sites=4, num_syncs=num_syncs), random.Random(f"hosts {seed}")
    arrives_s, shares_s = (tuple(generator.choice([0.03, 0.3]) for _ in range(4)) for _ in range(2))
    return replace(shape, arrives_s=arrives_s, shares_s=shares_s)


def lies_as_reducer(world: World, node: SimNode, lies: Callable[[], bool], lied: Callable[[int], None]) -> None:
    """Payloads that it makes are of the first contribution alone, whenever `lies` says so."""
    assert node.node is not None
    hub = node.node.hub
    begin = hub.begin

    def begin_so(*args: Any, **options: Any) -> Exchange:
        exchange = begin(*args, **options)

        def told() -> None:
            world.checks.has_false_averages = True
            lied(exchange.plan.base_commit + 1)

        hostile.averages_falsely(exchange, lies=lies, lied=told)
        return exchange

    hub.begin = begin_so  # type: ignore[method-assign]


def finds_otherwise(node: SimNode, says: Callable[[ChunkAudited], ChunkAudited]) -> None:
    """What it says of an audit."""
    assert node.node is not None
    disk = node.node.disk
    if disk.kept is None:
        return
    auditor: Auditor = disk.auditor
    audit = auditor.audit

    async def audit_so(asked: AuditChunk) -> ChunkAudited:
        return says(await audit(asked))

    auditor.audit = audit_so  # type: ignore[method-assign]


def accusing(came_out: bytes) -> Callable[[ChunkAudited], ChunkAudited]:
    """Of a reducer that there may be nothing against."""
    return lambda found: replace(found, outcome=AuditOutcome.WRONG, payload_hash=came_out)


def denying(found: ChunkAudited) -> ChunkAudited:
    """All is as it should be, whoever made it."""
    return replace(found, outcome=AuditOutcome.RIGHT, payload_hash=bytes(32))


def once(change: Callable[[ChunkAudited], ChunkAudited]) -> Callable[[ChunkAudited], ChunkAudited]:
    """As a flipped bit has it."""
    left = [True]

    def says(found: ChunkAudited) -> ChunkAudited:
        return change(found) if left and left.pop() else found

    return says


Misdeed = Callable[[World, random.Random, Found], None]


def schedule(
    seed: int, misdeed: Misdeed, *, num_sites: int = 4, num_syncs: int = 31, shape: Shape | None = None
) -> tuple[Outcome, Found]:
    """`misdeed` begins once all sites train. `shape`: another one than the seed's."""
    found = Found()

    async def faults(world: World) -> None:
        while not any(commit.commit for commit in world.checks.commits):
            await world.events(1, MOST_WAIT_S)
        misdeed(world, random.Random(f"audits {seed}"), found)
        ends_at = world.loop.time() + 60 + 10 * num_syncs
        while world.checks.finished is None and world.loop.time() < ends_at:
            await world.events(5, 1.0)
        if world.coordinator is not None and (core := world.coordinator.asked) is not None:
            view = core.view
            found.num_right, found.num_unknown = view.num_audits_right, view.num_audits_unknown
        await asyncio.sleep(1)
        sites = [record for record in world.store.kept if isinstance(record, SiteRecord)]
        found.offences.update({s.name: s.offences for s in sites if s.offences})
        found.faults.update({s.name: len(s.faults) for s in sites if s.faults})
        found.silences.update({s.name: len(s.silences) for s in sites if s.silences})
        found.banned.update(r.name for r in world.store.kept if isinstance(r, BanRecord))

    return play(seed, faults, shape or audited_shape(seed, num_sites=num_sites, num_syncs=num_syncs)), found


# --- misdeeds


def of_one(world: World, generator: random.Random) -> str:
    return generator.choice(sorted(world.nodes))


def nothing(world: World, generator: random.Random, found: Found) -> None:
    """All are honest."""


def behind_nat(world: World, generator: random.Random, found: Found) -> None:
    """Nobody can dial one of the sites."""
    world.network.undialable.add(of_one(world, generator))


def full_liar(
    world: World, generator: random.Random, found: Found, share: float = 1.0, *, owns_up: bool = False
) -> None:
    """From now on one site lies in this share of its averages. When it is asked itself it denies, or owns up."""
    name = found.liar = of_one(world, generator)

    def lied(commit: int) -> None:
        found.first_lie = found.first_lie or commit

    lies_as_reducer(world, world.nodes[name], lambda: generator.random() < share, lied)
    if not owns_up:
        finds_otherwise(world.nodes[name], denying)
    world.hostile.add(name)


def seldom_liar(world: World, generator: random.Random, found: Found) -> None:
    full_liar(world, generator, found, share=1 / 3)


def liar_that_owns_up(world: World, generator: random.Random, found: Found) -> None:
    full_liar(world, generator, found, owns_up=True)


def lying_auditor(world: World, generator: random.Random, found: Found) -> None:
    """It accuses whomever it audits."""
    name = found.liar = of_one(world, generator)
    finds_otherwise(world.nodes[name], accusing(generator.randbytes(32)))
    world.hostile.add(name)


def silent_reducer(world: World, generator: random.Random, found: Found) -> None:
    """What one site adds to its averages is made up, and it gives no auditor what that was."""
    name = found.liar = of_one(world, generator)
    node = world.nodes[name].node
    assert node is not None
    world.checks.has_false_averages = True
    hostile.gives_no_errors(node.hub)
    world.hostile.add(name)


def made_up_errors(world: World, generator: random.Random, found: Found) -> None:
    """One site adds something else than what its codec had left, and says so."""
    name = found.liar = of_one(world, generator)
    node = world.nodes[name].node
    assert node is not None
    world.checks.has_false_averages = True
    hostile.adds_made_up_errors(node.hub)
    world.hostile.add(name)


def weather(world: World, generator: random.Random, found: Found) -> None:
    """Links are cut, sites and the coordinator are killed, all the time, and all are honest."""
    kinds = (cut_two_sites, cut_two_sites_one_way, cut_two_sites, kill_site, kill_coordinator)

    def strike() -> None:
        if world.checks.finished is not None:
            return
        draw, lasts_s = generator.randrange(1 << 30), generator.uniform(0.2, 2.0)
        fault = Fault(kind="weather", after_events=0, delay_s=0.0, lasts_s=lasts_s, draw=draw)
        generator.choice(kinds)(world, fault, random.Random(draw))
        world.later(generator.uniform(0.3, 1.5), strike)

    strike()


def losing_hosts(world: World, generator: random.Random, found: Found) -> None:
    """All are honest, and other hosts are lost all the time."""

    def strike() -> None:
        if world.checks.finished is not None:
            return
        fault = Fault(kind="lose_host", after_events=0, delay_s=0.0, lasts_s=generator.uniform(0.1, 1.0), draw=0)
        lose_host(world, fault, generator)
        world.later(generator.uniform(0.5, 2.0), strike)

    strike()


def coming_back_within_a_sync(world: World, generator: random.Random, found: Found) -> None:
    """All are honest. Once one site is done, and another one's Done is long on its way, the first is told to leave at
    once, and started anew at its address: it contributes to that sync again, when its start before is in the commit."""
    name, other = generator.sample(sorted(world.nodes), 2)
    world.network.next_port = lambda: 7000  # type: ignore[method-assign]
    late: set[int] = set()
    left: set[int] = set()

    def look() -> None:
        if world.checks.finished is not None:
            return
        world.later(0.005, look)
        asked = world.coordinator.asked if world.coordinator is not None else None
        if asked is None or (plan := asked.weighed_plan()) is None:
            return
        if plan.sync not in late:
            late.add(plan.sync)
            cut(world, [(other, COORDINATOR)], 2.0)
        node = world.nodes.get(name)
        if node is None:
            world.start_site(name)
        elif plan.sync not in left and node.node is not None and asked.is_done(name) and not asked.is_done(other):
            left.add(plan.sync)
            world.run_in(node.process, partial(node.node.handle, LeaveAsked("Ctrl-C", at_once=True)))

    look()


def flipped_bits(world: World, generator: random.Random, found: Found) -> None:
    """At each site two averages, or two audits, or one of each, are not what they should be, some time."""
    for name in sorted(world.nodes):
        node = world.nodes[name]
        flips = {generator.randrange(1, 80) for _ in range(generator.randrange(3))}
        lies_as_reducer(world, node, _those(flips), lambda commit: None)
        for _ in range(2 - len(flips)):
            finds_otherwise(node, once(accusing(generator.randbytes(32))))


def _those(numbers: set[int]) -> Callable[[], bool]:
    """Whether it is one of these times, the first of which is 1."""
    turns = itertools.count(1)
    return lambda: next(turns) in numbers


def with_flips(seed: int) -> Outcome:
    """For thousands of them: a site that is banned makes the schedule unsound. Without the story if all is well. In
    every other one what codecs lose of averages is fed back."""
    shape = with_errors(seed, num_syncs=6) if seed % 2 else None
    outcome, found = schedule(seed, flipped_bits, num_syncs=6, shape=shape)
    if found.banned and not outcome.problem:
        outcome = replace(outcome, problem=f"banned for flipped bits: {sorted(found.banned)}")
    num_found = {"sites that owned up": len(found.faults), "sites that did not": len(found.offences)}
    counted = replace(outcome, num_faults=Counter(num_found))
    return counted if outcome.problem else replace(counted, story="")
