"""The hosts of a site in one process: a leader, a follower, and what a test says in the place of either, over loopback.

The site has a rank on each of two hosts. Each has a half of `w`; what they share, rank 0 owns; rank 1 alone has `own`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import numpy as np

from atoll.node import host_protocol as hosts
from atoll.node import local_protocol as local
from atoll.node.core import events as e
from atoll.node.core.host_events import HostsChanged
from atoll.node.core.ranks.pieces import SitePieces, site_pieces
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.hosts.follower import Follower
from atoll.node.daemon.hosts.leader import Leader
from atoll.node.daemon.rank_commands import Meeting
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.dataplane.slices import Wanted, messages, new_digest, views
from atoll.node.local_protocol import Greeting, LocalJoin, Piece
from atoll.node.tasks import end
from atoll.protocol import PROTOCOL_VERSION, transport, wire
from atoll.protocol.errors import AtollError
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.settings import RunSettings
from atoll.protocol.status import from_rpc_error
from atoll.protocol.time_limits import PRESETS, TimeLimits
from atoll.protocol.v1 import hosts_pb2, local_pb2
from tests.harness.failures import unexpected
from tests.harness.ranks import Happened, ServedRanks
from tests.harness.sockets import free_address

T = TypeVar("T")

SETTINGS = RunSettings(run_id="run", time_limits="wan")
LIMITS = replace(PRESETS["wan"], lease_s=600.0)
"""Of a leader. No test waits for their end; a host that a test speaks for does not beat."""
MEETING = Meeting(address="127.0.0.1:4567", group_name="together")
SPECS = [
    TensorSpec(name="count", shape=(), dtype="I64", role=Role.BUFFER_LOWEST),
    TensorSpec(name="own", shape=(3,), dtype="F16", role=Role.FROZEN),
    TensorSpec(name="shared", shape=(5,), dtype="F32", role=Role.FROZEN),
    TensorSpec(name="w", shape=(4, 6), dtype="F32", role=Role.TRAINABLE),
]
MANIFEST = Manifest.canonical(SPECS)
LAYOUT = Layout(MANIFEST)


def pieces_of(rank: int) -> tuple[Piece, ...]:
    shared = (
        Piece(name="count", offsets=(), sizes=(), dtype="I64"),
        Piece(name="shared", offsets=(0,), sizes=(5,), dtype="F32"),
        Piece(name="w", offsets=(2 * rank, 0), sizes=(2, 6), dtype="F32"),
    )
    return shared if rank == 0 else (*shared, Piece(name="own", offsets=(0,), sizes=(3,), dtype="F16"))


OWNED_BY_RANK_1 = pieces_of(1)[2:]


def offer_of(rank: int) -> LocalJoin:
    return LocalJoin(manifest=MANIFEST, pieces=pieces_of(rank), data_fingerprint=b"f", data_rank=rank)


def pieces_of_site() -> SitePieces:
    """Of both ranks."""
    found = site_pieces([offer_of(rank) for rank in range(2)], 1)
    assert isinstance(found, SitePieces)
    return found


def copied(source: memoryview, onto: bytes, pieces: Iterable[Piece], wanted: Wanted) -> bytes:
    """`onto`, with what the pieces hold of what is wanted, out of `source`."""
    target = bytearray(onto)
    listed = list(pieces)
    for into, out_of in zip(
        views(LAYOUT, memoryview(target), listed, wanted), views(LAYOUT, source, listed, wanted), strict=True
    ):
        into[...] = out_of
    return bytes(target)


def random_bytes(num_bytes: int, seed: int = 7) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def config_of(host: int, address: str, **more: Any) -> NodeConfig:
    values: dict[str, Any] = {
        "coordinator": "127.0.0.1:1",
        "name": "a",
        "site_hosts": 2,
        "site_rank": host,
        "site_address": address,
    }
    return NodeConfig(**values | more)


class Led:
    """A leader, the local socket of its host, and what its core would hear."""

    def __init__(self, limits: TimeLimits = LIMITS, settings: RunSettings = SETTINGS, **config: Any) -> None:
        self.config = config_of(0, free_address(), **config)
        self.events: asyncio.Queue[e.Event | Happened] = asyncio.Queue()
        self.server = ServedRanks(self.events.put_nowait, unexpected)
        self.leader = Leader(self.config, settings, limits, self.events.put_nowait)
        size, moments = LAYOUT.buffer_bytes, 2 * LAYOUT.moment_bytes
        self.snapshot, self.publish = SharedBuffer(size, "snapshot"), SharedBuffer(size + moments, "publish")
        self._made: list[HandHost] = []
        self._ranks: list[Rank] = []

    @property
    def address(self) -> str:
        return self.config.site_address

    async def event(self, kind: type[T]) -> T:
        """The next one, which is of that kind."""
        event = await self.events.get()
        assert isinstance(event, kind), event
        return event

    async def hosts_changed(self, *missing: int) -> str:
        """What is said of it."""
        event = await self.event(HostsChanged)
        assert event.missing == missing, event
        return event.text

    async def host(self, number: int = 1, **hello: Any) -> HandHost:
        """One that a test speaks for, and that is welcome."""
        host = HandHost(self.address)
        self._made.append(host)
        await host.says_hello(number, **hello)
        host.session = (await host.hears(hosts.HostWelcome)).session
        return host

    async def rank(self, path: str, rank: int = 1, generation: int = 1) -> Rank:
        """One that has connected to that socket."""
        found = await Rank.connect(path, rank, generation)
        self._ranks.append(found)
        return found

    def starts(self, generation: int) -> None:
        self.leader.start(generation, MEETING)

    def lays_out(self, generation: int) -> None:
        """The ranks of this generation, which have all joined."""
        self.leader.laid_out(pieces_of_site(), LAYOUT, self.snapshot, self.publish)

    async def runs(self, generation: int, host: HandHost) -> None:
        """Ranks, of which the host hears."""
        self.starts(generation)
        assert (await host.hears(hosts.StartRanks)).generation == generation
        self.lays_out(generation)


@asynccontextmanager
async def led(limits: TimeLimits = LIMITS, settings: RunSettings = SETTINGS, **config: Any) -> AsyncIterator[Led]:
    """A site whose leader is there."""
    site = Led(limits, settings, **config)
    await site.server.start()
    await site.leader.open(site.server.connected)
    try:
        yield site
    finally:
        for host in site._made:  # the leader waits for those that are here
            await host.close()
        await site.leader.close(0, "over")
        for rank in site._ranks:
            rank.close()
        await site.server.close()
        site.snapshot.close()
        site.publish.close()


class HandHost:
    """A host whose words a test says."""

    def __init__(self, address: str) -> None:
        self._channel = transport.open_channel(address, credentials=None, max_message_bytes=hosts.MAX_MESSAGE_BYTES)
        attach: Any = self._channel.stream_stream(
            hosts.ATTACH_METHOD,
            request_serializer=hosts_pb2.AttachRequest.SerializeToString,
            response_deserializer=hosts_pb2.AttachResponse.FromString,
        )
        self._call = attach()
        self.session = 0

    async def says(self, message: hosts.HostSaid) -> None:
        await self._call.write(hosts.said(message))

    async def says_hello(self, number: int = 1, **more: Any) -> None:
        hello = hosts.HostHello(
            protocol_version=PROTOCOL_VERSION, site_name="a", host=number, num_hosts=2, num_ranks=1, machine="b"
        )
        await self.says(replace(hello, **more))

    async def hears(self, kind: type[T]) -> T:
        """The next word but beats, which is of that kind. Raises what the leader ends the stream with."""
        while True:
            try:
                envelope = await self._call.read()
            except grpc.RpcError as error:
                raise from_rpc_error(error, "host 0") from None
            assert envelope is not grpc.aio.EOF, "the stream has ended"
            word = hosts.heard_of_leader(envelope)
            if isinstance(word, kind) or not isinstance(word, hosts.HostBeat):
                assert isinstance(word, kind), word
                return word

    async def ended(self) -> None:
        """When the leader has ended the stream, however."""
        try:
            while await self._call.read() is not grpc.aio.EOF:
                pass
        except grpc.RpcError:
            pass

    async def says_of_rank(self, connection: int, rank: int, generation: int, said: local.Said) -> None:
        """As the rank sends it over its local socket."""
        data = local.pack(generation, rank, said).SerializeToString()
        await self.says(hosts.RankFrame(connection=connection, data=data))

    async def rank_hears(self, connection: int) -> local_pb2.LocalResponse:
        frame = await self.hears(hosts.RankFrame)
        assert frame.connection == connection
        return local.decode(local_pb2.LocalResponse, frame.data)

    def put_of(self, generation: int, **more: Any) -> hosts.SlicesPut:
        opened = hosts.SlicesPut(
            session=self.session, generation=generation, rank=1, step=10, seq=2, fragment=0, with_frozen=True
        )
        return replace(opened, **more)

    async def put(
        self,
        opened: hosts.SlicesPut,
        source: bytes,
        *,
        pieces: Iterable[Piece] = OWNED_BY_RANK_1,
        wrong_hash: bytes = b"",
        after_opening: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """What it has in SNAPSHOT. Raises what the leader says of it."""
        method: Any = self._channel.stream_unary(
            hosts.PUT_METHOD,
            request_serializer=hosts_pb2.PutSlicesRequest.SerializeToString,
            response_deserializer=hosts_pb2.PutSlicesResponse.FromString,
        )
        wanted, digest = Wanted(fragment=opened.fragment, with_frozen=opened.with_frozen), new_digest()
        parts = [hosts_pb2.PutSlicesRequest(open=wire.to_proto(opened))]
        found = views(LAYOUT, memoryview(source), list(pieces), wanted)
        parts += [hosts_pb2.PutSlicesRequest(data=data) for data in messages(found, hosts.MAX_DATA_BYTES, digest)]
        parts.append(hosts_pb2.PutSlicesRequest(hash=wrong_hash or digest.finish()))

        async def sent() -> AsyncIterator[hosts_pb2.PutSlicesRequest]:
            yield parts[0]
            if after_opening is not None:
                await after_opening()
            for part in parts[1:]:
                yield part

        try:
            await method(sent())
        except grpc.RpcError as error:
            raise from_rpc_error(error, "host 0") from None

    async def take(self, number: int, session: int | None = None) -> tuple[hosts.SlicesOpen, bytes]:
        """What PUBLISH is to hold, and its bytes. Raises what the leader says of it."""
        method: Any = self._channel.unary_stream(
            hosts.TAKE_METHOD,
            request_serializer=hosts_pb2.TakeSlicesRequest.SerializeToString,
            response_deserializer=hosts_pb2.TakeSlicesResponse.FromString,
        )
        asked = hosts_pb2.TakeSlicesRequest(session=self.session if session is None else session, number=number)
        try:
            first, *parts = [part async for part in method(asked)]
        except grpc.RpcError as error:
            raise from_rpc_error(error, "host 0") from None
        data = b"".join(part.data for part in parts[:-1])
        assert parts[-1].hash == new_digest().data(data).finish()
        return wire.from_proto(hosts.SlicesOpen, first.open), data

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


class FakeLauncher:
    """In the place of a follower's: a test is the ranks."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[tuple[int, str, Meeting | None]] = asyncio.Queue()
        self.stopped: asyncio.Queue[None] = asyncio.Queue()
        self.error: AtollError | None = None

    async def start(self, generation: int, socket_path: str, meeting: Meeting | None = None) -> None:
        if self.error is not None:
            raise self.error
        self.started.put_nowait((generation, socket_path, meeting))

    async def stop(self) -> None:
        self.stopped.put_nowait(None)

    async def wait(self, limit_s: float) -> bool:
        return limit_s > 0


class Following:
    """A follower that runs, without processes."""

    def __init__(self, address: str, folder: Path, stack: AsyncExitStack, **config: Any) -> None:
        values: dict[str, Any] = {"home": folder / "host1", "data_paths": (folder / "texts",)}
        self.config = config_of(1, address, **values | config)
        self.follower = Follower(self.config, stack)
        self.launcher = FakeLauncher()
        self.follower._launcher = self.launcher  # type: ignore[assignment]
        self.task: asyncio.Task[tuple[int, str]] = asyncio.create_task(self.follower.run())

    async def starts_ranks(self, generation: int) -> str:
        """The path of the socket at which these find it."""
        started, path, meeting = await self.launcher.started.get()
        assert (started, meeting) == (generation, MEETING)
        return path


@asynccontextmanager
async def following(address: str, folder: Path, **config: Any) -> AsyncIterator[Following]:
    async with AsyncExitStack() as stack:
        host = Following(address, folder, stack, **config)
        try:
            yield host
        finally:
            await end([host.task])


class Rank:
    """One end of a local socket. It does not map buffers."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, rank: int, generation: int
    ) -> None:
        self._reader, self._writer = reader, writer
        self._rank, self._generation = rank, generation

    @classmethod
    async def connect(cls, path: str, rank: int, generation: int) -> Rank:
        reader, writer = await asyncio.open_unix_connection(path)
        return cls(reader, writer, rank=rank, generation=generation)

    async def says(self, said: local.Said) -> None:
        self._writer.write(local.encode_frame(local.pack(self._generation, self._rank, said)))
        await self._writer.drain()

    async def says_hello(self) -> None:
        await self.says(local.LocalHello(world_size=2, pid=7, protocol_version=PROTOCOL_VERSION))

    async def hears(self) -> local_pb2.LocalResponse | None:
        """None at the end of the stream."""
        try:
            size = local.frame_size(await self._reader.readexactly(local.LENGTH_BYTES))
            return local.decode(local_pb2.LocalResponse, await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return None

    async def is_greeted(self) -> Greeting:
        await self.says_hello()
        response = await self.hears()
        assert response is not None
        return wire.from_proto(Greeting, response.greeting)

    def close(self) -> None:
        self._writer.close()
