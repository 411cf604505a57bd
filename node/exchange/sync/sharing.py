"""Payloads between the hosts of a site: each collects those of its own chunks, and passes them on to the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from atoll.node.exchange.peers.frames import FRAME_BYTES, Encoded, batches, pack_frames, parse
from atoll.node.exchange.peers.jobs import take_chunks
from atoll.node.exchange.sync.exchange import Exchange
from atoll.node.exchange.sync.upstream import MAX_BATCH_CHUNKS
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.v1 import peer_pb2

Wanted = Callable[[int], bool]


async def give(exchange: Exchange, wanted: Wanted, write: Callable[[bytes], Awaitable[None]]) -> None:
    """The payloads of the chunks that are wanted, as they come, until all of them are given. They are read from the
    log, so that nothing is held for whoever is slow.

    Raises StaleError when the attempt is over.
    """
    attempt, collection = exchange.attempt, exchange.collection
    data = attempt.data

    def size(chunk: int) -> int:
        return data.payload_bytes(chunk, attempt.num_contributors)

    def frames(batch: list[int]) -> list[bytes]:
        items = [Encoded(chunk, collection.file.read(chunk), collection.file.hash_of(chunk) or b"") for chunk in batch]
        return list(pack_frames(items, wrapped=False))

    num_left, num_seen = sum(map(wanted, data.chunks)), 0
    while num_left:
        fresh = await collection.arrived(num_seen)
        num_seen += len(fresh)
        due = [chunk for chunk in fresh if wanted(chunk)]
        num_left -= len(due)
        for batch in batches(due, size, FRAME_BYTES, MAX_BATCH_CHUNKS):
            for frame in await attempt.in_pool(lambda batch=batch: frames(batch)):  # type: ignore[misc]
                await write(frame)


async def take(exchange: Exchange, wanted: Wanted, read: Callable[[], Awaitable[bytes | None]], who: str) -> None:
    """Until `read` gives None: into the log. Raises InvalidMessage for what is no payload of a chunk that is wanted."""
    attempt, collection = exchange.attempt, exchange.collection

    async def parts() -> Sequence[peer_pb2.Part] | None:
        data = await read()
        return None if data is None else parse(peer_pb2.FetchPayloadsResponse, data).parts

    def expect(chunk: int) -> int:
        if not attempt.data.layout.travels(chunk, attempt.plan.fragment) or not wanted(chunk):
            raise InvalidMessage(f"{who} gives the payload of chunk {chunk}, which is not its own")
        return attempt.data.payload_bytes(chunk, attempt.num_contributors)

    async def keep(items: list[Encoded]) -> None:
        await collection.store(items)

    await collection.arrived(0, or_open=True)
    await take_chunks(parts, expect, keep)
