"""A relay in the event loop of a test, and sites of its run that attach and call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from atoll.node.relay import outgoing
from atoll.node.relay.attached import Attached
from atoll.node.relay.client import RelayClient
from atoll.node.relay.outgoing import Route
from atoll.node.relay.quota import Quotas
from atoll.node.relay.server import RelayServer
from atoll.protocol.machine import REAL, Machine
from atoll.protocol.trust.names import Kind
from atoll.protocol.trust.security import MutualTls
from tests.unit.trust.test_security import NOW_S, tls

LIMIT_S = 60.0


def site(name: str, signed_s: float = NOW_S) -> MutualTls:
    return tls(Kind.SITE, name, signed_s=signed_s)


@asynccontextmanager
async def relaying(
    bytes_a_day: int = 0,
    *,
    idle_limit_s: float = 60.0,
    max_pairs: int = 99,
    machine: Machine = REAL,
    coordinator: str = "127.0.0.1:9",
    address: str = "127.0.0.1:0",
) -> AsyncIterator[RelayServer]:
    server = RelayServer(
        "run",
        tls(Kind.RELAY),
        Quotas(bytes_a_day),
        machine,
        coordinators=lambda: [coordinator],
        max_pairs=max_pairs,
        idle_limit_s=idle_limit_s,
    )
    await server.start(address)
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def echoing() -> AsyncIterator[str]:
    """The port of a site: it says again what it hears."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # it was cut off
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@contextmanager
def attached(name: str, relay: str, to: str, start: int = 1) -> Iterator[Attached]:
    client = RelayClient(site(name))
    try:
        yield client.attach(relay, start, to)
    finally:
        client.close()


async def called(caller: str, relay: str, name: str) -> socket.socket:
    return await outgoing.called(site(caller), Route(relay), name)


async def until(condition: Callable[[], bool]) -> None:
    """Of what other threads and tasks do: it is looked at again and again."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def until_attached(server: RelayServer, *names: str) -> None:
    await until(lambda: set(server.pairing.attached) == set(names))


async def echoed(connection: socket.socket, data: bytes) -> bytes:
    """As much as was said, or what there is until the end."""
    loop, heard = asyncio.get_running_loop(), b""
    async with asyncio.timeout(LIMIT_S):
        await loop.sock_sendall(connection, data)
        while len(heard) < len(data) and (some := await loop.sock_recv(connection, 1 << 16)):
            heard += some
    return heard
