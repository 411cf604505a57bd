"""One schedule: a coordinator, some sites, faults drawn from a seed, and what must hold whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.coordinator.core.events import (
    BanAsked,
    DrainAsked,
    LiftBanAsked,
    PauseAsked,
    ResumeAsked,
    RollbackAsked,
    SetAsked,
    StopAsked,
)
from atoll.coordinator.service import CoordinatorServer
from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.protocol import messages as m
from atoll.protocol.codecs import kernels
from atoll.protocol.codecs.table import BUNDLE, DENSE, SPARSE
from atoll.protocol.errors import HostError, StaleError
from atoll.protocol.layout import Manifest
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.coordinator_questions import of_server
from tests.harness.site_questions import of_node
from tests.simulation import disputes
from tests.simulation.checks import Checks
from tests.simulation.loop import HERE, START_S, Deadlock, Process, SimLoop, Spinning
from tests.simulation.machine import SimMachine
from tests.simulation.network import MOST_DELAY_S, Network
from tests.simulation.processes import (
    ADDRESS,
    COORDINATOR,
    COORDINATORS,
    MuteCoordinator,
    SimCoordinator,
    SimNode,
    SimStore,
    address_of,
    copy_of,
    small_parts,
)
from tests.simulation.sites import GROUPED, LAYERED, MANIFEST, TOKENS_A_STEP, Data, Hands
from tests.simulation.standby import Shared

LIMIT_S = 600.0
"""Of simulated time, from the last fault to the end of the run."""
RESTART_S = 0.5
OPERATOR_LOOKS_EVERY_S = 7.0
BLOCK_BYTES = 64
"""Smaller than a disk's: the files are small."""
SYNCED = ("outer.json", "error.json")
TORN = ("state", "payloads", "errors")
"""Folders of a home, by a power cut."""
"""Always synced, see docs/decisions/0006-disk-and-rollback.md; so are the snapshots, in a folder of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a schedule is about, drawn from its seed."""

    num_sites: int
    settings: RunSettings
    bf16: tuple[bool, ...]
    data: Data | None
    step_s: tuple[float, ...]
    publish_s: tuple[float, ...]
    save_s: tuple[float, ...]
    arrives_s: tuple[float, ...] = ()
    """Of sites of several hosts: how long slices are on their way there."""
    shares_s: tuple[float, ...] = ()
    """Of the same sites: how long the other host takes until it has its part of what is whole."""
    reduce_buffer_bytes: int
    """Of each site; a contribution is some tens of bytes."""
    manifest: Manifest = MANIFEST
    coordinator_busy_s: float = 0.0
    """With events that have come together, each time: others come together meanwhile."""
    most_delay_s: float = MOST_DELAY_S
    """Of a message on its link."""
    has_standby: bool = False
    """A second coordinator on the same store."""

    @property
    def window_steps(self) -> int:
        """Of a sync, of all fragments or of the first."""
        return self.settings.sync.every // self.settings.sync.fragments


def draw_shape_of(seed: int, num_sites: int = 0, *, num_fragments: int = 0) -> Shape:
    """`num_sites` 0: drawn as well; 30 in some. So is `num_fragments`."""
    generator, others = random.Random(f"shape {seed}"), random.Random(f"codecs {seed}")
    drawn = 30 if generator.random() < 0.005 else generator.choice([1, 2, 2, 3, 3, 3, 4, 4, 5])
    num_sites = num_sites or drawn
    every = generator.choice([1, 2, 4])
    num_syncs = generator.choice([3, 4, 5, 6])
    min_sites = generator.randint(1, num_sites)
    settings = RunSettings(
        run_id="sim",
        data=generator.choice(["local", "some text", "some text"]),
        steps=every * num_syncs,
        min_sites=min_sites,
        quorum=generator.randint(1, min_sites),
        time_limits="local",
        save_every=0,
        sync=SyncSettings(
            every=every,
            codec=generator.choice(["int8", "int8", "bf16", "fp32"]),
            up=generator.choice(["", "", others.choice(DENSE)]),
            down=others.choice(["", "", *DENSE]),
            chunk_elements=4,
            log_commits=generator.choice([2, 4, 32]),
        ),
        outer=_outer(generator.choice([0.0, 0.5]), seed),
    )
    data: Data | None = Data(
        num_samples=generator.choice([1, 7, 100]),
        batch_size=generator.choice([1, 2, 3]),
        batches_ahead=generator.choice([0, 0, 2]),
        fingerprint=b"f" * 32,
    )
    settings = _robust(replace(settings, sync=_sparse(settings.sync, seed)), seed)
    if settings.data == "local" and generator.random() < 0.5:
        data = None
    if settings.sync.codec_up != "fp32":  # which loses nothing
        beta = others.choice([0, 0.5, 1])
        settings = replace(settings, sync=replace(settings.sync, error_feedback=beta))
    shape = Shape(
        num_sites=num_sites,
        settings=settings,
        data=data,
        bf16=tuple(generator.random() < 0.2 for _ in range(num_sites)),
        step_s=tuple(generator.choice([0.02, 0.05, 0.2]) for _ in range(num_sites)),
        publish_s=(0.0,) * num_sites,
        save_s=(0.0,) * num_sites,
        reduce_buffer_bytes=generator.choice([0, 100, 1 << 30]),
    )
    slow = random.Random(f"slow {seed}")
    publish_s = tuple(slow.choice([0.0, 0.0, 0.1, 0.5, 2.0]) for _ in range(num_sites))
    save_s = tuple(slow.choice([0.0, 0.0, 0.2, 1.0, 5.0]) for _ in range(num_sites))
    settings = replace(settings, save_every=slow.choice([0, 0, 1, 2, 3]), sync=_overlapped(settings.sync, seed))
    shape = replace(shape, settings=settings, publish_s=publish_s, save_s=save_s)
    if num_sites > 2 and slow.random() < 0.2:
        shape = with_a_straggler(shape, slow)
    return _two_sided(in_fragments(_of_several_hosts(shape, seed), seed, num_fragments), seed)


def _of_several_hosts(shape: Shape, seed: int) -> Shape:
    """In a third of the schedules half of the sites have a rank on another host."""
    generator = random.Random(f"hosts {seed}")
    if generator.random() < 2 / 3:
        return shape
    arrives_s, shares_s = (
        tuple(generator.choice([0.0, 0.03, 0.5]) for _ in range(shape.num_sites)) for _ in ("there", "back")
    )
    return replace(shape, arrives_s=arrives_s, shares_s=shares_s)


def _two_sided(shape: Shape, seed: int) -> Shape:
    """Half of the schedules add what was lost of averages to the next ones, where that may be."""
    sync, beta = shape.settings.sync, random.Random(f"two-sided {seed}").choice([0, 0, 0.5, 1])
    if sync.codec_down in ("fp32", BUNDLE) or sync.log_commits <= sync.fragments:
        return shape
    return replace(shape, settings=replace(shape.settings, sync=replace(sync, error_feedback_down=beta)))


def _outer(momentum: float, seed: int) -> OuterSettings:
    """The rates of a third of the schedules change in the course of the run."""
    generator = random.Random(f"outer {seed}")
    if generator.random() < 2 / 3:
        return OuterSettings(learning_rate=0.7, momentum=momentum)
    warmup, decay, momentum_warmup, momentum_decay = (generator.choice([0.0, 0.3, 1.0]) for _ in range(4))
    return OuterSettings(
        learning_rate=0.7,
        momentum=momentum,
        warmup=warmup,
        decay=decay,
        momentum_warmup=momentum_warmup,
        momentum_decay=momentum_decay,
    )


def _sparse(sync: SyncSettings, seed: int) -> SyncSettings:
    """An eighth of the schedules send some of the values alone."""
    generator = random.Random(f"sparse {seed}")
    if generator.random() < 7 / 8:
        return sync
    sparse = generator.choice(["topk2", "topk2", "dct1"])
    if sparse == "dct1" and random.Random(f"sparser {seed}").random() < 0.5:
        sparse = "dct1k4"
    up, codec = generator.choice([(sparse, sync.codec), ("", sparse)])
    return replace(sync, codec=codec, up=up, down="", mean_over=generator.choice(["senders", "senders", "all"]))


def _robust(settings: RunSettings, seed: int) -> RunSettings:
    """A third of the schedules clip or trim: about half of all contributions to a chunk stand out then."""
    generator, sync = random.Random(f"robust {seed}"), settings.sync
    robust = generator.choice(["off", "warn", "warn", "warn", "clip", "trim"])
    if robust == "trim" and sync.codec_up in SPARSE:
        robust = "clip"
    if robust == "trim":
        settings, sync = replace(settings, max_sites=64), replace(sync, trim=generator.choice([1, 1, 2]))
    clip = generator.choice([1.0, 1.5])
    return replace(settings, sync=replace(sync, robust=robust, clip=sync.clip if robust == "off" else clip))


def _overlapped(sync: SyncSettings, seed: int) -> SyncSettings:
    """Half of the schedules train on while they exchange."""
    generator = random.Random(f"overlap {seed}")
    overlap_steps = min(generator.choice([0, 0, 0, 1, 2, sync.every]), sync.every)
    merge, alpha = generator.choice([("keep", 0.0), ("keep", 0.0), ("mix", 0.5), ("mix", 0.25)])
    if not overlap_steps and generator.random() < 0.8:
        merge, alpha = "keep", 0.0
    return replace(sync, overlap_steps=overlap_steps, merge=merge, alpha=alpha)


def in_fragments(shape: Shape, seed: int, num: int) -> Shape:
    """Half of the schedules sync the model in several fragments, and half of these have several syncs in flight. `num`
    0: drawn."""
    generator = random.Random(f"fragments {seed}")
    num = num or generator.choice([1, 1, 1, 2, 3, 8])
    sync = shape.settings.sync
    if num == 1:
        return shape
    every = max(sync.every, num)  # of a cycle: the number of its syncs grows with the fragments
    window = every // num
    sync = replace(sync, every=every, fragments=num, overlap_steps=min(sync.overlap_steps, window))
    num_syncs = shape.settings.steps // shape.settings.sync.every
    odd_steps = generator.choice([0, 0, 1])
    in_flight = random.Random(f"in flight {seed}")
    if in_flight.random() < 0.5:
        sync = replace(sync, overlap_steps=in_flight.randint(window + 1, every))
        num_syncs *= in_flight.choice([1, 2, 3])
        shape = replace(shape, most_delay_s=in_flight.choice([MOST_DELAY_S, 0.05, 0.2]))
    settings = replace(shape.settings, sync=sync, steps=num_syncs * window + odd_steps)
    return replace(shape, settings=settings, manifest=LAYERED)


def in_tokens(shape: Shape, seed: int) -> Shape:
    """The same run is as long as a number of tokens: those of some of its sites in so many steps, and some more."""
    settings, generator = shape.settings, random.Random(f"tokens {seed}")
    a_step = generator.randint(min(TOKENS_A_STEP), max(TOKENS_A_STEP)) * generator.randint(1, shape.num_sites)
    tokens = settings.steps * a_step + generator.randrange(a_step)
    return replace(shape, settings=replace(settings, steps=0, tokens=tokens))


def in_gradients(shape: Shape, seed: int) -> Shape:
    """The same sites exchange at every step, and their nodes do the optimizer's step; a third of them send momenta
    after some commits. Half have logs as long as the bytes of a commit say: of two or three, few enough to matter."""
    generator, settings = random.Random(f"gradients {seed}"), shape.settings
    optimizer, momentum = generator.choice(
        [("adamw", 0.9), ("adamw", 0.5), ("sgd", 0.0), ("nesterov", 0.5), ("signsgd", 0.0)]
    )
    sync = replace(settings.sync, strategy="gradient", every=1, fragments=1, overlap_steps=0, merge="keep", alpha=0.0)
    if optimizer == "adamw" and sync.codec_up not in SPARSE and generator.random() < 2 / 3:
        warmup = generator.choice([1, 2, 4]), generator.choice(["bf16", "fp32"])
        sync = replace(sync, strategy="momentum", warmup_commits=warmup[0], warmup_codec=warmup[1])
        sync = _in_phases(sync, seed)
    if random.Random(f"log {seed}").random() < 0.5:
        sync = replace(sync, log_commits=0)
    steps = max(settings.steps // shape.window_steps, generator.choice([4, 8, 12]))
    beta2 = generator.choice([0.95, 0.5])
    outer = OuterSettings(optimizer=optimizer, momentum=momentum, beta2=beta2 if optimizer == "adamw" else 0.95)
    settings = replace(settings, sync=sync, outer=outer, steps=steps)
    return replace(shape, settings=settings, manifest=GROUPED)


def _in_phases(sync: SyncSettings, seed: int) -> SyncSettings:
    """Half of those that send momenta send gradients now and then, or do steps by themselves, or both."""
    generator = random.Random(f"phases {seed}")
    warmup, gradients, local = generator.choice([(0, 0, 0), (0, 0, 0), (4, 1, 0), (0, 0, 1), (3, 1, 1), (8, 2, 2)])
    most = generator.choice([2, 3, 4])
    return replace(
        sync,
        warmup_commits=warmup or sync.warmup_commits,
        gradient_doubling=gradients,
        local_doubling=local,
        most_local_steps=most if local else sync.most_local_steps,
    )


def with_a_straggler(shape: Shape, generator: random.Random) -> Shape:
    """The first site is far slower than the others, who do not need it: it is overtaken in whatever it does."""
    settings, num_sites = shape.settings, shape.num_sites
    quorum = min(settings.quorum, num_sites - 1)
    num_syncs = generator.choice([20, 40])
    return replace(
        shape,
        settings=replace(settings, quorum=quorum, steps=num_syncs * settings.sync.every),
        step_s=(generator.choice([1.0, 2.0]), *(0.02,) * (num_sites - 1)),
        publish_s=(generator.choice([0.5, 1.0, 2.0]), *(0.0,) * (num_sites - 1)),
    )


class Story(logging.Handler):
    """Lines of all processes, in order, with simulated time."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__(logging.INFO)
        self._loop = loop
        self.lines: list[tuple[float, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        process = HERE.get()
        self.tell(str(process or "?"), record.getMessage())

    def tell(self, who: str, text: str) -> None:
        self.lines.append((self._loop.time() - START_S, who, text))

    def __str__(self) -> str:
        return "\n".join(f"{at:9.4f}  {who:14s} {text}" for at, who, text in self.lines)


class World:
    """Made and run once, by `play`."""

    def __init__(self, seed: int, loop: SimLoop, folder: Path, shape: Shape) -> None:
        self.seed = seed
        self.loop = loop
        self.folder = folder
        self.shape = shape
        self.random = random.Random(f"world {seed}")
        self.network = Network(loop, seed)
        self.network.weather.most_delay_s = shape.most_delay_s
        self.story = Story(loop)
        self._machines: dict[str, SimMachine] = {}
        self.store = SimStore()
        self.store.on_crash = lambda: self.kill_coordinator("crashed while keeping a decision")
        self.checks = Checks(loop, shape.settings, shape.manifest, self.store, self.story.tell)
        self.network.on_message = self.checks.on_message
        self.coordinator: SimCoordinator | None = None
        """The one that leads, or led last and is not gone."""
        self.coordinators: dict[str, SimCoordinator] = {}
        """By machine."""
        self.shared = Shared(self.store, loop.time) if shape.has_standby else None
        self._stand_in: SimCoordinator | MuteCoordinator | None = None
        self.nodes: dict[str, SimNode] = {}
        self.ended: dict[str, SimNode] = {}  # left, and not started again yet
        self.hands: dict[str, Hands] = {}
        self._events_left = 0
        self._struck: asyncio.Future[None] | None = None
        self.num_starts = 0
        self.num_returns = 0
        self.num_faults: Counter[str] = Counter()
        self.hostile: set[str] = set()
        """Sites that meant harm at some time."""
        self.hung: set[str] = set()
        """Sites whose core hung at some time: they answer nothing."""
        self._older: dict[str, dict[Path, bytes]] = {}
        self.tear: str | None = None  # the site whose next apply is torn
        self._operator: asyncio.Task[None] | None = None

    def machine(self, name: str) -> SimMachine:
        """The same for each process that is started under that name."""
        if name not in self._machines:
            generator = random.Random(f"machine {self.seed} {name}")
            self._machines[name] = SimMachine(
                wall_time=self.loop.time, token_bytes=generator.randbytes, random=generator, network=self.network
            )
        return self._machines[name]

    # --- starting and killing

    def start_coordinator(self) -> None:
        if self._stand_in is not None or self.store.full:
            return
        for machine in COORDINATORS if self.shared is not None else (COORDINATOR,):
            if machine not in self.coordinators:
                self._start_coordinator(machine)

    def _start_coordinator(self, machine: str) -> None:
        self.num_starts += 1
        self.story.tell("world", f"starts the {machine}{' with an old store' * self.store.is_old}")
        made = self.coordinators[machine] = SimCoordinator(
            self.loop,
            self.num_starts,
            self.shape.settings,
            self.store,
            self.machine(machine),
            busy_s=self.shape.coordinator_busy_s,
            shared=self.shared,
            machine_name=machine,
        )
        if self.shared is None:
            self.coordinator = made
        made.on_event = self._count
        made.on_hang = lambda lasts_s: self.stop(made.process, lasts_s)
        made.on_led = lambda: self._leads(made)
        made.on_lost = lambda error: self.end_coordinator(made, f"ended: {error}")
        made.task.add_done_callback(lambda _: self._coordinator_ended(made))

    def _leads(self, coordinator: SimCoordinator) -> None:
        self.story.tell("world", f"{coordinator.process} leads")
        self.coordinator = coordinator

    def _coordinator_ended(self, coordinator: SimCoordinator) -> None:
        if coordinator not in self.coordinators.values():
            return
        self.end_coordinator(coordinator, f"ended: {coordinator.failure}")
        mild = (OSError,) if self.shared is None else (OSError, HostError, StaleError)
        if coordinator.failure is not None and not isinstance(coordinator.failure, mild):
            self.checks.failed(f"the coordinator ended with {coordinator.failure!r}", coordinator.failure)

    def kill_coordinator(self, why: str) -> None:
        """The one that leads."""
        if self.coordinator is not None:
            self.end_coordinator(self.coordinator, why)

    def end_coordinator(self, coordinator: SimCoordinator, why: str) -> None:
        if self.coordinators.get(coordinator.process.machine) is not coordinator:
            return
        del self.coordinators[coordinator.process.machine]
        if self.coordinator is coordinator:
            self.coordinator = None
        self.story.tell("world", f"{coordinator.process} is gone: {why}")
        self.network.kill(coordinator.process)
        self.loop.freeze(coordinator.process)

    def replace_coordinator(self, lasts_s: float, stand_in: Callable[[int], SimCoordinator | MuteCoordinator]) -> None:
        """Something else listens in its place for a while. `stand_in` makes it, from the number of its start."""
        self.kill_coordinator("something else takes its place")
        if self._stand_in is not None:
            return
        self.num_starts += 1
        made = self._stand_in = stand_in(self.num_starts)

        def go() -> None:
            self._stand_in = None
            self.network.kill(made.process)
            self.loop.freeze(made.process)
            self.start_coordinator()

        self.later(lasts_s, go)

    def coordinator_of_another_run(self, number: int) -> SimCoordinator:
        return SimCoordinator(
            self.loop, number, replace(self.shape.settings, run_id="another"), SimStore(), self.machine(COORDINATOR)
        )

    def start_site(self, name: str) -> None:
        if name in self.nodes:
            return
        self.num_starts += 1
        home = self.folder / f"{name}-{self.num_starts}"
        old = self.ended.pop(name, None)
        if old is not None:
            old.folder.rename(home)
        if name not in self.hands:
            index = len(self.hands) % self.shape.num_sites
            self.hands[name] = Hands(
                manifest=self.shape.manifest,
                step_s=self.shape.step_s[index],
                start_s=0.3,
                publish_s=self.shape.publish_s[index],
                save_s=self.shape.save_s[index],
                arrives_s=self.shape.arrives_s[index] if self.shape.arrives_s else 0.0,
                shares_s=self.shape.shares_s[index] if self.shape.shares_s else 0.0,
                bf16=self.shape.bf16[index],
                reads_in_place=index % 2 == 0 and not self.shape.arrives_s,
                data=self.shape.data,
                true_tokens_a_step=TOKENS_A_STEP[index % len(TOKENS_A_STEP)],
                tokens_a_step=TOKENS_A_STEP[index % len(TOKENS_A_STEP)],
            )
        self.story.tell("world", f"starts {name}")
        node = self.nodes[name] = SimNode(
            self.loop,
            Process(name, self.num_starts),
            machine=self.machine(name),
            settings=self.shape.settings,
            reduce_buffer_bytes=self.shape.reduce_buffer_bytes,
            folder=home,
            hands=self.hands[name],
            watch_before=self.checks.before_event,
            watch=self._on_event,
            watch_output=self._on_output,
            note_average=self.checks.on_average,
            seed=self.seed + self.num_starts,
            coordinators=",".join(map(address_of, COORDINATORS)) if self.shared is not None else ADDRESS,
        )
        node.task.add_done_callback(lambda task: self._site_ended(node))

    def _on_event(self, node: SimNode, event: e.Event) -> None:
        self.checks.on_event(node, event)
        self._count()

    def _count(self) -> None:
        """An event of a coordinator or node."""
        self._events_left -= 1
        if self._events_left <= 0 and self._struck is not None and not self._struck.done():
            self._struck.set_result(None)

    async def events(self, num_events: int, limit_s: float) -> None:
        """Waits for so many events, or so long."""
        self._events_left, self._struck = num_events, self.loop.create_future()
        if num_events:
            await asyncio.wait((self._struck,), timeout=limit_s)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.loop.call_later(delay_s, action)

    def run_in(self, process: Process, action: Callable[[], object]) -> None:
        """At once, as if the process did it by itself."""
        context = contextvars.Context()
        context.run(HERE.set, process)
        self.loop.call_soon(action, context=context)

    def partition(self, names: list[str], lasts_s: float) -> None:
        """Nothing gets from them to anybody else, or back."""
        away = set(names)
        others = [name for name in (COORDINATOR, *sorted(self.nodes)) if name not in away]
        pairs = [pair for a in names for b in others for pair in ((a, b), (b, a))]
        self.story.tell("world", f"nothing gets through between {', '.join(names)} and all others")
        for a, b in pairs:
            self.network.block(a, b)

        def mend() -> None:
            self.story.tell("world", f"open again between {', '.join(names)} and all others")
            for a, b in pairs:
                self.network.open(a, b)

        self.later(lasts_s, mend)

    def stop(self, process: Process, lasts_s: float) -> None:
        """As by SIGSTOP, and SIGCONT later."""
        if process.stopped or process.dead:
            return
        self.story.tell("world", f"{process} stands still")
        process.stopped = True
        self.loop.freeze(process)

        def go_on() -> None:
            if not process.dead:
                self.story.tell("world", f"{process} goes on")
                self.loop.go_on(process)

        self.later(lasts_s, go_on)

    def _on_output(self, node: SimNode, output: out.Output) -> None:
        self.checks.on_output(node, output)
        if self.tear == node.process.machine and isinstance(output, out.ApplyCommit):
            self.tear = None
            self._tear_apply(node, output.commit)

    def _tear_apply(self, node: SimNode, commit: m.Commit) -> None:
        """The node dies in the middle of applying: some chunks are at the commit, others before it."""
        assert node.node is not None
        plane = node.node.disk.plane
        assert plane is not None
        apply, left = plane._apply_chunk, self.random.randrange(len(plane.layout.chunks))

        def torn(outer: object, chunk: object, update: object) -> None:
            nonlocal left
            if left == 0 and not node.process.dead:
                self.kill_site(node.process.machine, f"dies while it applies commit {commit.commit}")
            left -= 1
            if not node.process.dead:
                apply(outer, chunk, update)  # type: ignore[arg-type]

        plane._apply_chunk = torn  # type: ignore[method-assign]

    def kill_site(self, name: str, why: str) -> None:
        node = self.nodes.pop(name, None)
        if node is None:
            return
        self.story.tell("world", f"{name} is killed: {why}")
        self.network.kill(node.process)
        self.loop.freeze(node.process)
        self.num_starts += 1
        if node.folder.exists():
            node.folder = copy_of(node.folder, self.folder / f"{name}-left-{self.num_starts}")
        else:
            node.folder.mkdir(0o700)
        self.ended[name] = node

    def holds_state(self, name: str) -> bool:
        node = self.nodes[name].node
        return node is not None and of_node(node).holds() is not None

    def counts(self, name: str) -> bool:
        """Whether the coordinator takes that site for one that works in the run; True while there is none."""
        asked = self.coordinator.asked if self.coordinator is not None else None
        return asked is None or (asked.is_known(name) and asked.is_live(name))

    def num_open_syncs(self) -> int:
        """Of the coordinator; 0 while there is none."""
        asked = self.coordinator.asked if self.coordinator is not None else None
        return 0 if asked is None else len(asked.open_fragments())

    def num_in_flight(self, name: str) -> int:
        """Sealed snapshots of that site that are in no commit it holds."""
        return len(self.checks.listed(self.nodes[name]).in_flight) if name in self.nodes else 0

    def num_who_attest(self, commit: int, but: Collection[str] = ()) -> int:
        """Contributors of that commit that the coordinator hears, `but` these; none of commit 0."""
        server = self.server_that_answers()
        if server is None:
            return 0
        asked = of_server(server)
        contributors = asked.contributors_to(commit)
        return sum(asked.id_of(name) in contributors for name in asked.connected_sites() if name not in but)

    def lose_site(self, name: str) -> None:
        self.kill_site(name, "lost for good, with its disk")
        self.ended.pop(name, None)
        self.checks.may_lose_the_end = True
        if self._operator is None:
            self._operator = self.loop.create_task(self._roll_back_when_asked())

    def go_back(self, generator: random.Random) -> None:
        """An operator says `atoll rollback --to` some commit that sites have passed, as far as one can tell."""
        server = self.server_that_answers()
        last = of_server(server).last_commit() if server is not None else 0
        if server is None or not last:
            return
        commit, skip = generator.randrange(last), generator.random() < 0.5
        self.story.tell("operator", f"atoll rollback --to {commit}{' --skip-samples' * skip}")

        async def ask() -> None:
            asked = RollbackAsked("what followed is of no use", to=commit, skip_samples=skip)
            problem = (await server.ask(asked)).problem
            self.story.tell("operator", problem or f"the run went back to commit {commit}")
            self.num_returns += not problem

        self._ask(ask())

    def stop_run(self) -> None:
        """An operator says `atoll stop`."""
        server = self.server_that_answers()
        if server is not None and of_server(server).last_commit():
            self.story.tell("operator", "atoll stop")
            self.checks.may_end_early = True
            self._ask(server.ask(StopAsked("enough")))

    def server_that_answers(self) -> CoordinatorServer | None:
        coordinator = self.coordinator
        return None if coordinator is None or coordinator.process.stopped else coordinator.server

    def _ask(self, request: Coroutine[Any, Any, object]) -> None:
        """Of the coordinator that there is now, as on its socket."""
        assert self.coordinator is not None
        self.run_in(self.coordinator.process, lambda: asyncio.ensure_future(request))

    def ban(self, name: str, lasts_s: float) -> None:
        """An operator says `atoll ban NAME`, half of the time with an end, else `--lift` later, until that is done."""
        server = self.server_that_answers()
        if server is None:
            return
        until_s = self.loop.time() + lasts_s if round(lasts_s * 1000) % 2 else 0.0

        async def send_away() -> None:
            answer = await server.ask(BanAsked(name=name, reason="not wanted", until_s=until_s, by="operator"))
            self.story.tell("operator", answer.problem or f"{name} is banned")

        async def lift_ban(server: CoordinatorServer) -> None:
            await server.ask(LiftBanAsked(name=name, by="operator"))
            self.story.tell("operator", f"{name} may come in")

        def back() -> None:
            server = self.server_that_answers()
            if server is None or of_server(server).is_banned(name):
                if server is not None and not until_s:
                    self._ask(lift_ban(server))
                self.later(1.0, back)
            elif name in self.ended or name not in self.hands:
                self.start_site(name)

        self._ask(send_away())
        self.later(lasts_s, back)

    def pause(self, lasts_s: float) -> None:
        """An operator says `atoll pause`, and `atoll resume` later, until that is done."""
        server = self.server_that_answers()
        if server is None:
            return

        async def ask() -> None:
            answer = await server.ask(PauseAsked("to look at it", by="operator"))
            self.story.tell("operator", answer.problem or "the run is paused")

        async def resume(server: CoordinatorServer) -> None:
            await server.ask(ResumeAsked(by="operator"))

        def back() -> None:
            server = self.server_that_answers()
            if server is None or of_server(server).is_paused():
                if server is not None:
                    self._ask(resume(server))
                self.later(1.0, back)

        self._ask(ask())
        self.later(lasts_s, back)

    def change(self, name: str, value: str) -> None:
        """An operator says `atoll set NAME=VALUE`."""
        server = self.server_that_answers()
        if server is None:
            return

        async def ask() -> None:
            self.checks.changes.add(of_server(server).if_changed(name, value))
            answer = await server.ask(SetAsked(name=name, value=value, by="operator"))
            self.story.tell("operator", f"atoll set {name}={value}: {answer.problem or answer.found}")

        self._ask(ask())

    def drain(self, name: str) -> None:
        """An operator says `atoll drain NAME`."""
        if (server := self.server_that_answers()) is not None:
            self.story.tell("operator", f"atoll drain {name}")
            self._ask(server.ask(DrainAsked(name=name, reason="maintenance", by="operator")))

    def keep_out_in_dispute(self, liar: SimNode, lasts_s: float, looks_every_s: float) -> None:
        """An operator looks at the status now and then, and knows whom not to trust where the run cannot know it."""
        name = liar.process.machine

        def look() -> None:
            if self.nodes.get(name) is not liar:
                return
            server = self.server_that_answers()
            disputed = of_server(server).disputed() if server is not None else ""
            if f"{name} (" not in disputed or "are being checked" in disputed:
                self.later(looks_every_s, look)
                return
            others = [other for other in self.hands if other != name and f"{other} (" in disputed]
            self.checks.require(bool(others), f"22: a dispute names one side alone: {disputed}")
            self.checks.require("atoll ban NAME" in disputed, f"22: no command is named: {disputed}")
            could = disputes.who_could_settle(self)
            self.checks.require(not could, f"22: paused though {could}: {disputed}")
            self.story.tell("operator", f"does not trust {name}: {disputed}")
            self.ban(name, max(lasts_s, 0.5))

        look()

    async def _roll_back_when_asked(self) -> None:
        """An operator who knows that the lost disk does not come back looks at the status now and then."""
        while True:
            await asyncio.sleep(OPERATOR_LOOKS_EVERY_S)
            coordinator = self.coordinator
            server = coordinator.server if coordinator is not None else None
            if coordinator is None or server is None or coordinator.process.stopped:
                continue
            if waits_for := of_server(server).waits_for_lost_state():
                self.story.tell("operator", f"atoll rollback: {waits_for}")
                self._ask(server.ask(RollbackAsked("the disk is lost")))

    def remember_disks(self) -> None:
        """What a power cut may bring back."""
        for name, node in self.nodes.items():
            self._older[name] = {
                path.relative_to(node.folder): path.read_bytes()
                for folder in TORN
                for path in sorted((node.folder / folder).glob("*"))
                if path.is_file()
            }

    def tear_disk(self, name: str, generator: random.Random) -> None:
        """Each block of what is not synced is the new one, the old one or zeros; a file may be there or not."""
        node = self.ended.get(name)
        if node is None:
            return
        self.checks.may_lose_the_end = True
        older = self._older.get(name, {})
        for folder in TORN:
            for path in sorted((node.folder / folder).glob("*")):
                if path.is_file() and path.name not in (*SYNCED, *self.machine(name).disk.synced):
                    _tear(path, older.get(path.relative_to(node.folder), b""), generator, sized=folder != "payloads")

    def _site_ended(self, node: SimNode) -> None:
        name = node.process.machine
        if self.nodes.get(name) is not node:
            return
        del self.nodes[name]
        self.ended[name] = node
        self.network.kill(node.process)
        self.story.tell("world", f"{name} has ended: {node.result or node.failure!r}")
        self.checks.site_ended(node)

    # --- the whole schedule

    async def settle(self) -> None:
        """Nothing breaks any more: everybody comes back, and the run comes to its end."""
        self.story.tell("world", "nothing breaks any more")
        deadline = self.loop.time() + LIMIT_S
        while self.nodes or self.checks.finished is None or any(self._cut_short(n) for n in self.ended.values()):
            if self.loop.time() > deadline:
                self.checks.failed(f"the run does not end within {LIMIT_S:g} s of simulated time")
            self.start_coordinator()
            for name, node in list(self.ended.items()):
                if self.checks.finished is None or self._cut_short(node):
                    self.start_site(name)
            await asyncio.sleep(RESTART_S)

    @staticmethod
    def _cut_short(node: SimNode) -> bool:
        """It was killed: it may be the one whose disk has the end."""
        return node.result is None and node.failure is None


def _tear(path: Path, old: bytes, generator: random.Random, *, sized: bool) -> None:
    """`sized`: that it is there, and its size, were synced when it was made."""
    choice = generator.random()
    if choice < 0.5:
        return
    if choice < 0.6 and not sized:
        path.unlink()
        return
    new = path.read_bytes()
    if choice < 0.7 and not sized:
        path.write_bytes(new[: generator.randrange(len(new) + 1)])
        return
    old = old[: len(new)].ljust(len(new), b"\0")
    blocks = range(0, len(new), BLOCK_BYTES)
    path.write_bytes(b"".join(generator.choice([old, new, new])[i : i + BLOCK_BYTES] for i in blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one schedule. `problem` is empty if all was sound."""

    seed: int
    problem: str
    story: str
    num_events: int
    num_commits: int
    num_faults: Counter[str]
    simulated_s: float
    num_steps: int
    """That all sites trained."""
    num_steps_in_commits: int
    num_merges: Counter[e.MergeMode]
    """That they were told to do."""
    num_errors_of_earlier_starts: int
    """Of chunks, that were added to a contribution of a later start of the site."""
    num_errors_of_averages: int
    """Of chunks in commits, that were added to the next average."""
    most_in_flight: int
    """Snapshots of one site at once, each for a sync of its own."""


def play(seed: int, faults: Callable[[World], Awaitable[None]], shape: Shape) -> Outcome:
    """Runs one schedule to its end."""
    with _quiet_collector():
        return _whole(seed, faults, shape)


def _whole(seed: int, faults: Callable[[World], Awaitable[None]], shape: Shape) -> Outcome:
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None  # files of a simulated disk; nothing is synced there
    folder = Path(tempfile.mkdtemp(prefix="atoll-sim-", dir=base))
    loop = SimLoop(seed)
    world = World(seed, loop, folder, shape)
    loggers = logging.getLogger("atoll")
    level = loggers.level
    loggers.setLevel(logging.INFO)  # not `level`, which leaves what loggers below have found out before
    loggers.addHandler(world.story)
    loggers.propagate, propagate = False, loggers.propagate
    problem = ""
    try:
        with small_parts():
            asyncio.set_event_loop(loop)
            loop.set_exception_handler(lambda _, context: world.checks.loop_error(context))
            schedule = loop.create_task(_play(world, faults))
            loop.run_until_complete(asyncio.wait((schedule, world.checks.first_problem), return_when="FIRST_COMPLETED"))
            world.checks.raise_problem()
            schedule.result()
            world.checks.at_the_end(world.ended.values())
    except (AssertionError, Deadlock, Spinning) as error:
        problem = f"{type(error).__name__}: {error}"
        if error.__cause__ is not None:
            problem += "\n" + "".join(traceback.format_exception(error.__cause__, limit=-10))
    finally:
        loggers.removeHandler(world.story)
        loggers.setLevel(level)
        loggers.propagate = propagate
        asyncio.set_event_loop(None)
        shutil.rmtree(folder, ignore_errors=True)
        _forget(loop)
    return Outcome(
        seed=seed,
        problem=problem,
        story=str(world.story),
        num_events=world.checks.num_events,
        num_commits=world.checks.num_commits,
        num_faults=world.num_faults,
        simulated_s=loop.time() - START_S,
        num_steps=sum(hands.num_steps for hands in world.hands.values()),
        num_steps_in_commits=world.checks.num_steps_in_commits,
        num_merges=world.checks.num_merges,
        num_errors_of_earlier_starts=world.checks.num_errors_of_earlier_starts,
        num_errors_of_averages=world.checks.num_errors_of_averages,
        most_in_flight=world.checks.most_in_flight,
    )


def _forget(loop: SimLoop) -> None:
    """What was killed was not cleaned up; the collector does that now, and its complaints are nobody's concern."""
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.forget()


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """Garbage is collected at the end of the block only, and in silence."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    was_on = gc.isenabled()
    gc.disable()
    gc.freeze()  # modules and compiled kernels need not be looked at every time
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what was killed never awaited what it had begun
            gc.collect()
        gc.unfreeze()
        if was_on:
            gc.enable()
        sys.unraisablehook = hook


async def _play(world: World, faults: Callable[[World], Awaitable[None]]) -> None:
    world.start_coordinator()
    for i in range(world.shape.num_sites):
        world.start_site(f"site{i + 1}")
    await faults(world)
    await world.settle()
    lost = disputes.honest_who_lost(world)
    world.checks.require(not lost, f"22: honest sites were evicted for a dispute: {lost}")


kernels.warm_up()
