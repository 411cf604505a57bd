"""Two sockets joined: bytes, ends, resets and slowness are passed on."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from atoll.node.relay import splice
from atoll.node.relay.splice import Splice

MIB = 1 << 20
LIMIT_S = 60.0


def descriptors() -> set[tuple[str, str]]:
    """Open ones, and what they are of. Those of other tests may be closed meanwhile by threads of libraries."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the folder itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    for connection in (one, other):
        connection.setblocking(False)
    return one, other


def unix_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for connection in pair:
        connection.setblocking(False)
    return pair


class Joined:
    def __init__(self, pairs: Callable[[], tuple[socket.socket, socket.socket]] = tcp_pair) -> None:
        self.near, one = pairs()
        other, self.far = tcp_pair()
        self.moved: list[int] = []
        self.ended = asyncio.Event()
        self.splice = Splice(one, other, moved=self.moved.append, ended=self.ended.set)

    def close(self) -> None:
        self.near.close()
        self.far.close()
        self.splice.abort()


def played(play: Callable[[Joined, asyncio.AbstractEventLoop], Awaitable[None]], *pairs: Callable[..., object]) -> None:
    async def main() -> None:
        before = descriptors()
        joined = Joined(*pairs)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(LIMIT_S):
                await play(joined, asyncio.get_running_loop())
        finally:
            joined.close()
        assert joined.ended.is_set()
        assert descriptors() <= before, "no descriptor is left"

    asyncio.run(main())


async def read_all(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bytes:
    parts = []
    while data := await loop.sock_recv(connection, MIB):
        parts.append(data)
    return b"".join(parts)


@pytest.mark.parametrize("pairs", [tcp_pair, unix_pair])
def test_both_ways_at_once_and_each_end_by_itself(pairs: Callable[..., object]) -> None:
    there, back = os.urandom(5 * MIB), os.urandom(3 * MIB)

    async def play(joined: Joined, loop: asyncio.AbstractEventLoop) -> None:
        async def say(connection: socket.socket, data: bytes) -> None:
            await loop.sock_sendall(connection, data)
            connection.shutdown(socket.SHUT_WR)

        _, arrived = await asyncio.gather(say(joined.near, there), read_all(loop, joined.far))
        assert arrived == there
        assert not joined.ended.is_set(), "the other direction goes on"
        _, arrived = await asyncio.gather(say(joined.far, back), read_all(loop, joined.near))
        assert arrived == back
        await joined.ended.wait()
        assert sum(joined.moved) == len(there) + len(back)

    played(play, pairs)


def test_who_reads_nothing_holds_up_the_writer_and_nobody_else() -> None:
    async def play(joined: Joined, loop: asyncio.AbstractEventLoop) -> None:
        saying = loop.create_task(loop.sock_sendall(joined.near, bytes(64 * MIB)))
        await loop.sock_sendall(joined.far, b"still here")
        assert await loop.sock_recv(joined.near, 100) == b"still here"
        assert not saying.done(), "what waits on the way is bounded"
        assert sum(joined.moved) < 32 * MIB
        taking = loop.create_task(read_all(loop, joined.far))
        await saying
        joined.near.shutdown(socket.SHUT_WR)
        assert len(await taking) == 64 * MIB

    played(play)


def test_a_reset_is_passed_on() -> None:
    async def play(joined: Joined, loop: asyncio.AbstractEventLoop) -> None:
        joined.near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, splice.RESET)
        joined.near.close()
        with pytest.raises(ConnectionResetError):
            await loop.sock_recv(joined.far, 100)
        await joined.ended.wait()

    played(play)


def test_ended_amid_bytes_both_sides_see_a_reset() -> None:
    async def play(joined: Joined, loop: asyncio.AbstractEventLoop) -> None:
        joined.splice.abort()
        for connection in (joined.near, joined.far):
            with pytest.raises(ConnectionResetError):
                await loop.sock_recv(connection, 100)

    played(play)


def test_who_is_told_of_bytes_may_end_it() -> None:
    """As at the end of a quota."""

    async def play(joined: Joined, loop: asyncio.AbstractEventLoop) -> None:
        joined.splice._moved = lambda num_bytes: joined.splice.abort()
        await loop.sock_sendall(joined.near, b"x")
        with pytest.raises(ConnectionResetError):
            await loop.sock_recv(joined.near, 100)

    played(play)


def test_without_descriptors_there_is_an_error_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        made, pipes = 0, os.pipe2

        def second_fails(flags: int) -> tuple[int, int]:
            nonlocal made
            made += 1
            if made == 2:
                raise OSError(24, "Too many open files")
            return pipes(flags)

        before = descriptors()
        (near, one), (other, far) = tcp_pair(), tcp_pair()
        ended = asyncio.Event()
        monkeypatch.setattr(os, "pipe2", second_fails)
        with pytest.raises(OSError, match="Too many"):
            Splice(one, other, ended=ended.set)
        near.close()
        far.close()
        assert not ended.is_set()
        assert descriptors() <= before

    asyncio.run(main())
