"""A relay that leads to one of several coordinators, of which a machine may be lost; and descriptors that run out."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from atoll.node.relay import accepting, outgoing
from atoll.node.relay.forwarders import Forwarder
from atoll.protocol.addresses import HERE, Relayed
from atoll.protocol.machine import REAL
from atoll.protocol.trust.names import Kind
from tests.harness.relaying import LIMIT_S, echoed, echoing, relaying, site
from tests.harness.sockets import free_address


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


def test_who_expects_the_coordinator_is_led_to_the_one_that_lives_though_the_machine_of_the_other_is_lost() -> None:
    async def main() -> None:
        name = site("a").towards(Kind.COORDINATOR).expected.encode()
        hello = b"\x16\x03\x01" + (len(name)).to_bytes(2, "big") + name
        with lost() as gone:
            async with echoing() as port, relaying() as relay:
                relay._coordinators = lambda: [gone, free_address(), port]
                with await outgoing.connect(outgoing.Route(relay.address)) as connection:
                    assert await echoed(connection, hello) == hello

    asyncio.run(main())


def test_the_error_is_that_of_the_last_address_and_what_is_silent_is_given_up() -> None:
    async def main() -> None:
        with pytest.raises(ConnectionRefusedError):
            await outgoing.connect_first([free_address(), free_address()])
        with lost() as gone:
            trying = asyncio.create_task(outgoing.connect_first([gone, gone]))
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
        accept = loop.sock_accept

        async def accepts(listening: socket.socket) -> tuple[socket.socket, object]:
            nonlocal num_left
            num_left -= 1
            if num_left >= 0:
                raise OSError(errno.EMFILE, "Too many open files")
            return await accept(listening)

        monkeypatch.setattr(loop, "sock_accept", accepts)
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
