"""The coordinator's port: who gets in, who is turned away, and that a run goes on beside a flood."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest

from atoll.coordinator import limits
from atoll.coordinator.door_counts import Turned
from atoll.coordinator.front_door import FrontDoor, listen
from atoll.coordinator.service import CoordinatorServer
from atoll.protocol import accepting, transport
from atoll.protocol.addresses import parse_address
from atoll.protocol.errors import HostError, PeerError
from atoll.protocol.pace import Pace
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.v1 import session_pb2, session_pb2_grpc
from tests.harness import floods
from tests.harness.chaos import WORKER, settings
from tests.harness.local_run import LocalRun
from tests.harness.secured_coordinator import invited, secured

LIMIT_S = 60.0
RUN_LIMIT_S = 100.0
HELLO = b"\x16 hello"
HERE, THERE = "127.0.0.1", "127.0.0.2"

pytestmark = pytest.mark.timeout(150)


@dataclass
class Behind:
    """In place of gRPC: says back what it hears, but for those that are to be deaf."""

    door: FrontDoor
    port: int = 0
    peers: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    may_read: asyncio.Event = field(default_factory=asyncio.Event)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.peers.put_nowait("unix-abstract:" + writer.get_extra_info("peername")[1:].decode())
        await self.may_read.wait()
        with contextlib.suppress(ConnectionError):
            await self._echo(reader, writer)

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write(b"end")
        writer.close()

    async def connect(
        self, source: str = HERE, say: bytes = HELLO
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(HERE, self.port, local_addr=(source, 0))
        self.writers.append(writer)
        writer.write(say)
        return reader, writer

    async def is_in(self, source: str = HERE) -> bool:
        reader, _ = await self.connect(source)
        return await heard(reader, len(HELLO)) == HELLO


async def heard(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    """So many bytes, or those before the end."""
    try:
        return await reader.readexactly(num_bytes)
    except asyncio.IncompleteReadError as error:
        return error.partial
    except ConnectionError:
        return b""


@contextlib.asynccontextmanager
async def a_door(per_address: int = 2, in_all: int = 100) -> AsyncIterator[Behind]:
    door = FrontDoor(os.urandom(8).hex(), per_address=per_address, in_all=in_all)
    behind = Behind(door)
    behind.may_read.set()
    path = "\0" + door.address_behind.removeprefix("unix-abstract:")
    server = await asyncio.start_unix_server(behind.serve, path=path)
    behind.port = door.start(f"{HERE}:0")
    try:
        async with asyncio.timeout(LIMIT_S):
            yield behind
    finally:
        door.close()
        for writer in behind.writers:
            if not writer.is_closing():
                writer.transport.abort()
        server.close()
        await server.wait_closed()


def through(test: Callable[[Behind], Awaitable[None]], **bounds: int) -> None:
    async def main() -> None:
        async with a_door(**bounds) as behind:
            await test(behind)

    asyncio.run(main())


def test_an_address_at_its_bound_is_refused_and_another_one_gets_in() -> None:
    async def test(behind: Behind) -> None:
        assert [await behind.is_in() for _ in range(3)] == [True, True, False]
        assert await behind.is_in(THERE)
        assert behind.door.turned_away == {Turned.ADDRESS: 1}
        assert behind.door.num_open == 3

    through(test)


def test_whoever_shows_a_certificate_does_not_count_for_its_address() -> None:
    async def test(behind: Behind) -> None:
        for number in range(10):
            assert await behind.is_in(), number
            behind.door.is_of(await behind.peers.get(), f"site {number}")
        assert not behind.door.turned_away

    through(test)


def test_the_oldest_connection_of_a_certificate_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CONNECTIONS_OF_ONE", 2)

    async def test(behind: Behind) -> None:
        readers = []
        for _ in range(3):
            reader, _ = await behind.connect()
            assert await heard(reader, len(HELLO)) == HELLO
            readers.append(reader)
            behind.door.is_of(await behind.peers.get(), "site")
        assert await heard(readers[0], 1) == b""
        assert behind.door.turned_away == {Turned.IDENTITY: 1}
        assert behind.door.num_open == 2

    through(test, per_address=10)


def test_a_call_that_came_past_the_door_is_refused() -> None:
    async def test(behind: Behind) -> None:
        assert await behind.is_in()
        for peer in ("unix:", "ipv4:127.0.0.1:5", behind.door.address_behind, behind.door.address_behind + "-99"):
            with pytest.raises(PeerError, match="did not come by the coordinator's port"):
                behind.door.is_of(peer, "site")
        behind.door.is_of(await behind.peers.get(), "site")

    through(test)


@pytest.mark.parametrize("say", [b"", HELLO], ids=["silent", "in a handshake"])
def test_whoever_does_not_show_a_certificate_in_time_has_to_go(say: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(behind: Behind) -> None:
        reader, _ = await behind.connect(say=say)
        assert await heard(reader, len(say)) == say
        while not behind.door.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        clock = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock() + limits.HANDSHAKE_LIMIT_S)
        assert await reader.read() == b""
        assert behind.door.turned_away == {Turned.SILENT: 1}
        assert behind.door.num_open == 0

    through(test)


def test_whoever_speaks_no_tls_comes_no_further() -> None:
    async def test(behind: Behind) -> None:
        reader, _ = await behind.connect(say=b"GET / HTTP/1.1\r\n\r\n")
        assert await heard(reader, 1) == b""
        assert behind.door.turned_away == {Turned.NO_TLS: 1}
        assert behind.peers.empty()

    through(test)


def test_whoever_is_not_read_has_to_wait_and_loses_nothing() -> None:
    """The door holds a buffer of what is on its way, and no more."""
    block, most = bytes(range(256)) * 256, 64 << 20

    async def test(behind: Behind) -> None:
        behind.may_read.clear()
        reader, writer = await behind.connect()
        behind.door.is_of(await behind.peers.get(), "site")
        raw = writer.get_extra_info("socket")
        num_said = num_waits = 0
        while num_waits < 200 and num_said < most:  # the kernel's own buffers hold some megabytes
            try:
                with socket.socket(fileno=os.dup(raw.fileno())) as client:
                    num_said += client.send(block[num_said % len(block) :])
                num_waits = 0
            except BlockingIOError:
                num_waits += 1
                await asyncio.sleep(0)
        assert num_said < most, "the door takes whatever comes"
        writer.write_eof()
        behind.may_read.set()
        answer = await reader.read()
        said = HELLO + (block * (num_said // len(block) + 1))[:num_said]
        assert answer == said + b"end", "what is said after the other side has ended arrives too"

    through(test, per_address=10)


def test_an_alert_is_no_handshake_that_ended_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the door as much is said as before it: a first flight, something short, and something longer."""
    ended_well: list[int] = []
    monkeypatch.setattr(FrontDoor, "_through", lambda door, number: ended_well.append(number))

    async def test(behind: Behind) -> None:
        reader, writer = await behind.connect()
        found: list[int] = []
        for num_bytes in (300 - len(HELLO), 24, 100, 100):
            writer.write(b"\0" * num_bytes)
            await reader.readexactly(num_bytes + (len(HELLO) if not found else 0))
            found.append(len(ended_well))
        assert found == [0, 0, 1, 1]

    through(test)


def test_an_address_that_floods_is_dropped_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "MAX_TURNED_AWAY", 5)
    monkeypatch.setattr(accepting, "LOOK_EVERY_S", 3600.0)

    def connected(port: int, limit_s: float = LIMIT_S) -> socket.socket:
        """By the kernel, whoever takes it then."""
        return socket.create_connection((HERE, port), limit_s, source_address=(THERE, 0))

    async def test(behind: Behind) -> None:
        door = behind.door
        with contextlib.ExitStack() as clients:
            for num_before in range(2 + 6):
                clients.enter_context(connected(behind.port))
                while door.num_open + door.turned_away.total() == num_before:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert door.turned_away == {Turned.ADDRESS: 6}
            with pytest.raises(TimeoutError):
                connected(behind.port, 0.05)
        assert await behind.is_in(HERE)
        now = asyncio.get_running_loop().time()
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now + accepting.SHUT_S + 3600.0)
        assert door._accepting is not None
        door._accepting._look()
        connected(behind.port).close()  # it may come again after a while

    through(test)


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    async def test(behind: Behind) -> None:
        with pytest.raises(HostError, match=f"cannot listen on {HERE}:{behind.port}: another process has that port"):
            FrontDoor("another", per_address=1, in_all=1).start(f"{HERE}:{behind.port}")

    through(test)


def test_a_server_that_got_no_port_is_ended() -> None:
    """One that still runs as its loop is closed prints a traceback below the error."""

    async def main() -> None:
        server = transport.create_server(max_message_bytes=1 << 20)
        door = FrontDoor(os.urandom(8).hex(), per_address=1, in_all=1)
        credentials = grpc.local_server_credentials(grpc.LocalConnectionType.UDS)
        with socket.create_server((HERE, 0)) as taken, pytest.raises(HostError, match="cannot listen on"):
            await listen(server, f"{HERE}:{taken.getsockname()[1]}", door, credentials)
        was_running = await server.wait_for_termination(timeout=1.0)
        await server.stop(None)
        assert not was_running

    asyncio.run(main())


async def calls(server: CoordinatorServer, handshake: transport.Handshake, num: int) -> list[grpc.StatusCode]:
    """How so many calls for the status went, on one connection."""
    found = []
    channel = transport.open_channel(server.address, handshake=handshake, max_message_bytes=1 << 20)
    try:
        stub = session_pb2_grpc.CoordinatorServiceStub(channel)
        for _ in range(num):
            try:
                await stub.Status(session_pb2.StatusRequest(), timeout=LIMIT_S)
                found.append(grpc.StatusCode.OK)
            except grpc.aio.AioRpcError as error:
                found.append(error.code())
    finally:
        await channel.close()
    return found


def shows_no_certificate(address: str) -> None:
    """As far as a client without one gets."""
    context = floods.no_certificate()
    with (
        socket.create_connection(parse_address(address), LIMIT_S) as client,
        contextlib.suppress(OSError),  # an alert, or a reset behind it
        context.wrap_socket(client) as encrypted,
    ):
        encrypted.sendall(floods.STREAMS)
        assert encrypted.recv(1) == b""


def test_a_crowd_of_viewers_is_bounded_by_certificate_and_not_by_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TLS; all come from one address, which has one place for strangers."""
    monkeypatch.setattr(limits, "CALLS_OF_ONE", Pace(at_once=3, per_s=1e-6))
    through: list[int] = []
    note = FrontDoor._through

    def noted(door: FrontDoor, number: int) -> None:
        through.append(number)
        note(door, number)

    monkeypatch.setattr(FrontDoor, "_through", noted)

    async def main() -> None:
        async with secured(tmp_path, listen=f"{HERE}:0", connections_per_address=1) as server:
            viewers = [await invited(server, name, "viewer") for name in "vw"]
            ok, later = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
            assert await calls(server, viewers[0], 5) == [ok, ok, ok, later, later]
            assert await calls(server, viewers[1], 3) == [ok, ok, ok]
            assert sum((await server.document())["turned_away"].values()) == 0
            assert len(through) == len(set(through)) == 4, "two joined, and two looked"
            await asyncio.to_thread(shows_no_certificate, server.address)
            assert len(through) == 4

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["handshakes", "resets"])
def test_beside_a_flood_commits_go_on_and_sites_come_in(kind: str, tmp_path: Path) -> None:
    """From an address of its own; it takes no place of others."""
    with LocalRun(
        tmp_path, replace(settings(min_sites=2, time_limits="wan"), sync=SyncSettings(every=5)), secured=True
    ) as run:
        run.start_coordinator()
        for name in "ab":
            run.start_node(name, WORKER)
        run.wait(lambda s: s["last_commit"] >= 1, RUN_LIMIT_S)
        flood = [sys.executable, "-m", "tests.harness.floods", kind, run.address, THERE]
        attacker = run.start("attacker", flood)
        turned = run.wait(lambda s: sum(s["turned_away"].values()) > 64, RUN_LIMIT_S, "some are turned away")
        run.start_node("c", WORKER)
        run.wait(
            lambda s: s["last_commit"] > turned["last_commit"] + 2 and "c" in s["commits"][-1]["contributors"],
            RUN_LIMIT_S,
            "a site joins beside it",
        )
        assert run.status()["num_evicted"] == 0
        assert attacker.popen.poll() is None
        assert parse_address(run.address)[0] == HERE
