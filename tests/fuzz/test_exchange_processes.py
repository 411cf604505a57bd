"""What an exchange process and its node say to each other over their socket: words in any order, and damaged."""

from __future__ import annotations

import asyncio
import os
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from atoll.node import host_protocol as hosts
from atoll.node import process_protocol as processes
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.exchange_processes.attached import AttachedProcess
from atoll.node.daemon.exchange_processes.fleet import ExchangeProcesses
from atoll.node.daemon.exchange_processes.process import ExchangeProcess
from atoll.node.daemon.peers import Met
from atoll.node.daemon.shared_exchanges import MOST_BYTES
from atoll.node.dataplane import payload_part
from atoll.node.dataplane.payload_file import AttemptKey, PayloadFile
from atoll.node.dataplane.payload_part import PartFile
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.sync.exchange import ExchangeResult
from atoll.node.local_protocol import LENGTH_BYTES
from atoll.protocol import messages as m
from atoll.protocol import wire
from atoll.protocol.errors import AtollError, InvalidMessage
from atoll.protocol.plans import payload_hash
from atoll.protocol.settings import settings_to_json
from atoll.protocol.v1 import processes_pb2
from tests.harness.data_plane import filled
from tests.harness.fuzzing import MANIFESTS, UINT32, UINT64, damaged, fuzz, instances, protos
from tests.harness.host_exchanges import begun, on_host_0
from tests.harness.hosts import SITE_ID, Led
from tests.harness.model_on_hosts import COUNT, LAYOUT, SETTINGS, V, W, payloads_of

PARTS = [range(V, W), range(W, COUNT), range(COUNT, len(LAYOUT.chunks))]
"""Of the node, and of the two processes beside it: one chunk that travels each."""
OWN = {1: W, 2: COUNT}
ADDRESS = "127.0.0.1:7000"
DONE = m.Done(sync=1, attempt=1, term=1, payload_digest=bytes(32), last_commit=0, state_hash=bytes(32), tokens=(100,))
FAILED = m.ExchangeFailed(
    sync=1, attempt=1, term=1, peer_site_id=0, direction=m.Direction.SENDING, phase="payloads", text="slow"
)
_STORED = struct.Struct("<QQIQ32s")  # chunk, offset, length, version, hash


class Hearing:
    """The near end of a connection, whose other end hears nothing but words."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.descriptors: deque[int] = deque()

    def send_frame(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        assert int.from_bytes(frame[:LENGTH_BYTES], "little") == len(frame) - LENGTH_BYTES
        assert len(fds) in (0, 1)
        self.frames.append(frame[LENGTH_BYTES:])


class Node:
    """One with a state, in a loop that all examples share."""

    def __init__(self, folder: Path) -> None:
        self.runner = asyncio.Runner()
        self.run = self.runner.run
        self.pool = ThreadPoolExecutor(1)
        self.run(self._make(folder))

    async def _make(self, folder: Path) -> None:
        self.led = Led(folder, site_hosts=1)
        await self.led.has_state()
        plane = self.plane = self.led.plane
        plane.parts, plane.own_part = PARTS, PARTS[0]
        plane.own = PARTS[0]  # of what `on_host_0` exchanges
        _, self.payloads = payloads_of(plane, 1)
        self.alone = begun(self.led, alone=True)

    async def close(self) -> None:
        self.pool.shutdown()
        await self.led.close()

    def forget(self) -> None:
        """All syncs, so that another example begins the same ones."""
        self.led.hub.abandon()
        self.led.hub._dropped.clear()
        for sync in (1, LAST_SYNC):
            self.plane.log.drop(sync)


@pytest.fixture(scope="module", name="node")
def _node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("processes"))
    yield node
    node.run(node.close())
    node.runner.close()


# --- words


@st.composite
def altered(draw: st.DrawFn, right: Message) -> Any:
    """Some of its fields, or of the fields of these, have any content."""
    word = type(right)()
    word.CopyFrom(right)
    for _ in range(draw(st.integers(0, 2))):
        part: Any = word
        while True:
            fields = [field for field, _ in part.ListFields()]
            inner = [field.name for field in fields if field.message_type is not None and not field.is_repeated]
            if not inner or (part is not word and draw(st.booleans())):
                break
            part = getattr(part, draw(st.sampled_from(inner)))
        if part is word:
            continue  # it has no body
        other = draw(protos(type(part)))
        name = draw(st.sampled_from([field.name for field in part.DESCRIPTOR.fields] or [""]))
        if name:
            only = type(part)()
            only.CopyFrom(other)
            for field in part.DESCRIPTOR.fields:
                if field.name != name:
                    only.ClearField(field.name)
            part.ClearField(name)
            part.MergeFrom(only)
    return word


def frames(right: list[bytes], cls: type[Message]) -> st.SearchStrategy[bytes]:
    """Right ones, such with fields that are not, damaged ones, and any."""
    parsed: list[Message] = [cls.FromString(frame) for frame in right]
    near = st.sampled_from(parsed).flatmap(altered).map(lambda word: bytes(word.SerializeToString()))
    return (
        near
        | near
        | st.sampled_from(right)
        | st.sampled_from(right).flatmap(damaged)
        | protos(cls).map(lambda word: bytes(word.SerializeToString()))
    )


@st.composite
def entries(draw: st.DrawFn, places: dict[int, range]) -> bytes:
    """What could be said of payloads: near to what is set aside for a chunk, and to what may lie there."""
    found = b""
    for _ in range(draw(st.integers(0, 3))):
        chunk, region = draw(st.sampled_from(sorted(places.items(), key=str)))
        whole = len(region) // 2
        length = draw(st.sampled_from([whole, whole, whole + 1, len(region), 8, 0]) | UINT32)
        near = [region.start, region.start - 1, region.stop - length, region.stop - length + 1]
        offset = draw(st.sampled_from([offset for offset in near if offset >= 0]) | UINT64)
        if not draw(st.integers(0, 3)):
            chunk = draw(st.sampled_from([V, W, COUNT, len(LAYOUT.chunks)]) | UINT64)
        hash = draw(st.sampled_from([bytes(32), b"\1" * 32]))
        found += _STORED.pack(chunk, offset, length, draw(UINT64), hash)
    return draw(st.just(found) | damaged(found)) if draw(st.booleans()) else found


def figures() -> st.SearchStrategy[m.Averaged]:
    """Of averages, of any number of contributors."""
    norms, num_high = st.lists(st.just(1.0), max_size=2), st.lists(st.integers(0, 2), max_size=2)
    return st.builds(m.Averaged, num_chunks=st.integers(0, 2), norms=norms.map(tuple), num_high=num_high.map(tuple))


def body(whole: bytes) -> bytes:
    return whole[LENGTH_BYTES:]


# --- what a process says


class Beside:
    """The node's processes, for which a test speaks, and the exchange of sync 1 in which they take part."""

    def __init__(self, node: Node) -> None:
        self.node = node
        led = node.led
        config = NodeConfig(coordinator="127.0.0.1:1", name="a", exchange_processes=3)
        self.fleet = ExchangeProcesses(
            config,
            SETTINGS,
            Met(led.hub, ADDRESS, ADDRESS),
            home=led.home.folder,
            lease_s=600.0,
        )
        self.fleet.lay_out(node.plane)
        self.processes = {number: self._comes(number) for number in OWN}

    def _comes(self, number: int) -> AttachedProcess:
        connection: Any = Hearing()
        process = AttachedProcess(number=number, words=f"exchange process {number}", connection=connection)
        self.fleet._hear(process, processes.ProcessReady(port=4000 + number))
        return process

    async def begin(self) -> None:
        plane, word = self.node.plane, self.node.alone
        data = plane.sync_data(0, 0, (), plane.own)
        await self.fleet.exchanges.begin(word, plane, data)
        self.regions: dict[int, range] = {}
        for number, process in self.processes.items():
            connection: Any = process.connection
            told = processes.heard_of_node(connection.frames[-1])
            assert isinstance(told, processes.BeginInProcess)
            self.regions[number] = range(told.region_start, told.region_end)

    @property
    def file(self) -> PayloadFile:
        return self.node.plane.log.held(1, 1, 1)

    def puts(self, number: int) -> bytes:
        """The payload of that process is in its region; what it says of that."""
        chunk = OWN[number]
        payload = self.node.payloads[chunk]
        folder, region = self.node.led.home.payload_folder, self.regions[number]
        file = PartFile(folder, LAYOUT, SETTINGS.run_id, AttemptKey(1, 1, 1), own=[chunk], region=region)
        file.put(chunk, payload, payload_hash(payload))
        return payload_part.stored(file, [chunk])

    def last_words(self, number: int) -> list[bytes]:
        """Of its part of the exchange; a Done that it has said before stays."""
        stored = processes.PayloadsStored(sync=1, term=1, attempt=1, entries=self.puts(number))
        said: list[processes.ProcessSaid] = [stored]
        if (1, 1, 1) not in self.processes[number].done:
            said.append(DONE)
        return [body(processes.said(word)) for word in said]

    def right_words(self, number: int) -> list[bytes]:
        stored = processes.PayloadsStored(sync=1, term=1, attempt=1, entries=self.puts(number))
        averaged = m.Averaged(num_chunks=1, norms=(1.0,), num_high=(0,))
        said: list[processes.ProcessSaid] = [
            stored,
            replace(DONE, averaged=averaged, links=(m.LinkUse(site_id=2, received_bytes=5, seconds=0.5),)),
            m.Products(sync=1, attempt=1, term=1, products=(1.0,)),
            FAILED,
            hosts.HostBeat(sent_bytes=5, received_bytes=6, moved_bytes=11),
            processes.ProcessLog(level=20, text="it goes on"),
        ]
        return [body(processes.said(word)) for word in said]

    def words(self, number: int) -> st.SearchStrategy[bytes]:
        """Of which many say where payloads lie, or that all is done."""
        own = {OWN[number]: self.regions[number]}
        everything = {OWN[number]: region for number, region in self.regions.items()}
        stored: st.SearchStrategy[processes.ProcessSaid] = (entries(own) | entries(everything)).map(
            lambda found: processes.PayloadsStored(sync=1, term=1, attempt=1, entries=found)
        )
        done: st.SearchStrategy[processes.ProcessSaid] = figures().map(lambda found: replace(DONE, averaged=found))
        right = self.right_words(number)
        near = (stored | done).map(lambda word: body(processes.said(word)))
        return near | near | st.just(right[0]) | frames(right, processes_pb2.ProcessRequest)

    def hear(self, number: int, frame: bytes) -> bool:
        """False if the process is given up by that, as by `ExchangeProcesses._run`."""
        process = self.processes[number]
        try:
            self.fleet._hear(process, processes.heard_of_process(frame))
        except AtollError:
            del self.fleet._attached[number]
            self.fleet._attached.changed()
            self.fleet.exchanges.lost(process)
            return False
        return True

    def check_adopted(self) -> set[int]:
        """Chunks of processes that are in the file, each within what was set aside for the one whose it is."""
        found = set()
        for number, chunk in OWN.items():
            if (entry := self.file.entry_of(chunk)) is not None:
                offset, length = struct.unpack_from("<QI", entry)
                region = self.regions[number]
                assert region.start <= offset <= offset + length <= region.stop, (chunk, offset, length)
                assert length <= len(region) // 2, "no more than a payload of it may have"
                found.add(chunk)
        if (entry := self.file.entry_of(V)) is not None:
            (offset,) = struct.unpack_from("<Q", entry)
            assert all(offset not in region for region in self.regions.values()), (
                "the node's own is where the node put it"
            )
        others = set(range(len(LAYOUT.chunks) + 1)) - {V, *OWN.values()}
        assert not any(self.file.entry_of(chunk) for chunk in others)
        return found


@asynccontextmanager
async def beside(node: Node) -> AsyncIterator[Beside]:
    found = Beside(node)
    node.led.snapshot.view[:] = filled(LAYOUT, seed=1)
    try:
        await found.begin()
        yield found
    finally:
        found.fleet.exchanges.drop(1)
        await asyncio.gather(*found.fleet._tasks)
        await found.fleet.close()
        node.led.hub.counters.sent_bytes = node.led.hub.counters.received_bytes = 0
        node.forget()


def check_result(result: ExchangeResult) -> None:
    """The coordinator takes what the node says of it."""
    assert result.tokens == (100,)
    for part in (result.averaged, *result.links):
        if part is not None:
            wire.from_proto(type(part), wire.to_proto(part))


@fuzz(100)
@given(st.data())
def test_any_words_of_a_process_are_followed_or_end_it(node: Node, data: st.DataObject) -> None:
    """While the node exchanges its own part, or before."""

    async def main() -> None:
        async with beside(node) as found:
            running: asyncio.Task[ExchangeResult] | None = None
            if data.draw(st.booleans()):
                running = on_host_0(node.led, node.alone)
            here = set(OWN)
            for _ in range(data.draw(st.integers(0, 8))):
                number = data.draw(st.sampled_from(sorted(OWN)))
                if number in here:
                    is_here = found.hear(number, data.draw(found.words(number)))
                    here -= set() if is_here else {number}
                    found.check_adopted()
            running = running or on_host_0(node.led, node.alone)
            found.fleet.exchanges.has_begun(node.alone.plan)
            # What they have not said yet, those say that are here.
            ends_well = [
                number in here and all(map(partial(found.hear, number), found.last_words(number))) for number in OWN
            ]
            if all(ends_well):
                assert found.check_adopted() == set(OWN.values())
                with suppress(AtollError):
                    result = await running
                    assert found.file.sealed
                    check_result(await found.fleet.exchanges.done(node.alone.plan, result))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            counters = node.led.hub.counters
            assert max(counters.sent_bytes, counters.received_bytes, counters.moved_bytes) <= MOST_BYTES

    node.run(main())


@fuzz(100)
@given(protos(processes_pb2.ProcessRequest) | protos(processes_pb2.ProcessResponse))
def test_any_content_is_a_word_or_refused(envelope: Any) -> None:
    frame = envelope.SerializeToString()
    try:
        if isinstance(envelope, processes_pb2.ProcessRequest):
            said = processes.heard_of_process(frame)
            assert processes.heard_of_process(body(processes.said(said))) == said
        else:
            told = processes.heard_of_node(frame)
            assert processes.heard_of_node(body(processes.told(told))) == told
    except InvalidMessage:
        pass


# --- what the node says

LARGEST_FILE = 1 << 62
LEAST_STALL_S = 1e-3
LAST_SYNC = 1000
"""Of which no other word speaks."""


def close_if_open(descriptor: int, snapshot: int) -> None:
    with suppress(OSError):
        if os.path.sameopenfile(descriptor, snapshot):
            os.close(descriptor)


def is_never_said(told: processes.ProcessTold) -> bool:
    """A node has seen to that itself: a plan that an exchange can have, and places that are in a file."""
    match told:
        case processes.BeginInProcess(begun=hosts.BeginAtHost(plan=plan)):
            ends = [told.region_end]
            with suppress(InvalidMessage):
                ends += [sum(struct.unpack_from("<QI", entry)) for _, entry in payload_part.heard(told.held)]
            return plan.stall_limit_s < LEAST_STALL_S or max(ends) > LARGEST_FILE
    return False


@st.composite
def layouts(draw: st.DrawFn, right: processes.ProcessLayout) -> processes.ProcessLayout:
    """Of that model or another one, with any dtypes and any part of the chunks."""
    manifest = draw(st.just(right.manifest) | MANIFESTS)
    dtypes = tuple(draw(st.sampled_from([spec.dtype, "F32", "BF16", "I64", "x"])) for spec in manifest.tensors)
    return replace(
        right,
        manifest=manifest,
        chunk_elements=draw(st.sampled_from([right.chunk_elements, 1, 1 << 24])),
        dtypes=draw(st.sampled_from([right.dtypes, dtypes, dtypes[1:]])),
        first_chunk=draw(st.just(right.first_chunk) | UINT64),
        end_chunk=draw(st.just(right.end_chunk) | UINT64),
        max_retained_bytes=draw(st.just(right.max_retained_bytes) | UINT64),
        reduce_buffer_bytes=draw(st.just(right.reduce_buffer_bytes) | UINT64),
    )


@st.composite
def begins(draw: st.DrawFn, right: processes.BeginInProcess) -> processes.BeginInProcess:
    """Where payloads may lie, and what led to the base, is anything."""
    region = draw(st.sampled_from([(right.region_start, right.region_end)]) | st.tuples(UINT64, UINT64))
    return replace(
        right,
        region_start=region[0],
        region_end=region[1],
        held=draw(st.just(b"") | entries({W: range(right.region_start, right.region_end)})),
        last=tuple(draw(st.lists(instances(processes.LastCommit), max_size=2))),
        left_errors=tuple(draw(st.lists(instances(processes.AttemptInLog), max_size=2))),
        in_force=tuple(draw(st.lists(instances(processes.AttemptInLog), max_size=2))),
    )


class Process:
    """Number 1 beside that node, which this test is."""

    def __init__(self, node: Node) -> None:
        self.node = node
        led = node.led
        self.hub = Hub(
            run_id=SETTINGS.run_id,
            incarnation=0,
            dialer=Dialer(),
            pool=node.pool,
        )
        self.hub.num_processes = len(PARTS)
        connection: Any = Hearing()
        self.connection = connection
        self.tasks: set[asyncio.Task[None]] = set()
        """Of all exchanges that were begun."""
        start = processes.ProcessStart(
            number=1,
            home=os.fsencode(led.home.folder),
            settings_json=settings_to_json(SETTINGS),
            listen_on="127.0.0.1:0",
            num_threads=1,
            nice=0,
            is_debug=False,
            beat_s=600.0,
            num_processes=len(PARTS),
        )
        self.process = ExchangeProcess(self.connection, start, self.hub)
        hub, plane = led.hub, node.plane
        self.identity = processes.ProcessIdentity(site_id=SITE_ID, incarnation=led.home.incarnation)
        self.layout = processes.ProcessLayout(
            manifest=LAYOUT.manifest,
            chunk_elements=LAYOUT.chunk_elements,
            dtypes=tuple(plane.dtypes.get(spec.name, spec.dtype) for spec in LAYOUT.manifest.tensors),
            first_chunk=PARTS[1].start,
            end_chunk=PARTS[1].stop,
            max_retained_bytes=hub.max_retained_bytes,
            reduce_buffer_bytes=hub.reduce_buffer_bytes,
        )

    def begin(self, sync: int, **changes: Any) -> processes.BeginInProcess:
        """An exchange of this site alone; the file of the attempt is there."""
        plan = replace(self.node.alone.plan, sync=sync, **changes)
        file = self.node.plane.log.begin(plan.sync, plan.term, plan.attempt)
        region = file.set_aside(1 << 12)
        begins = replace(self.node.alone, plan=plan)
        return processes.BeginInProcess(begun=begins, region_start=region.start, region_end=region.stop)

    def right_words(self) -> list[bytes]:
        attempt = processes.AttemptInLog(sync=1, term=1, attempt=1, fragment=0)
        begin = self.begin(1)
        told: list[processes.ProcessTold] = [
            begin,
            replace(begin, held=_STORED.pack(W, begin.region_start, 8, 0, bytes(32)), left_errors=(attempt,)),
            replace(begin, begun=replace(begin.begun, weights=())),
            self.begin(1, attempt=2),
            self.layout,
            self.identity,
            m.Weights(sync=1, attempt=1, term=1, tokens=(100,)),
            m.Weights(sync=1, attempt=1, term=1, tokens=(100,), roots=(bytes(32),)),
            m.Influences(sync=1, attempt=1, term=1, influences=(7,)),
            hosts.HurryAtHost(sync=1),
            hosts.CancelAtHost(sync=1, attempt=1),
            processes.DropInProcess(sync=1, in_force=(attempt,)),
            processes.AbandonAll(),
        ]
        return [body(processes.told(word)) for word in told]

    def words(self) -> st.SearchStrategy[bytes]:
        right = self.right_words()
        near: st.SearchStrategy[Any] = layouts(self.layout) | begins(self.begin(1))
        return near.map(lambda word: body(processes.told(word))) | frames(right, processes_pb2.ProcessResponse)

    async def hear(self, told: processes.ProcessTold) -> None:
        """A layout comes with a descriptor, which the process takes."""
        descriptor, snapshot = -1, self.node.led.snapshot.fd
        if isinstance(told, processes.ProcessLayout):
            descriptor = os.dup(snapshot)
            self.connection.descriptors.append(descriptor)
        try:
            await self.process._do(told)
            self.tasks.update(self.process._exchanges._tasks.values())
        except AtollError:
            close_if_open(descriptor, snapshot)  # the process ends, and its descriptors with it
            raise
        assert not self.connection.descriptors

    def said(self) -> list[processes.ProcessSaid]:
        found = []
        for frame in self.connection.frames:
            said = processes.heard_of_process(frame)
            assert processes.heard_of_process(body(processes.said(said))) == said
            found.append(said)
        return found

    async def still_exchanges(self) -> None:
        """It has followed all words: it does what it is told now."""
        for told in (processes.AbandonAll(), self.identity, self.layout):
            await self.hear(told)
        self.connection.frames.clear()
        await self.hear(self.begin(LAST_SYNC))
        await self.process._exchanges._tasks[LAST_SYNC]
        # What ran before it was told to end may be heard of after that.
        match [said for said in self.said() if getattr(said, "sync", 0) == LAST_SYNC]:
            case [processes.PayloadsStored(entries=found), m.Done(sync=sync, tokens=tokens)]:
                assert [chunk for chunk, _ in payload_part.heard(found)] == [W]
                assert (sync, tokens) == (LAST_SYNC, (100,))
            case said:
                raise AssertionError(said)


@asynccontextmanager
async def started(node: Node, *, is_laid_out: bool) -> AsyncIterator[Process]:
    node.led.snapshot.view[:] = filled(LAYOUT, seed=1)
    found = Process(node)
    try:
        await found.hear(found.identity)
        if is_laid_out:
            await found.hear(found.layout)
        yield found
    finally:
        await found.process._exchanges.close()
        await found.hub.dialer.close()
        node.forget()
    for come_out in await asyncio.gather(*found.tasks, return_exceptions=True):
        if not isinstance(come_out, asyncio.CancelledError):
            assert come_out is None, "it has said how it has come out"


@fuzz(100)
@given(st.booleans(), st.data())
def test_any_words_of_a_node_are_followed_or_end_the_process(
    node: Node, is_laid_out: bool, data: st.DataObject
) -> None:
    """Before it knows the model, too. What it says then its node can hear."""

    async def main() -> None:
        async with started(node, is_laid_out=is_laid_out) as found:
            words = found.words()
            for _ in range(data.draw(st.integers(0, 6))):
                frame = data.draw(words)
                try:
                    told = processes.heard_of_node(frame)
                except InvalidMessage:
                    continue
                if is_never_said(told):
                    continue
                try:
                    await found.hear(told)
                except AtollError:
                    break
            else:
                found.said()
                await found.still_exchanges()
            found.said()

    node.run(main())
