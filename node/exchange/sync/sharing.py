"""Payloads between the hosts of a site: each collects those of its own chunks, and passes them on to the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from atoll.node.dataplane.payload_file import PayloadFile
from atoll.node.exchange.peers.frames import FRAME_BYTES, Encoded, batches, pack_frames, parse
from atoll.node.exchange.peers.jobs import take_chunks
from atoll.node.exchange.sync.exchange import Exchange
from atoll.node.exchange.sync.upstream import MAX_BATCH_CHUNKS
from atoll.protocol.errors import DigestMismatch, InvalidMessage
from atoll.protocol.layout import DTYPE_BYTES, Layout
from atoll.protocol.messages import Commit
from atoll.protocol.plans import payload_hash
from atoll.protocol.spec import max_payload_bytes
from atoll.protocol.threads import run_to_its_end
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

    num_left, num_seen = sum(map(wanted, data.chunks)), 0
    while num_left:
        fresh = await collection.arrived(num_seen)
        num_seen += len(fresh)
        due = [chunk for chunk in fresh if wanted(chunk)]
        num_left -= len(due)
        for batch in batches(due, size, FRAME_BYTES, MAX_BATCH_CHUNKS):
            await _write(collection.file, batch, attempt.pool, write)


async def give_file(file: PayloadFile, pool: Executor, write: Callable[[bytes], Awaitable[None]]) -> None:
    """All payloads of an attempt that is over. Raises StateError if some are not here."""
    for batch in batches(list(file.chunks), file.size_of, FRAME_BYTES, MAX_BATCH_CHUNKS):
        await _write(file, batch, pool, write)


async def _write(
    file: PayloadFile, batch: list[int], pool: Executor, write: Callable[[bytes], Awaitable[None]]
) -> None:
    def frames() -> list[bytes]:
        items = [Encoded(chunk, file.read(chunk), file.hash_of(chunk) or b"") for chunk in batch]
        return list(pack_frames(items, wrapped=False))

    for frame in await run_to_its_end(frames, pool):
        await write(frame)


async def take(exchange: Exchange, wanted: Wanted, read: Callable[[], Awaitable[bytes | None]], who: str) -> None:
    """Until `read` gives None: into the log. Raises InvalidMessage for what is no payload of a chunk that is wanted."""
    attempt, collection = exchange.attempt, exchange.collection

    def expect(chunk: int) -> int:
        if not attempt.data.layout.travels(chunk, attempt.plan.fragment) or not wanted(chunk):
            raise InvalidMessage(f"{who} gives the payload of chunk {chunk}, which is not its own")
        return attempt.data.payload_bytes(chunk, attempt.num_contributors)

    async def keep(items: list[Encoded]) -> None:
        await collection.store(items)

    await collection.arrived(0, or_open=True)
    await take_chunks(partial(_parts, read), expect, keep)


async def take_file(
    file: PayloadFile, commit: Commit, layout: Layout, pool: Executor, read: Callable[[], Awaitable[bytes | None]]
) -> None:
    """The payloads of a commit, until `read` gives None; the file is sealed then. Raises InvalidMessage for what is no
    payload of it, StateError if some did not come."""

    def expect(chunk: int) -> int:
        if not layout.travels(chunk, commit.fragment):
            raise InvalidMessage(f"chunk {chunk} has no payload in commit {commit.commit}")
        spec = layout.chunks[chunk]
        itemsize = DTYPE_BYTES[layout.wire_dtype(spec)]
        return max_payload_bytes(spec.role, spec.num_elements, itemsize, len(commit.contributors))

    async def keep(items: list[Encoded]) -> None:
        def store() -> None:
            for item in items:
                if payload_hash(item.data) != item.hash:
                    raise DigestMismatch(f"the payload of chunk {item.chunk} does not have its hash")
                file.put(item.chunk, item.data, item.hash)

        await run_to_its_end(store, pool)

    await take_chunks(partial(_parts, read), expect, keep)
    await run_to_its_end(file.seal, pool)


async def _parts(read: Callable[[], Awaitable[bytes | None]]) -> Sequence[peer_pb2.Part] | None:
    data = await read()
    return None if data is None else parse(peer_pb2.FetchPayloadsResponse, data).parts
