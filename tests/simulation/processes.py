"""The real node and coordinator as simulated processes: what stands in for their machine, and how they are started."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
from google.protobuf.message import Message

from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.core.events import CommitRecord, Output, Persist, Record, Report, WeightsRecord
from atoll.coordinator.core.persisted import Persisted
from atoll.coordinator.lease import Claim, Leading, LeaseHeld
from atoll.coordinator.restoring import Restoring
from atoll.coordinator.service import SERVICE, CoordinatorServer
from atoll.coordinator.stage import NoRoots
from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.events import WorkersExited
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.home import Home
from atoll.node.daemon.journal import Journal
from atoll.node.daemon.launcher import Launcher
from atoll.node.daemon.node import Node
from atoll.node.daemon.peers import Met
from atoll.node.daemon.plane import DataPlane
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.daemon.shell import OnFailure, Parts
from atoll.node.dataplane.frozen_state import FrozenState
from atoll.node.dataplane.optim import OuterOptimizer, OuterUpdate
from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.listener import listen
from atoll.node.exchange.service import PeerService
from atoll.node.exchange.sync.average_errors import AverageErrors
from atoll.node.exchange.sync.spill import Spill
from atoll.protocol import log_length, sources_parts, transport, wire
from atoll.protocol import messages as m
from atoll.protocol.codecs.arithmetic import Floats
from atoll.protocol.deposits import Seal
from atoll.protocol.errors import HostError, PeerError
from atoll.protocol.layout import Manifest
from atoll.protocol.machine import Machine
from atoll.protocol.messages import Deposit
from atoll.protocol.settings import RunSettings
from atoll.protocol.trust.security import PLAIN
from tests.harness import loop_guard
from tests.harness.coordinator_questions import CoordinatorQuestions, of_server
from tests.harness.memory_store import MemoryStore
from tests.harness.site_questions import watch_steps, without_fault
from tests.simulation.loop import HERE, THREAD_S, InlineExecutor, Process, SimLoop
from tests.simulation.machine import SimDisk, SimMachine
from tests.simulation.other_hosts import OtherHost
from tests.simulation.sites import Hands, SimBuffer, SimLauncher, SimLocalServer, let_go
from tests.simulation.standby import Shared, SharedView, SimLease

loop_guard.install()

COORDINATOR = "coordinator"
STANDBY = "standby"
COORDINATORS = (COORDINATOR, STANDBY)
"""Machines, where there are two."""


def address_of(machine: str) -> str:
    return f"{machine}:7700"


ADDRESS = address_of(COORDINATOR)
BROKEN_OFF = 0.2
"""Of all fetches."""


@contextlib.contextmanager
def small_parts() -> Iterator[None]:
    """What is sent in parts has several of them, which faults come between; and what all sites get alike is read and
    written once. Constants and functions are replaced for that: as arguments they would be handed through each layer,
    for this alone."""
    with (
        patch.object(m, "MANIFEST_PART_BYTES", 64),
        patch.object(log_length, "LEAST_COMMITS", 2),
        patch.object(log_length, "SMALL_COMMITS", 0),
        patch.object(log_length, "TABLE_BYTES", 0),
        patch.object(sources_parts, "MAX_PART_BYTES", 1),  # every commit is a part of its own
        patch.object(wire, "from_proto", _read_once(wire.from_proto)),
        patch.object(wire, "encode", _write_once(wire.encode)),
    ):
        yield


def _read_once(from_proto: Callable[[type[Any], Message], Any]) -> Callable[[type[Any], Message], Any]:
    """All sites get the same plans and commits; with a thousand sites, each with a line a site, reading them is all."""
    known: dict[tuple[type[Any], bytes], Any] = {}

    def read(cls: type[Any], message: Message) -> Any:
        if cls not in (m.Plan, m.Commit):
            return from_proto(cls, message)
        key = cls, message.SerializeToString(deterministic=True)
        if key not in known:
            known[key] = from_proto(cls, message)
        return known[key]

    return read


def _write_once(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """And each site writes them to its disk: the same object, thanks to `_read_once`."""
    known: dict[int, tuple[Any, bytes]] = {}

    def write(value: Any) -> bytes:
        if type(value) not in (m.Plan, m.Commit):
            return encode(value)
        if id(value) not in known:
            known[id(value)] = value, encode(value)  # the object as well: nothing else has its id while it is here
        return known[id(value)][1]

    return write


class SimJournal(Journal):
    """Its lines go nowhere; on a full disk it says so."""

    def __init__(self, disk: SimDisk, path: Path) -> None:
        self._disk = disk
        self._path = path

    def write(self, kind: str, **values: Any) -> None:
        self._disk.look(self._path)

    def close(self) -> None:
        pass


RESTORED_WITHIN_S = 90.0


class SimStore(MemoryStore):
    """May crash its coordinator before or after it keeps something, or refuse to keep anything."""

    def __init__(self) -> None:
        super().__init__()
        self.crash_before = self.crash_after = False
        self.crash_after_commit = 0
        self.crash_after_cut = False
        self.full = False
        self.is_old = False
        """It is a copy of what there was: the next coordinator is told so."""
        self.num_restored = 0
        self.on_crash: Callable[[], None] = lambda: None
        self.kept: list[Record] = []

    def persist(self, term: int, records: Sequence[Record], wall_time_s: float) -> tuple[Deposit, ...]:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.crash_before:
            self.crash_before = False
            self.on_crash()
            return ()
        deposits = super().persist(term, records, wall_time_s)
        self.kept += records
        commits = [r.commit.commit for r in records if isinstance(r, CommitRecord)]
        is_cut = any(isinstance(r, WeightsRecord) and r.said != r.tokens for r in records)
        if self.crash_after_cut and is_cut:
            self.crash_after_cut = False
            self.on_crash()
        elif self.crash_after or (self.crash_after_commit and self.crash_after_commit in commits):
            self.crash_after, self.crash_after_commit = False, 0
            self.on_crash()
        return deposits

    def restore(self, term: int, deposits: Sequence[Deposit], settle: Callable[[Persisted], Sequence[Record]]) -> None:
        def noted(folded: Persisted) -> Sequence[Record]:
            records = settle(folded)
            self.kept += records
            return records

        super().restore(term, deposits, noted)
        self.is_old = False
        self.num_restored += 1


class SimCoordinator:
    """One start of the coordinator."""

    def __init__(
        self,
        loop: SimLoop,
        number: int,
        settings: RunSettings,
        store: SimStore,
        machine: Machine,
        *,
        busy_s: float = 0.0,
        shared: Shared | None = None,
        machine_name: str = COORDINATOR,
    ) -> None:
        """`shared`: it is one of two."""
        self.process = Process(machine_name, number)
        self._shared = shared
        self._address = address_of(machine_name)
        self.hangs_before_commit_s = 0.0
        """Once, in front of the next commit."""
        self.on_hang: Callable[[float], None] = lambda lasts_s: None
        self.on_led: Callable[[], None] = lambda: None
        self.on_lost: Callable[[BaseException], None] = lambda error: None
        self._machine = machine
        self._busy_s = busy_s
        self._context = contextvars.copy_context()
        self._context.run(HERE.set, self.process)
        self.failure: BaseException | None = None
        self.server: CoordinatorServer | None = None
        self.on_event: Callable[[], None] = lambda: None
        self.abandons_after: list[int] = []
        """So many batches of events after a commit, the sync that it opened is abandoned; a commit for each number."""
        self._abandoned_on = -1
        self.task = loop.create_task(self._run(settings, store), context=self._context)

    async def _run(self, settings: RunSettings, store: SimStore) -> None:
        try:
            config = CoordinatorConfig(listen=self._address, store_path=Path("/simulated"))
            if store.is_old:
                await self._restore(settings, store)
            if self._shared is not None:
                self.server = server = await self._led(config, settings, self._shared)
            else:
                self.server = server = CoordinatorServer(config, settings, store, machine=self._machine)
            asked = of_server(server)
            handle = asked.core.handle

            def watched(events: Sequence[Any], now: float, wall_s: float) -> Any:
                self._abandon_if_due(asked)
                outputs = handle(events, now, wall_s)
                faults = [o.text for o in outputs if isinstance(o, Report) and "a fault of the coordinator" in o.text]
                assert not faults, faults
                for _ in events:
                    self.on_event()
                return outputs

            asked.core.handle = watched  # type: ignore[method-assign]
            if self._shared is not None:
                self._watch_commits(server)
            if self._busy_s:
                execute = server._execute

                async def slowly(outputs: list[Output]) -> None:
                    await asyncio.sleep(self._busy_s)
                    await execute(outputs)

                server._execute = slowly  # type: ignore[method-assign]
            await server.start()
            await server.run()
        except Exception as error:
            self.failure = error

    async def _led(self, config: CoordinatorConfig, settings: RunSettings, shared: Shared) -> CoordinatorServer:
        """As in coordinator/main.py, once it leads."""
        machine = self.process.machine
        claim = Claim(str(self.process), self._address)
        leading = Leading(SimLease(shared, claim, machine), "the store", NoRoots(), self.on_lost)
        view, never = SharedView(shared, claim, machine, leading.takes), asyncio.Event()
        while True:
            with contextlib.suppress(HostError):
                if not await leading.is_free():
                    await leading.wait(never)
            try:
                server = CoordinatorServer(config, settings, view, machine=self._machine, leading=leading)
            except (LeaseHeld, HostError):
                await asyncio.sleep(0.1)
                continue
            leading.start(contextlib.AsyncExitStack())
            self.on_led()
            return server

    def _watch_commits(self, server: CoordinatorServer) -> None:
        execute = server._execute

        async def watched(outputs: list[Output]) -> None:
            kept = [record for output in outputs if isinstance(output, Persist) for record in output.records]
            if self.hangs_before_commit_s and any(isinstance(record, CommitRecord) for record in kept):
                lasts_s, self.hangs_before_commit_s = self.hangs_before_commit_s, 0.0
                self.on_hang(lasts_s)
                await asyncio.sleep(0)
            await execute(outputs)

        server._execute = watched  # type: ignore[method-assign]

    async def _restore(self, settings: RunSettings, store: SimStore) -> None:
        """An operator does not wait for ever for a site that hangs."""
        seal = Seal(b"", settings.run_id)
        for num_sites in (None, 1):
            restoring = Restoring(settings, store, self._machine, security=PLAIN, seal=seal, num_sites=num_sites)
            await restoring.start(ADDRESS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESTORED_WITHIN_S if num_sites is None else None):
                    await restoring.restored()
            await restoring.stop()
            if not store.is_old:
                return

    @property
    def asked(self) -> CoordinatorQuestions | None:
        """None before it serves."""
        return None if self.server is None else of_server(self.server)

    def _abandon_if_due(self, asked: CoordinatorQuestions) -> None:
        last = asked.last_commit()
        is_open = asked.open_sync() is not None and not asked.waits_for_lost_state()
        if not self.abandons_after or not is_open or last == self._abandoned_on:
            return
        self.abandons_after[0] -= 1
        if self.abandons_after[0] < 0:
            del self.abandons_after[0]
            self._abandoned_on = last
            fragments = asked.open_fragments()
            asked.abandon_sync("the simulator wants it", fragments[last % len(fragments)])


class MuteCoordinator:
    """In the coordinator's place: every stream opens, and ends without a word some time later."""

    def __init__(self, loop: SimLoop, number: int, machine: Machine, ends_after_s: float) -> None:
        self.process = Process(COORDINATOR, number)
        self.num_streams = 0
        self._machine = machine
        self._ends_after_s = ends_after_s
        context = contextvars.copy_context()
        context.run(HERE.set, self.process)
        self.task = loop.create_task(self._run(), context=context)

    async def _run(self) -> None:
        server = self._machine.network.create_server(max_message_bytes=transport.MAX_SESSION_MESSAGE_BYTES)
        handlers: dict[str, Any] = {"Session": grpc.stream_stream_rpc_method_handler(self._session)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        transport.bind(server, ADDRESS, None)
        await server.start()

    async def _session(self, requests: Any, context: Any) -> None:
        self.num_streams += 1
        await asyncio.sleep(self._ends_after_s)


@dataclass(frozen=True, slots=True)
class Averaging:
    """A reducer has averaged a chunk, and keeps what was lost."""

    attempt: AttemptKey
    chunk: int
    added: AttemptKey | None
    """The attempt whose error of the chunk was added."""


class SimAverageErrors(AverageErrors):
    """Tells what is done with them."""

    def __init__(self, pool: Executor, spill: Spill | None, tell: Callable[[Averaging], None]) -> None:
        super().__init__(pool, spill)
        self._tell = tell
        self._added: dict[int, AttemptKey | None] = {}  # of each chunk, what was asked for last

    def of(self, chunk: int, attempt: AttemptKey | None) -> Floats:
        found = super().of(chunk, attempt)
        self._added[chunk] = attempt if found.size else None
        return found

    def keep(self, attempt: AttemptKey, chunk: int, left: Floats) -> None:
        super().keep(attempt, chunk, left)
        self._tell(Averaging(attempt, chunk, self._added.pop(chunk)))


class SimNode:
    """One start of one site's node, in `folder`."""

    def __init__(
        self,
        loop: SimLoop,
        process: Process,
        *,
        machine: SimMachine,
        settings: RunSettings,
        reduce_buffer_bytes: int,
        folder: Path,
        hands: Hands,
        watch_before: Callable[[SimNode, e.Event], None],
        watch: Callable[[SimNode, e.Event], None],
        watch_output: Callable[[SimNode, out.Output], None],
        note_average: Callable[[SimNode, Averaging], None],
        seed: int,
        coordinators: str = ADDRESS,
    ) -> None:
        self.process = process
        self._coordinators = coordinators
        self._note_average = note_average
        self.settings = settings
        self._machine = machine
        self.reduce_buffer_bytes = reduce_buffer_bytes
        self.folder = folder
        self.hands = hands
        self.result: tuple[int, str] | None = None
        self.failure: BaseException | None = None
        self.node: Node | None = None
        self.other_host: OtherHost | None = None
        self._watch_before = watch_before
        self._watch = watch
        self._watch_output = watch_output
        self._seed = seed
        context = contextvars.copy_context()
        context.run(HERE.set, self.process)
        self.task = loop.create_task(self._run(), context=context)

    async def _run(self) -> None:
        """As in node/daemon/main.py, without signals, log files and metrics."""
        home: Home | None = None
        try:
            home = Home(self.folder, self._machine)
            plane = await asyncio.to_thread(SimDataPlane.load, home, self.settings, 1)
            if plane is not None:
                plane.hands = self.hands
            hub = Hub(
                run_id=self.settings.run_id,
                incarnation=home.incarnation,
                dialer=Dialer(self._machine.network),
                pool=InlineExecutor(),
                spill=await asyncio.to_thread(Spill, home.spill_folder, disk=home.disk),
                error_spill=await asyncio.to_thread(Spill, home.average_error_folder, disk=home.disk),
            )
            hub.average_errors = SimAverageErrors(
                hub.pool, hub.error_spill, lambda made: self._note_average(self, made)
            )
            hub.fetch_state = _broken_off_at_times(hub.fetch_state, self._seed)  # type: ignore[method-assign]
            handlers = PeerService(hub).handlers
            server, port = await listen(f"{self.process.machine}:0", handlers, self._machine.network)
            config = NodeConfig(
                coordinator=self._coordinators,
                name=self.process.machine,
                command=("sim",),
                num_threads=1,
                max_retained_bytes=4 << 30,  # what the machine has free must not change a schedule
                reduce_buffer_bytes=self.reduce_buffer_bytes,
            )
            self.node = node = Node(
                config=config,
                settings=self.settings,
                home=home,
                plane=plane,
                met=Met(hub, f"{self.process.machine}:0", f"{self.process.machine}:{port}"),
                journal=SimJournal(self._machine.disk, home.folder / "journal.jsonl"),
                machine=self._machine,
                parts=Parts(
                    local_server=SimLocalServer,
                    launcher=self._launcher,
                    deposit_box=lambda *_: self._machine.deposit_box,
                    data_plane=self._data_plane,
                ),
            )
            has_other_host = self.hands.arrives_s > 0
            node.core.ranks.num_elsewhere = int(has_other_host)
            handle, execute = node.handle, node._execute

            def watched(event: e.Event) -> None:
                handle(event)
                self._watch(self, event)

            def watched_output(output: out.Output) -> None:
                without_fault([output])
                self._watch_output(self, output)
                if self.other_host is not None:
                    self.other_host.check(output)
                execute(output)

            watch_steps(node.core, lambda event: self._watch_before(self, event))
            node.handle = node.shell.handle = watched  # type: ignore[method-assign]
            node._execute = watched_output  # type: ignore[method-assign]
            if has_other_host:
                self.other_host = OtherHost(node, self.hands, self._seed)
            self.result = await node.run()
            if not isinstance(node.failure, HostError):  # the disk was full
                self.failure = node.failure
            await hub.close()
            await server.stop(0.5)
            node.close()
            home.close()
        except HostError as error:  # so early that `main` says it: the disk is full
            self.result = error.exit_code, str(error)
            if home is not None:
                home.close()  # as the end of the process does
        except Exception as error:
            self.failure = error

    def _launcher(self, config: NodeConfig, on_exit: Callable[[WorkersExited], None], _: OnFailure) -> Launcher:
        assert self.node is not None
        assert isinstance(self.node.workers.server, SimLocalServer)
        return SimLauncher(self.node.workers.server, self.hands, on_exit, self._seed)

    def _data_plane(self, home: Home, settings: RunSettings, manifest: Manifest, num_threads: int) -> DataPlane:
        plane = SimDataPlane(home, settings, manifest, num_threads)
        plane.hands = self.hands
        return plane


def _broken_off_at_times(fetch_state: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """Here a fetch takes no time. With a large model it takes hours, and may end between any two commits."""
    generator = random.Random(f"fetches {seed}")

    async def fetch(*, optimizer: OuterOptimizer, **given: Any) -> Any:
        if generator.random() < BROKEN_OFF:
            optimizer = _BreaksOff(optimizer, generator.randint(0, 2))
        return await fetch_state(optimizer=optimizer, **given)

    return fetch


class _BreaksOff(OuterOptimizer):
    """After so many commits."""

    def __init__(self, optimizer: OuterOptimizer, num_commits: int) -> None:
        super().__init__(optimizer.settings)
        self._left = num_commits

    def at(self, record: m.Commit) -> OuterUpdate:
        self._left -= 1
        if self._left < 0:
            raise PeerError(f"the link broke before commit {record.commit}")
        return super().at(record)


class SimDataPlane(DataPlane):
    """The real one, whose work takes the time that the site's machine needs for it."""

    hands: Hands

    def _shared_buffer(self, num_bytes: int, name: str) -> SharedBuffer:
        return SimBuffer(num_bytes, name)

    async def apply(self, commit: m.Commit, *, lets_go: bool = False) -> bytes:
        if lets_go:  # of chunks too small to be read in place: they are gone all the same
            self.published.content.clear()
            let_go(self.layout, self.published.buffer)
        return await super().apply(commit, lets_go=lets_go)

    async def publish(self, content: e.Content) -> None:
        with _taking(self.hands.publish_s / self.settings.sync.fragments):  # it is of one of them
            await super().publish(content)

    async def _write_model(self, folder: Path, frozen: FrozenState, info: Mapping[str, Any]) -> None:
        with _taking(self.hands.save_s):
            await super()._write_model(folder, frozen, info)


@contextlib.contextmanager
def _taking(seconds: float) -> Iterator[None]:
    token = THREAD_S.set(seconds)
    try:
        yield
    finally:
        THREAD_S.reset(token)


def copy_of(folder: Path, target: Path) -> Path:
    """What a killed process leaves on its disk."""
    shutil.copytree(folder, target)
    return target
