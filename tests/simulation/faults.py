"""Faults by name, and a drama: a list of them drawn from a seed, each with the moment it strikes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.exchange.sync.exchange import Exchange
from tests.harness import hostile
from tests.harness.coordinator_questions import of_server
from tests.simulation import liars
from tests.simulation.liars import SORTS, Liar, LiarWhenAsked
from tests.simulation.processes import COORDINATOR, MuteCoordinator, SimNode
from tests.simulation.sites import TOKENS_A_STEP
from tests.simulation.standby import OF_TWO
from tests.simulation.world import World

LOOKED_AT_EVERY_S = 1.0
MOST_WAIT_S = 8.0
"""A fault strikes after so many events, or after so much simulated time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: str
    after_events: int
    """Since the fault before it."""
    delay_s: float
    """Between an event and what follows from it."""
    lasts_s: float
    draw: int
    """Which site, which link."""

    def __str__(self) -> str:
        return f"{self.kind} after {self.after_events} events + {self.delay_s:.4f} s, for {self.lasts_s:.2f} s"


Strike = Callable[[World, Fault, random.Random], Awaitable[None] | None]


def _site(world: World, generator: random.Random) -> str | None:
    names = sorted(world.nodes)
    return generator.choice(names) if names else None


def kill_site(world: World, fault: Fault, generator: random.Random) -> None:
    name = _site(world, generator)
    if name is not None:
        world.kill_site(name, "kill -9")
        world.later(fault.lasts_s, lambda: world.start_site(name))


def kill_several(world: World, fault: Fault, generator: random.Random) -> None:
    names = sorted(world.nodes)
    for name in generator.sample(names, generator.randint(0, len(names))):
        world.kill_site(name, "kill -9, with others")
        world.later(fault.lasts_s * generator.uniform(0.3, 1), lambda name=name: world.start_site(name))  # type: ignore[misc]


def lose_host(world: World, fault: Fault, generator: random.Random) -> None:
    """The other host of a site that has one, for a while or for good: until the site is started anew."""
    names = sorted(name for name, node in world.nodes.items() if node.other_host is not None)
    if not names:
        return
    made = world.nodes[generator.choice(names)]
    other = made.other_host
    assert other is not None

    def happens(what: Callable[[], None]) -> None:
        if world.nodes.get(made.process.machine) is made:
            world.run_in(made.process, what)

    happens(other.lost)
    world.later(fault.lasts_s, lambda: happens(other.back))


def kill_all_and_the_coordinator(world: World, fault: Fault, generator: random.Random) -> None:
    world.kill_coordinator("kill -9")
    kill_several(world, fault, generator)
    world.later(fault.lasts_s, world.start_coordinator)


def stop_site(world: World, fault: Fault, generator: random.Random) -> None:
    name = _site(world, generator)
    if name is not None:
        world.stop(world.nodes[name].process, fault.lasts_s)


def stop_coordinator(world: World, fault: Fault, generator: random.Random) -> None:
    if world.coordinator is not None:
        world.stop(world.coordinator.process, fault.lasts_s)


def kill_coordinator(world: World, fault: Fault, generator: random.Random) -> None:
    world.kill_coordinator("kill -9")
    world.later(fault.lasts_s, world.start_coordinator)


def old_store(world: World, fault: Fault, generator: random.Random) -> None:
    """A copy of the store is made; some time later the disk is lost, and the copy put in its place."""
    copy = world.store.copied()

    def lose() -> None:
        if world.checks.finished is not None or not world.store.has_more_than(copy):
            return
        world.kill_coordinator("its disk is lost")
        world.store.becomes(copy)
        world.store.is_old = True
        world.later(generator.uniform(0.0, 2.0), world.start_coordinator)

    world.later(generator.uniform(0.0, min(fault.lasts_s, 5.0)), lose)


def another_run(world: World, fault: Fault, generator: random.Random) -> None:
    """Its coordinator listens at the address of this run's. Whoever dials it meanwhile is refused, and ends."""
    world.replace_coordinator(fault.lasts_s, world.coordinator_of_another_run)


def mute_coordinator(world: World, fault: Fault, generator: random.Random) -> None:
    """Streams open and end, and nobody says Welcome."""
    ends_after_s = generator.choice([0.01, 2.0])
    machine = world.machine(COORDINATOR)
    world.replace_coordinator(fault.lasts_s, lambda number: MuteCoordinator(world.loop, number, machine, ends_after_s))


def coordinator_dies_before_it_keeps(world: World, fault: Fault, generator: random.Random) -> None:
    world.store.crash_before = True
    world.later(fault.lasts_s, world.start_coordinator)


def coordinator_dies_before_it_sends(world: World, fault: Fault, generator: random.Random) -> None:
    world.store.crash_after = True
    world.later(fault.lasts_s, world.start_coordinator)


def abandon_syncs(world: World, fault: Fault, generator: random.Random) -> None:
    if world.coordinator is not None:
        world.coordinator.abandons_after += [generator.randrange(15) for _ in range(generator.randint(1, 4))]


def store_full(world: World, fault: Fault, generator: random.Random) -> None:
    world.store.full = True

    def mend() -> None:
        world.store.full = False
        world.start_coordinator()

    world.later(fault.lasts_s, mend)


def cut(world: World, pairs: Sequence[tuple[str, str]], lasts_s: float) -> None:
    for a, b in pairs:
        world.story.tell("world", f"nothing gets from {a} to {b}")
        world.network.block(a, b)

    def mend() -> None:
        for a, b in pairs:
            world.story.tell("world", f"open again from {a} to {b}")
            world.network.open(a, b)

    world.later(lasts_s, mend)


def cut_two_sites(world: World, fault: Fault, generator: random.Random) -> None:
    names = sorted(world.nodes)
    if len(names) > 1:
        a, b = generator.sample(names, 2)
        cut(world, [(a, b), (b, a)], fault.lasts_s)


def cut_two_sites_one_way(world: World, fault: Fault, generator: random.Random) -> None:
    names = sorted(world.nodes)
    if len(names) > 1:
        a, b = generator.sample(names, 2)
        cut(world, [(a, b)], fault.lasts_s)


def cut_off(world: World, fault: Fault, generator: random.Random) -> None:
    """One site from everybody."""
    name = _site(world, generator)
    if name is not None:
        others = [COORDINATOR, *(n for n in sorted(world.nodes) if n != name)]
        cut(world, [(name, o) for o in others] + [(o, name) for o in others], fault.lasts_s)


def cut_from_coordinator(world: World, fault: Fault, generator: random.Random) -> None:
    name = _site(world, generator)
    if name is not None:
        cut(world, [(name, COORDINATOR), (COORDINATOR, name)], fault.lasts_s)


def cut_from_coordinator_one_way(world: World, fault: Fault, generator: random.Random) -> None:
    name = _site(world, generator)
    if name is not None:
        cut(world, [generator.choice([(name, COORDINATOR), (COORDINATOR, name)])], fault.lasts_s)


def partition(world: World, fault: Fault, generator: random.Random) -> None:
    """Two groups, the coordinator in one of them."""
    machines = [COORDINATOR, *sorted(world.nodes)]
    away = [name for name in machines[1:] if generator.random() < 0.5]
    pairs = [(a, b) for a in machines for b in machines if (a in away) != (b in away)]
    cut(world, pairs, fault.lasts_s)


def reset(world: World, fault: Fault, generator: random.Random) -> None:
    machines = [COORDINATOR, *sorted(world.nodes)]
    a, b = generator.sample(machines, 2) if len(machines) > 1 else (COORDINATOR, COORDINATOR)
    world.story.tell("world", f"connections between {a} and {b} break")
    world.network.reset(a, b)


def undialable(world: World, fault: Fault, generator: random.Random) -> None:
    """Some sites are behind NAT for a while."""
    names = sorted(world.nodes)
    chosen = [name for name in names if generator.random() < 0.5]
    world.story.tell("world", f"nothing can connect to {', '.join(chosen) or 'nobody'}")
    world.network.undialable.update(chosen)

    def mend() -> None:
        world.story.tell("world", f"{', '.join(chosen) or 'nobody'} can be dialled again")
        world.network.undialable.difference_update(chosen)

    world.later(fault.lasts_s, mend)


def crash_workers(world: World, fault: Fault, generator: random.Random) -> None:
    name = _site(world, generator)
    if name is not None:
        world.hands[name].crash_in_steps = generator.randrange(4)
        world.hands[name].crashes_after = generator.choice((0, 0, 1, 2))
        world.hands[name].start_s *= generator.choice((1, 1, 1, 40))  # many windows go by without this site


def no_tokens(world: World, fault: Fault, generator: random.Random) -> None:
    """Scripts of some sites or all do not say what they trained, for some windows."""
    names = sorted(world.nodes)
    chosen = names if generator.random() < 0.5 else generator.sample(names, generator.randint(0, len(names)))
    for name in chosen:
        world.hands[name].windows_without_tokens = generator.choice([1, 1, 2, 4])
        world.later(fault.lasts_s, lambda name=name: world.start_site(name))  # type: ignore[misc]


def hang_workers(world: World, fault: Fault, generator: random.Random) -> None:
    name = _site(world, generator)
    if name is not None:
        world.hands[name].hang_in_steps = generator.randrange(4)


def hang_node(world: World, fault: Fault, generator: random.Random) -> None:
    """Its core hears nothing and does nothing any more, its heartbeats go on. Somebody starts it again once it is
    evicted, and not before: the run may need it."""
    name = _site(world, generator)
    node = world.nodes[name].node if name is not None else None
    if name is None or node is None:
        return
    world.story.tell("world", f"the core of {name} hangs")
    world.hung.add(name)
    hung, beat_s = world.nodes[name], node.core.limits.heartbeat_s
    beat_at = world.loop.time() + beat_s

    def only_beats(event: e.Event, now: float) -> list[out.Output]:
        nonlocal beat_at
        if now < beat_at:
            return []
        beat_at = now + beat_s
        return [out.Beat()]

    node.core.handle = only_beats  # type: ignore[method-assign]
    node.core.next_deadline = lambda: beat_at  # type: ignore[method-assign]

    def look() -> None:
        if world.nodes.get(name) is not hung:
            return
        if world.checks.finished is None and world.counts(name):
            world.later(LOOKED_AT_EVERY_S, look)
            return
        world.kill_site(name, "its core hangs")
        world.later(fault.lasts_s, lambda: world.start_site(name))

    look()


@dataclass(frozen=True, slots=True, kw_only=True)
class Misconduct:
    """What a hostile member does: what its core hears in place of an event, which of its outputs count, and what it
    says in their place."""

    what: str
    hears: Callable[[e.Event], e.Event] = lambda event: event
    does: Callable[[out.Output], bool] = lambda output: True
    says: Callable[[out.Output], out.Output] = lambda output: output


def _misbehave(
    world: World, fault: Fault, generator: random.Random, misconduct: Misconduct, name: str | None = None
) -> SimNode | None:
    """Later it is killed and behaves again. Who it is, `name` or any; None if there is nobody."""
    name = name or _site(world, generator)
    node = world.nodes[name].node if name is not None else None
    if name is None or node is None or len(world.nodes) < 2:
        return None
    world.story.tell("world", f"{name} {misconduct.what}")
    world.hostile.add(name)
    handle, hostile = node.core.handle, world.nodes[name]

    def handle_so(event: e.Event, now: float) -> list[out.Output]:
        outputs = handle(misconduct.hears(event), now)
        return [misconduct.says(output) for output in outputs if misconduct.does(output)]

    node.core.handle = handle_so  # type: ignore[method-assign]

    def mend() -> None:
        if world.nodes.get(name) is hostile:
            world.kill_site(name, f"it {misconduct.what}")
        world.start_site(name)

    world.later(fault.lasts_s, mend)
    return hostile


def mute_member(world: World, fault: Fault, generator: random.Random) -> None:
    """It trains, and is never ready."""
    _misbehave(world, fault, generator, Misconduct(what="never says that it is ready", does=hostile.is_never_ready))


def ready_only(world: World, fault: Fault, generator: random.Random) -> None:
    """It says that it is ready, and exchanges nothing."""
    _misbehave(world, fault, generator, Misconduct(what="exchanges nothing", does=hostile.exchanges_nothing))


def wrong_done(world: World, fault: Fault, generator: random.Random) -> None:
    """It exchanges as it should, and says otherwise: another payload, another commit that it exchanged from, or other
    weights. Where payloads differ it shows its own, or nothing."""
    kind, shows = generator.choice(["payload", "commit", "weights"]), generator.random() < 0.5
    what = f"says another {kind} when it is done"
    says, does = partial(liars.says_otherwise_when_done, kind), liars.shows_all if shows else liars.shows_no_payloads
    _misbehave(world, fault, generator, Misconduct(what=what, does=does, says=says))


def waiting_only(world: World, fault: Fault, generator: random.Random) -> None:
    """As a reducer it takes contributions and says for ever that it waits: for all others, who have sent everything,
    for one of them, for itself, or for nobody. Of what it says that it moves meanwhile, some is true, or none; so it
    speaks to its peers, and to the coordinator as well."""
    found = _misbehave(world, fault, generator, Misconduct(what="says as a reducer only that it waits"))
    if found is None:
        return
    assert found.node is not None
    hub = found.node.hub
    begin, claims_to_move, tells_the_coordinator = hub.begin, generator.random() < 0.5, generator.random() < 0.5
    named, draw = generator.choice(["all", "all", "one", "itself", "nobody"]), generator.randrange(1 << 30)

    def names(exchange: Exchange) -> list[int]:
        others = hostile.others(exchange)
        one = others[draw % len(others)] if others else 0
        return {"all": others, "one": [one], "itself": [exchange.attempt.me.site_id], "nobody": []}[named]

    def begin_so(*args: Any, **options: Any) -> Exchange:
        exchange = begin(*args, **options)
        hostile.only_waits(exchange, names, claims_to_move=claims_to_move, tells_the_coordinator=tells_the_coordinator)
        return exchange

    hub.begin = begin_so  # type: ignore[method-assign]


def _lie(
    world: World,
    fault: Fault,
    generator: random.Random,
    what: str,
    is_lied_about: Callable[[int], bool],
    *,
    of_most: bool = False,
) -> None:
    """`of_most`: as many as there are honest sites lie, or more, and all say the same."""
    spoils, in_hello, opens = generator.randbytes(32), generator.random() < 0.5, generator.random() < 0.7
    names = sorted(world.nodes)
    num_liars = generator.randint((len(names) + 1) // 2, max(1, len(names) - 1)) if of_most else 1
    liars = generator.sample(names, min(num_liars, len(names)))
    if len(names) < 2:
        return

    def lies_about(commit: int) -> bool:
        return world.num_who_attest(commit, but=liars) > 0 and is_lied_about(commit)

    for name in liars:
        node = world.nodes[name].node
        if node is None:
            continue
        liar = Liar(node, lies_about, spoils, opens=opens, in_hello=in_hello)
        hostile = _misbehave(world, fault, generator, Misconduct(what=what, says=liar.says), name)
        assert hostile is not None
        world.checks.liars.append(hostile)
        world.keep_out_in_dispute(hostile, fault.lasts_s, generator.choice([LOOKED_AT_EVERY_S / 2, MOST_WAIT_S]))


def _some_commits(generator: random.Random) -> Callable[[int], bool]:
    """One, or every one."""
    num_commits = generator.choice([1, 1 << 30])
    lied_about: set[int] = set()

    def is_lied_about(commit: int) -> bool:
        if len(lied_about) < num_commits:
            lied_about.add(commit)
        return commit in lied_about

    return is_lied_about


def wrong_hash(world: World, fault: Fault, generator: random.Random) -> None:
    _lie(world, fault, generator, "says wrong hashes of its state", _some_commits(generator))


def wrong_hash_of_most(world: World, fault: Fault, generator: random.Random) -> None:
    what = "says, as others do, the same wrong hashes of its state"
    _lie(world, fault, generator, what, _some_commits(generator), of_most=True)


def wrong_hash_at_the_end(world: World, fault: Fault, generator: random.Random) -> None:
    def is_lied_about(commit: int) -> bool:
        return any(c.commit == commit and c.final for c in world.checks.commits)

    _lie(world, fault, generator, "says a wrong hash of its last state", is_lied_about)


def lies_in_a_dispute(world: World, fault: Fault, generator: random.Random) -> None:
    """One site says wrong hashes, and does one thing or the other when it is asked for evidence. Others may be in
    league with it: they say the same hashes, or others, or the truth, and do as badly when they are asked."""
    names = sorted(world.nodes)
    if len(names) < 2:
        return
    num_liars = min(generator.choice([1, 1, 1, 2, 3]), len(names) - 1)
    liars, spoils = generator.sample(names, num_liars), generator.randbytes(32)
    is_lied_about = _some_commits(generator)

    def lies_about(commit: int) -> bool:
        return world.num_who_attest(commit, but=liars) > 0 and is_lied_about(commit)

    for place, name in enumerate(liars):
        node, sort = world.nodes[name].node, generator.choice(SORTS) if place else SORTS[fault.draw % len(SORTS)]
        own, opens, in_hello = generator.randbytes(32), generator.random() < 0.7, generator.random() < 0.7
        mixed = spoils if generator.random() < 0.5 else own
        tells_the_truth, late_s = place > 0 and generator.random() < 0.3, generator.choice([0.0, 0.0, 0.0, 40.0])
        if node is None:
            continue
        liar = None if tells_the_truth else Liar(node, lies_about, mixed, opens=opens, in_hello=in_hello)
        when_asked = LiarWhenAsked(world, name, sort=sort, liar=liar, late_s=late_s, generator=generator)
        what = f"{'says wrong hashes of its state' if liar else 'says what its state is'}, and when it is asked {sort}"
        found = _misbehave(
            world,
            fault,
            generator,
            Misconduct(what=what, hears=when_asked.hears, does=when_asked.does, says=when_asked.says),
            name,
        )
        assert found is not None
        world.checks.liars.append(found)
        world.keep_out_in_dispute(found, fault.lasts_s, generator.choice([LOOKED_AT_EVERY_S / 2, MOST_WAIT_S]))


def pulls_again(world: World, fault: Fault, generator: random.Random) -> None:
    """It keeps no payload, and comes for them again and again: it takes them to the end, or hangs up in the middle."""
    found = _misbehave(world, fault, generator, Misconduct(what="pulls payloads again and again"))
    if found is None:
        return
    assert found.node is not None
    hub = found.node.hub
    begin, hangs_up, claims_to_move = hub.begin, generator.random() < 0.5, generator.random() < 0.5

    def begin_so(*args: Any, **options: Any) -> Exchange:
        exchange = begin(*args, **options)
        hostile.pulls_again(exchange, hangs_up=hangs_up, claims_to_move=claims_to_move)
        return exchange

    hub.begin = begin_so  # type: ignore[method-assign]


def dials_nobody(world: World, fault: Fault, generator: random.Random) -> None:
    """It says that it can dial nobody."""

    def hears(event: e.Event) -> e.Event:
        if isinstance(event, e.PeersProbed):
            return e.PeersProbed(unreachable_site_ids=tuple(range(1, 1 + len(world.hands))))
        return event

    _misbehave(world, fault, generator, Misconduct(what="says that it can dial nobody", hears=hears))


def absurd_weight(world: World, fault: Fault, generator: random.Random) -> None:
    """A site says that its steps have had very many tokens. Where it lists leased samples it may be refused."""
    name = _site(world, generator)
    if name is not None and len(world.nodes) > 1:
        tokens = generator.choice([1 << 10, 1 << 20, 1 << 40])
        world.story.tell("world", f"{name} says that each of its steps has {tokens} tokens")
        world.hands[name].tokens_a_step = tokens

        def mend() -> None:
            world.hands[name].tokens_a_step = world.hands[name].true_tokens_a_step
            world.start_site(name)

        world.later(fault.lasts_s, mend)


def absurd_weight_and_a_restart(world: World, fault: Fault, generator: random.Random) -> None:
    """The coordinator dies when it has kept the plan that says the cut weight."""
    absurd_weight(world, fault, generator)
    world.store.crash_after_cut = True
    world.later(fault.lasts_s, world.start_coordinator)


def wrong_value(world: World, fault: Fault, generator: random.Random) -> None:
    name = _site(world, generator)
    if name is not None and len(world.nodes) > 1:
        world.hands[name].wrong_in_steps = generator.randrange(4)
        world.later(fault.lasts_s, lambda: world.start_site(name))


def absurd_value(world: World, fault: Fault, generator: random.Random) -> None:
    """Finite, and what it would do to all others is as bad."""
    name = _site(world, generator)
    if name is not None:
        world.hands[name].absurd_in_steps = generator.randrange(4)


def diverge(world: World, fault: Fault, generator: random.Random) -> None:
    """The loss of some sites or all is no number in their next window, or two."""
    names = sorted(world.nodes)
    chosen = names if generator.random() < 0.7 else generator.sample(names, generator.randint(0, len(names)))
    for name in chosen:
        world.hands[name].num_nan_losses = generator.choice([1, 1, 2])
        world.later(fault.lasts_s, lambda name=name: world.start_site(name))  # type: ignore[misc]


def leave(world: World, fault: Fault, generator: random.Random) -> None:
    name = _site(world, generator)
    process, node = (world.nodes[name].process, world.nodes[name].node) if name is not None else (None, None)
    if name is not None and process is not None and node is not None:
        world.story.tell("world", f"{name} is asked to leave")
        world.run_in(process, lambda: node.handle(e.LeaveAsked("Ctrl-C")))
        world.later(fault.lasts_s, lambda: world.start_site(name))


def pause(world: World, fault: Fault, _: random.Random) -> None:
    """An operator pauses the run, and resumes it later."""
    world.pause(fault.lasts_s)


def change(world: World, _: Fault, generator: random.Random) -> None:
    """An operator changes the outer step, or the length of the run."""
    settings, windows = world.shape.settings, generator.choice([-1, 1])
    length = ("run.steps", str(settings.steps + windows * settings.sync.every))
    if settings.tokens:
        length = ("run.tokens", str(max(1, settings.tokens + windows * settings.sync.every * sum(TOKENS_A_STEP))))
    name, value = generator.choice([
        ("outer.learning_rate", "0.3"), ("outer.learning_rate", "1"), ("outer.momentum", "0.25"), length,
    ])  # fmt: skip
    world.change(name, value)


def drain(world: World, fault: Fault, generator: random.Random) -> None:
    """An operator asks a site to leave; it is started again later."""
    if (name := _site(world, generator)) is not None:
        world.drain(name)
        world.later(fault.lasts_s, lambda: world.start_site(name))


def tear_apply(world: World, fault: Fault, generator: random.Random) -> None:
    name = _site(world, generator)
    if name is not None:
        world.tear = name
        world.later(fault.lasts_s, lambda: world.start_site(name))


def full_disk(world: World, fault: Fault, generator: random.Random) -> None:
    name = _site(world, generator)
    if name is not None and len(world.nodes) > 1:
        world.story.tell("world", f"the disk of {name} is full")
        world.machine(name).disk.is_full = True

        def mend() -> None:
            world.machine(name).disk.is_full = False
            world.start_site(name)

        world.later(fault.lasts_s, mend)


def short_disks(world: World, fault: Fault, generator: random.Random) -> None:
    """Some sites or all have no room for contributions."""
    names = sorted(world.nodes)
    chosen = generator.sample(names, generator.randint(0, len(names)))
    world.story.tell("world", f"there is no room on the disks of {chosen}")
    disks = [world.machine(name).disk for name in chosen]

    def are_short(value: bool) -> None:
        for disk in disks:
            disk.is_short = value

    are_short(True)
    world.later(fault.lasts_s, lambda: are_short(False))


def power_cut(world: World, fault: Fault, generator: random.Random) -> None:
    """Of some sites or all. What a site wrote since some moments before may be on its disk or not, block by block."""
    world.remember_disks()
    names = sorted(world.nodes)
    chosen = names if generator.random() < 0.5 else generator.sample(names, generator.randint(0, len(names)))

    def cut() -> None:
        for name in chosen:
            world.kill_site(name, "its power is cut")
            world.tear_disk(name, generator)
            world.later(fault.lasts_s, lambda name=name: world.start_site(name))  # type: ignore[misc]

    world.later(generator.choice([0.0, 0.1, 1.0]) * generator.random(), cut)


def lose_site(world: World, fault: Fault, generator: random.Random) -> None:
    """One site and its disk are gone for good; another takes its place. An operator gives up on it when asked to."""
    name = _site(world, generator)
    others = [n for n in sorted(world.nodes) if n != name and world.holds_state(n)]
    if name is not None and others and len(world.hands) < 3 * world.shape.num_sites:
        world.lose_site(name)
        world.later(fault.lasts_s * generator.random(), lambda: world.start_site(f"site{len(world.hands) + 1}"))


def go_back(world: World, fault: Fault, generator: random.Random) -> None:
    """An operator undoes what followed some commit, and sometimes asks again."""
    world.go_back(generator)
    if generator.random() < 0.3:
        world.later(fault.lasts_s, lambda: world.go_back(generator))


def stop_run(world: World, fault: Fault, generator: random.Random) -> None:
    """An operator ends it early, if there is anything to keep."""
    world.stop_run()


def ban(world: World, fault: Fault, generator: random.Random) -> None:
    """An operator sends a site away, and lets it in again later."""
    name = _site(world, generator)
    if name is not None and len(world.nodes) > 1:
        world.ban(name, max(fault.lasts_s, 0.5))


def thin_link(world: World, fault: Fault, generator: random.Random) -> None:
    """A site contributes to every 2nd or 4th sync, with all that it trained, as if its link were that thin."""
    name, server = _site(world, generator), world.server_that_answers()
    if name is None or server is None or not of_server(server).is_known(name):
        return
    if not of_server(server).is_live(name) or world.shape.settings.sync.strategy != "diloco":  # there nobody rests
        return
    every = generator.choice([2, 4])
    world.story.tell("world", f"{name} contributes to one sync of {every}, as if its link were thin")
    of_server(server).let_rest(name, every)
    world.later(fault.lasts_s, of_server(server).let_nobody_rest)


def join(world: World, fault: Fault, generator: random.Random) -> None:
    if len(world.hands) < 2 * world.shape.num_sites:
        world.start_site(f"site{len(world.hands) + 1}")


def spoil_messages(world: World, fault: Fault, generator: random.Random) -> None:
    world.network.weather.corrupt = 0.02

    def mend() -> None:
        world.network.weather.corrupt = 0.0

    world.later(min(fault.lasts_s, 2.0), mend)


def repeat_messages(world: World, fault: Fault, generator: random.Random) -> None:
    world.network.weather.duplicate = 0.2

    def mend() -> None:
        world.network.weather.duplicate = 0.0

    world.later(fault.lasts_s, mend)


def slow_network(world: World, fault: Fault, generator: random.Random) -> None:
    world.network.weather.most_delay_s = 0.3

    def mend() -> None:
        world.network.weather.most_delay_s = world.shape.most_delay_s

    world.later(fault.lasts_s, mend)


FAULTS: dict[str, tuple[Strike, int]] = {
    "kill_site": (kill_site, 6),
    "kill_several": (kill_several, 2),
    "kill_all_and_the_coordinator": (kill_all_and_the_coordinator, 2),
    "stop_site": (stop_site, 3),
    "stop_coordinator": (stop_coordinator, 1),
    "kill_coordinator": (kill_coordinator, 3),
    "old_store": (old_store, 0),
    "another_run": (another_run, 1),
    "mute_coordinator": (mute_coordinator, 1),
    "coordinator_dies_before_it_keeps": (coordinator_dies_before_it_keeps, 3),
    "coordinator_dies_before_it_sends": (coordinator_dies_before_it_sends, 4),
    "store_full": (store_full, 1),
    "abandon_syncs": (abandon_syncs, 3),
    "cut_two_sites": (cut_two_sites, 3),
    "cut_two_sites_one_way": (cut_two_sites_one_way, 2),
    "cut_off": (cut_off, 3),
    "cut_from_coordinator": (cut_from_coordinator, 2),
    "cut_from_coordinator_one_way": (cut_from_coordinator_one_way, 2),
    "partition": (partition, 2),
    "reset": (reset, 4),
    "undialable": (undialable, 3),
    "crash_workers": (crash_workers, 2),
    "hang_workers": (hang_workers, 1),
    "no_tokens": (no_tokens, 2),
    "hang_node": (hang_node, 2),
    "mute_member": (mute_member, 2),
    "ready_only": (ready_only, 2),
    "dials_nobody": (dials_nobody, 2),
    "absurd_weight": (absurd_weight, 2),
    "wrong_value": (wrong_value, 1),
    "absurd_value": (absurd_value, 2),
    "diverge": (diverge, 2),
    "leave": (leave, 2),
    "tear_apply": (tear_apply, 3),
    "full_disk": (full_disk, 1),
    "short_disks": (short_disks, 2),
    "power_cut": (power_cut, 3),
    "lose_site": (lose_site, 3),
    "go_back": (go_back, 4),
    "ban": (ban, 2),
    "join": (join, 2),
    "spoil_messages": (spoil_messages, 1),
    "repeat_messages": (repeat_messages, 2),
    "slow_network": (slow_network, 1),
    "waiting_only": (waiting_only, 0),
    "wrong_done": (wrong_done, 0),
    "absurd_weight_and_a_restart": (absurd_weight_and_a_restart, 0),
    "wrong_hash": (wrong_hash, 0),
    "wrong_hash_at_the_end": (wrong_hash_at_the_end, 0),
    "wrong_hash_of_most": (wrong_hash_of_most, 0),
    "lies_in_a_dispute": (lies_in_a_dispute, 0),
    "pulls_again": (pulls_again, 0),
    "stop_run": (stop_run, 0),
    "thin_link": (thin_link, 0),
    "lose_host": (lose_host, 0),
    "pause": (pause, 0),
    "drain": (drain, 0),
    "change": (change, 0),
}
"""With how often each is drawn; those of 0 come on top, see `draw_faults`."""
OF_THEIR_OWN = ("stop_run", "thin_link", "lose_host", "pause", "drain", "old_store", "change")
ON_TOP = tuple(kind for kind, (_, weight) in FAULTS.items() if not weight and kind not in OF_THEIR_OWN)
ON_TOP_OF = STOPPED = 0.08
THIN = 0.15
OPERATED = 0.1
"""Of the schedules."""


def draw_faults(seed: int) -> tuple[Fault, ...]:
    generator = random.Random(f"faults {seed}")
    drawn = [_draw_fault(generator) for _ in range(generator.choice([1, 1, 2, 2, 3, 4, 6]))]
    hostile = random.Random(f"hostile {seed}")
    if hostile.random() < ON_TOP_OF:
        on_top = replace(_draw_fault(hostile), kind=hostile.choice(ON_TOP))
        drawn.insert(hostile.randrange(len(drawn) + 1), on_top)
    end = random.Random(f"end {seed}")
    if end.random() < STOPPED:
        drawn.insert(end.randrange(len(drawn) + 1), replace(_draw_fault(end), kind="stop_run"))
    thin = random.Random(f"thin {seed}")
    if thin.random() < THIN:
        drawn.insert(0, replace(_draw_fault(thin), kind="thin_link"))
    hosts = random.Random(f"other hosts {seed}")
    for _ in range(hosts.choice([0, 1, 2])):  # nothing, where no site has several
        drawn.insert(hosts.randrange(len(drawn) + 1), replace(_draw_fault(hosts), kind="lose_host"))
    operator = random.Random(f"operator {seed}")
    for kind in ("pause", "drain", "old_store", "change"):
        if operator.random() < OPERATED:
            drawn.insert(operator.randrange(len(drawn) + 1), replace(_draw_fault(operator), kind=kind))
    return tuple(drawn)


def _draw_fault(generator: random.Random) -> Fault:
    kinds, weights = list(FAULTS), [weight for _, weight in FAULTS.values()]
    return Fault(
        kind=generator.choices(kinds, weights)[0],
        after_events=min(int(generator.expovariate(1 / 40)), 300),
        delay_s=generator.choice([0.0, generator.uniform(0, 0.003), generator.uniform(0, 0.05)]),
        lasts_s=generator.choice([generator.uniform(0, 0.5), generator.uniform(0.5, 5), generator.uniform(5, 40)]),
        draw=generator.randrange(1 << 30),
    )


async def strike(world: World, faults: Sequence[Fault]) -> None:
    """All of them, one after the other; returns when the last is over."""
    over_at = world.loop.time()
    for fault in faults:
        await world.events(fault.after_events, MOST_WAIT_S)
        await asyncio.sleep(fault.delay_s)
        if world.checks.finished is not None:
            break
        world.story.tell("fault", str(fault))
        world.num_faults[fault.kind] += 1
        happens = OF_TWO[fault.kind] if fault.kind in OF_TWO else FAULTS[fault.kind][0]
        happens(world, fault, random.Random(fault.draw))
        over_at = max(over_at, world.loop.time() + fault.lasts_s)
    await asyncio.sleep(max(0.0, over_at - world.loop.time()) + 1e-3)
