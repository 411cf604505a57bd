"""One end of the stream between two hosts of a site: words in their order, and beats, so that silence is an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from atoll import __version__
from atoll.node.dataplane.slices import Filling, Items, messages, new_digest
from atoll.node.host_protocol import (
    HOSTS_VERSION,
    MAX_DATA_BYTES,
    MAX_VERSION_CHARACTERS,
    HostBeat,
    HostHello,
    HostWelcome,
)
from atoll.node.tasks import end
from atoll.protocol import descriptors
from atoll.protocol.errors import InvalidMessage, PeerError, RefusedError
from atoll.protocol.v1 import hosts_pb2

Envelope = TypeVar("Envelope", hosts_pb2.AttachRequest, hosts_pb2.AttachResponse)
Part = TypeVar("Part", hosts_pb2.PutSlicesRequest, hosts_pb2.TakeSlicesResponse, hosts_pb2.TakeFromHostResponse)

BEATS_A_LEASE = 4
CONNECTIONS_EACH = 64
"""Of another host, which needs about six. Those that a cut link has left count until keepalive notices, up to 30 s
later: a link that comes and goes leaves several of each."""
IDLE_LIMIT_S = 86_400.0
"""Of connections for slices, between two windows."""
ATOLL_VERSION = __version__[:MAX_VERSION_CHARACTERS]


def check_release(said: HostHello | HostWelcome, who: str, here: str) -> None:
    """`who` has said that. Raises RefusedError if it speaks otherwise than this host, which is called `here`."""
    if said.hosts_version == HOSTS_VERSION:
        return
    theirs = f"atoll {said.atoll_version}" if said.atoll_version else "an older atoll"
    raise RefusedError(
        f"{who} has {theirs} (version {said.hosts_version} of what hosts of a site say to each other), {here} has "
        f"atoll {ATOLL_VERSION} (version {HOSTS_VERSION}): install one release on all hosts of the site"
    )


def most_connections(num_hosts: int) -> int:
    """Of the other hosts of a site to one of them, as far as this process may have descriptors."""
    wanted = CONNECTIONS_EACH * (num_hosts - 1)
    return descriptors.for_connections(descriptors.raise_limit(), wanted, "hosts of this site")


class Outbox(Generic[Envelope]):
    """What is to be said waits here, so that hearing never waits for saying."""

    def __init__(
        self, pack: Callable[[Any], Envelope], lease_s: float, beat: Callable[[], HostBeat] = HostBeat
    ) -> None:
        self._pack: Callable[[Any], Envelope] = pack
        self._beat = beat
        self.lease_s = lease_s
        """Of the end that hears it."""
        self._queue: asyncio.Queue[Envelope] = asyncio.Queue()

    def say(self, message: Any) -> None:
        self._queue.put_nowait(self._pack(message))

    async def write_all(self, write: Callable[[Envelope], Awaitable[None]]) -> None:
        """Until it is cancelled; with a beat now and then, whatever else is said."""
        loop = asyncio.get_running_loop()
        beat_at = loop.time() + self.lease_s / BEATS_A_LEASE
        while True:
            try:
                async with asyncio.timeout_at(beat_at):
                    envelope = await self._queue.get()
            except TimeoutError:
                await write(self._pack(self._beat()))
                beat_at = loop.time() + self.lease_s / BEATS_A_LEASE
                continue
            await write(envelope)
            self._queue.task_done()

    async def flush(self, limit_s: float) -> None:
        """Until all is said, or the limit is over."""
        try:
            async with asyncio.timeout(limit_s):
                await self._queue.join()
        except TimeoutError:
            pass  # it learns from the end of the stream


async def heard(read: Callable[[], Awaitable[Any]], limit_s: float, who: str) -> Any:
    """The next message. Raises PeerError for silence and for the end of the stream."""
    try:
        async with asyncio.timeout(limit_s):
            message = await read()
    except TimeoutError:
        raise PeerError(f"{who} was silent for {limit_s:g} s") from None
    if not isinstance(message, Message):  # grpc.aio's EOF
        raise PeerError(f"{who} closed the connection")
    return message


async def while_heard(work: Awaitable[None], saying: Awaitable[None]) -> None:
    """Both, until the first ends; the error of either is raised."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(saying)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end(tasks)


async def send_slices(
    views: Iterable[Items], cls: type[Part], write: Callable[[Part], Awaitable[None]], stall_s: float, who: str
) -> None:
    """After the opening: all bytes, then their hash. Raises PeerError if a message is not taken."""
    digest = new_digest()
    try:
        for data in messages(views, MAX_DATA_BYTES, digest):
            async with asyncio.timeout(stall_s):
                await write(cls(data=data))
        async with asyncio.timeout(stall_s):
            await write(cls(hash=digest.finish()))
    except TimeoutError:
        raise PeerError(f"{who} has taken no byte of the slices for {stall_s:g} s") from None


async def receive_slices(views: Iterable[Items], read: Callable[[], Awaitable[Any]], stall_s: float, who: str) -> None:
    """After the opening: into these views. Raises InvalidMessage for what is not their bytes, PeerError for silence."""
    filling = Filling(views, MAX_DATA_BYTES)
    while True:
        part = await heard(read, stall_s, who)
        match part.WhichOneof("body"):
            case "data":
                filling.take(part.data)
            case "hash":
                return filling.finish(part.hash)
            case _:
                raise InvalidMessage(f"{who} sends no slices where slices are due")
