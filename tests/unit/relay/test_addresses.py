"""A relay that leads to one of several coordinators, of which a machine may be lost; and descriptors that run out."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from functools import partial

import pytest

from atoll.node.relay import accepting, greeting, outgoing, server
from atoll.node.relay.forwarders import Forwarder
from atoll.node.relay.server import RelayServer
from atoll.protocol.addresses import HERE, Relayed
from atoll.protocol.machine import REAL
from atoll.protocol.trust.names import Kind
from tests.harness.relaying import LIMIT_S, echoed, echoing, relaying, site, until
from tests.harness.sockets import free_address


@pytest.fixture(autouse=True)
def _however_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a coordinator that says nothing waits until the test has looked."""
    monkeypatch.setattr(greeting, "HANDSHAKE_LIMIT_S", 600.0)


@contextmanager
def lost() -> Iterator[str]:
    """The address of a machine that is lost: nobody says no, and nobody says yes."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        waiting = []
        try:
            for _ in range(8):  # its queue takes no more then: the kernel drops what comes
                waiting.append(socket.socket())
                waiting[-1].setblocking(False)
                waiting[-1].connect_ex(address)
            yield f"127.0.0.1:{address[1]}"
        finally:
            for connection in waiting:
                connection.close()


@contextmanager
def stopped() -> Iterator[str]:
    """The address of a process that is stopped: its kernel takes connections, and nobody reads what comes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@asynccontextmanager
async def ending() -> AsyncIterator[str]:
    """The address of one that ends each connection as it comes."""

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(end, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def test_who_expects_the_coordinator_is_led_to_the_one_that_lives_though_others_are_lost_or_stopped() -> None:
    async def main() -> None:
        name = site("a").towards(Kind.COORDINATOR).expected.encode()
        hello = b"\x16\x03\x01" + (len(name)).to_bytes(2, "big") + name
        with lost() as gone, stopped() as hangs:
            async with echoing() as port, ending() as refuses, relaying() as relay:
                relay._coordinators = lambda: [gone, free_address(), hangs, refuses, port]
                with await outgoing.connect(outgoing.Route(relay.address)) as connection:
                    assert await echoed(connection, hello) == hello, "said once"
                    assert await echoed(connection, b"and what comes behind") == b"and what comes behind"
                    (splice,) = relay.to_coordinator
                await until(lambda: not splice.is_open)

    asyncio.run(main())


def is_led(relay: RelayServer, num: int) -> bool:
    return relay._num_led == num


def test_a_crowd_that_waits_for_a_coordinator_makes_no_room_for_strangers_and_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 1)
    monkeypatch.setattr(server, "MAX_TO_COORDINATOR", 3)

    async def main() -> None:
        name = site("a").towards(Kind.COORDINATOR).expected.encode()
        hello = b"\x16\x03\x01" + (len(name)).to_bytes(2, "big") + name
        loop = asyncio.get_running_loop()
        with stopped() as hangs, ExitStack() as stack:
            async with relaying(coordinator=hangs) as relay:
                for num in range(1, 4):
                    connection = stack.enter_context(await outgoing.connect(outgoing.Route(relay.address)))
                    await loop.sock_sendall(connection, hello)
                    await until(partial(is_led, relay, num))
                connection = stack.enter_context(await outgoing.connect(outgoing.Route(relay.address)))
                with pytest.raises(ConnectionResetError):
                    await echoed(connection, hello)
                assert relay._num_led == 3

    asyncio.run(main())


def test_the_error_is_that_of_the_last_address_and_what_is_silent_is_given_up() -> None:
    async def main() -> None:
        with pytest.raises(ConnectionRefusedError):
            await outgoing.connect_first([free_address(), free_address()], b"")
        with lost() as gone:
            trying = asyncio.create_task(outgoing.connect_first([gone, gone], b""))
            await asyncio.wait((trying,), timeout=2 * outgoing.NEXT_AFTER_S)
            trying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await trying
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_socket_towards_a_relay_outlives_a_moment_without_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepting, "ACCEPT_AGAIN_S", 0.0)
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        loop, num_left = asyncio.get_running_loop(), 3
        accept = socket.socket.accept

        def accepts(listening: socket.socket) -> tuple[socket.socket, object]:
            nonlocal num_left
            num_left -= 1
            if num_left >= 0:
                raise OSError(errno.EMFILE, "Too many open files")
            return accept(listening)

        monkeypatch.setattr(socket.socket, "accept", accepts)
        forwarder = Forwarder(site("a"), Relayed("b", free_address()), REAL, lambda relay: None)
        running = asyncio.create_task(forwarder.run())
        with closing(socket.socket(socket.AF_UNIX)) as calling:
            calling.setblocking(False)
            await loop.sock_connect(calling, "\0" + forwarder.address.removeprefix(HERE))
            async with asyncio.timeout(LIMIT_S):
                assert await loop.sock_recv(calling, 1) == b"", "it was taken, and there is no relay"
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert [text for text in caplog.messages if "no connection is taken" in text] == [
        "no connection is taken: Too many open files"
    ]
