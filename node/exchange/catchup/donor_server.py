"""The donor's side of catching up: chunks of the outer state and payloads of commits, in bounded frames.

A joiner must not stop the others: few requests are served at once, after the exchange of a sync (`Uplink`), and all
reading of the disk is done in threads.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

from atoll.node.dataplane.kept_contributions import KeptContributions
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.exchange.catchup.donor_client import DonorClient
from atoll.node.exchange.peers.counters import Counters
from atoll.node.exchange.peers.errors_given import Given
from atoll.node.exchange.peers.frames import FRAME_BYTES, MIN_FRAME_BYTES, Encoded, batches, pack_frames, slices
from atoll.node.exchange.peers.progress import Pace, Progress
from atoll.node.exchange.peers.rpc import NotRead, check_header, write_within
from atoll.node.exchange.peers.uplink import Uplink
from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.errors import InvalidMessage, NotYetError, PeerError, StateError
from atoll.protocol.layout import Layout
from atoll.protocol.messages import Header
from atoll.protocol.plans import payload_hash
from atoll.protocol.v1 import peer_pb2

Request = peer_pb2.FetchStateRequest | peer_pb2.FetchPayloadsRequest

MAX_REQUESTS = 6
"""Served at once; more are told to come again, unless one of them has had its turn."""
MAX_REQUESTS_OF_SITE = 3
"""Of these, so that no site keeps the others out: two batches, and a hash list that a batch turns out to need."""
TURN_STALLS = 6.0
"""For so long a request has its place whoever else comes. A chunk of the largest size takes less where six requests
share a link of one megabyte a second; what was left of a batch is asked for again."""
MAX_REMEMBERED = 4096
"""Sites, and when each was served last."""
MAX_CHUNKS = 4096
"""Of one request."""
MAX_HASH_LISTS = 16
"""Of one request."""
TURNS_PER_STALL = 4
"""A frame waits at most for this part of the stall limit until exchanges let it go: whoever catches up sees some bytes
in time, and at such a pace enough of them (see progress.py)."""


@dataclass(slots=True, eq=False)
class _Place:
    """One request that is served."""

    site_id: int
    task: asyncio.Task[object]
    began_at: float


@dataclass(eq=False, kw_only=True)
class DonorServer:
    identity: Callable[[], Header]
    """Of this start of the site."""
    layout: Layout
    outer: Callable[[], OuterState | None]
    """None while this node has no outer state."""
    log: PayloadLog
    pool: Executor
    counters: Counters
    pace: Pace
    uplink: Uplink
    kept: KeptContributions | None = None
    """In a run with audits."""
    elsewhere: Callable[[int], DonorClient | None] = lambda chunk: None
    """The same, at a site of several hosts: the one that keeps the contributions to that chunk; None: this one. It may
    raise NotYetError."""
    added: Callable[[AttemptKey, int], Given] | None = None
    """In the same, with error feedback of averages."""
    places: list[_Place] = field(default_factory=list, init=False)
    """Of the requests that are served."""
    _auditing: set[int] = field(default_factory=set, init=False)  # sites that are given an error
    _served_at: OrderedDict[int, float] = field(default_factory=OrderedDict, init=False)  # by site, the last at the end
    _cut_off: set[asyncio.Task[object]] = field(default_factory=set, init=False)  # to make room for others

    async def state(self, request: peer_pb2.FetchStateRequest) -> AsyncGenerator[bytes]:
        """Frames of hash lists, then of chunks. Lists that are not held are left out.

        Raises InvalidMessage, RefusedError; NotYetError if too many ask at once; StateError for a chunk without a
        valid record here.
        """
        check_header(request.header, self.identity().run_id)
        chunks = self._checked(request.chunks, len(self.layout.chunks))
        if len(request.hashes_of) > MAX_HASH_LISTS:
            raise InvalidMessage(f"{len(request.hashes_of)} hash lists asked for, at most {MAX_HASH_LISTS} are given")
        outer = self.outer()
        if outer is None:
            raise StateError("no outer state is here yet")
        hashes_per_frame = self._frame_bytes // DIGEST_BYTES - 16
        with self._admitted(request.header.site_id):
            for commit in request.hashes_of:
                hashes = await asyncio.get_running_loop().run_in_executor(self.pool, outer.chunk_hashes, commit)
                for first in range(0, len(hashes or ()), hashes_per_frame):
                    some = b"".join((hashes or [])[first : first + hashes_per_frame])
                    listed = peer_pb2.HashList(commit=commit, first_chunk=first, hashes=some)
                    frame = peer_pb2.FetchStateResponse(hash_lists=[listed]).SerializeToString()
                    async with self._turn(frame):
                        yield frame
            for group in self._groups(chunks):
                for frame in await self._in_pool(partial(_state_frames, outer, group, self._frame_bytes)):
                    async with self._turn(frame):
                        yield frame

    async def payloads(self, request: peer_pb2.FetchPayloadsRequest) -> AsyncGenerator[bytes]:
        """Frames of the payloads of a commit. Raises as `state` does; StateError if the log does not hold it."""
        check_header(request.header, self.identity().run_id)
        chunks: Sequence[int] = self._checked(request.chunks, self.layout.num_sync_chunks)
        if request.of_term:
            async for frame in self._error(request, chunks):
                yield frame
            return
        if request.of_sync:
            async for frame in self._contributions(request, chunks):
                yield frame
            return
        # In a thread: a commit has the log's lock while it is written.
        record = await asyncio.get_running_loop().run_in_executor(self.pool, self.log.record, request.commit)
        chunks = chunks or self.layout.chunks_of(record.fragment)

        def read(some: list[int]) -> list[bytes]:
            items = []
            for chunk in some:
                data = self.log.read(request.commit, chunk)
                items.append(Encoded(chunk, data, payload_hash(data)))
            return list(pack_frames(items, self._frame_bytes, wrapped=False))

        with self._admitted(request.header.site_id):
            for group in self._groups(chunks):
                for frame in await self._in_pool(lambda group=group: read(group)):  # type: ignore[misc]
                    async with self._turn(frame):
                        yield frame

    async def _contributions(
        self, request: peer_pb2.FetchPayloadsRequest, chunks: Sequence[int]
    ) -> AsyncGenerator[bytes]:
        """Frames of what this site contributed to the sync. Raises InvalidMessage if no start is named; StateError if
        it is not kept here, or was another start's; NotYetError while the host that keeps it does not give it."""
        sync, site_id, start = request.of_sync, request.header.site_id, self.identity().incarnation
        if request.for_site_id and site_id == self.identity().site_id:  # passed on by host 0
            site_id = request.for_site_id
        if not request.of_incarnation:
            raise InvalidMessage(
                f"sync {sync}: of which start is not said; by another's root this one would be refuted"
            )
        if request.of_incarnation != start:
            raise StateError(f"sync {sync}: start {request.of_incarnation} of this site is over, this is {start}")
        if self.kept is not None and chunks and (host := self.elsewhere(chunks[0])) is not None:
            try:
                with self._admitted(site_id):
                    async with aclosing(host.passed_on(request)) as frames:
                        async for frame in frames:
                            async with self._turn(frame):
                                yield frame
            except PeerError as error:
                raise NotYetError(str(error)) from None
            return
        kept = self.kept.of(sync) if self.kept is not None else None
        if kept is None or not chunks:
            raise StateError(f"what this site contributed to sync {sync} is not kept here")

        def read(chunk: int) -> list[bytes]:
            data = kept.read(chunk)
            item = Encoded(chunk, data, payload_hash(data), proof=kept.proof(chunk))
            return list(pack_frames([item], self._frame_bytes, wrapped=False))

        with self._admitted(site_id):
            for chunk in chunks:
                for frame in await self._in_pool(partial(read, chunk)):
                    async with self._turn(frame):
                        yield frame

    async def _error(self, request: peer_pb2.FetchPayloadsRequest, chunks: Sequence[int]) -> AsyncGenerator[bytes]:
        """Frames of what this site added, as a reducer, to its average of one chunk, and what says so. Other requests
        are not in its way: a reducer that gives no error may be judged. Raises StateError if it is not here."""
        added, site_id = self.added, request.header.site_id
        if added is None or len(chunks) != 1:
            raise StateError("what this site added to its averages is not kept here")
        if site_id in self._auditing:
            raise NotYetError(f"site {site_id} is given an error here already; ask again")
        attempt, chunk = AttemptKey(request.of_sync, request.of_term, request.of_attempt), chunks[0]

        def read() -> list[bytes]:
            given = added(attempt, chunk)
            error = peer_pb2.ErrorGiven(
                before_hash=given.before_hash,
                before_proof=given.before_proof,
                after_hash=given.after_hash,
                after_proof=given.after_proof,
                earlier_proof=given.earlier_proof,
            )
            first = peer_pb2.FetchPayloadsResponse(error=error).SerializeToString()
            items = [Encoded(chunk, given.error, given.before_hash)] if given.error else []
            return [first, *pack_frames(items, self._frame_bytes, wrapped=False)]

        self._auditing.add(site_id)
        try:
            for frame in await self._in_pool(read):
                async with self._turn(frame):
                    yield frame
        finally:
            self._auditing.discard(site_id)

    def _checked(self, chunks: Sequence[int], limit: int) -> list[int]:
        if len(chunks) > MAX_CHUNKS:
            raise InvalidMessage(f"{len(chunks)} chunks asked for, at most {MAX_CHUNKS} are given at once")
        for chunk in chunks:
            if chunk >= limit:
                raise InvalidMessage(f"chunk {chunk} is asked for, there are {limit}")
        return [chunk for chunk in chunks if self.layout.chunks[chunk].num_elements]

    @property
    def _frame_bytes(self) -> int:
        """Within a cap small: then the frames of all that are served pass in the time of one large frame."""
        return FRAME_BYTES if self.uplink.cap is None else MIN_FRAME_BYTES

    def _groups(self, chunks: Sequence[int]) -> Iterator[list[int]]:
        """Chunks that are read together: small ones, or one large one."""
        return batches(chunks, lambda chunk: self.layout.chunks[chunk].num_bytes, FRAME_BYTES // 2, MAX_CHUNKS)

    @contextmanager
    def _admitted(self, site_id: int) -> Iterator[None]:
        num_own = sum(place.site_id == site_id for place in self.places)
        now = asyncio.get_running_loop().time()
        if num_own >= MAX_REQUESTS_OF_SITE or not self._has_room(site_id, now):
            raise NotYetError(
                f"{len(self.places)} requests are served here already, {num_own} of them of site "
                f"{site_id}; ask again, or another site"
            )
        task = asyncio.current_task()
        assert task is not None
        place = _Place(site_id, task, began_at=now)
        self.places.append(place)
        try:
            yield
        finally:
            self.places.remove(place)
            self._served_at.pop(site_id, None)
            self._served_at[site_id] = asyncio.get_running_loop().time()
            if len(self._served_at) > MAX_REMEMBERED:
                self._served_at.popitem(last=False)

    def _has_room(self, site_id: int, now: float) -> bool:
        """The request that has had its place for longest, and for a turn, gives way to a site that was not served
        since it came."""
        held = [place for place in self.places if place.task not in self._cut_off]
        if len(held) < MAX_REQUESTS:
            return True
        turn_s = TURN_STALLS * self.pace.stall_s
        first = min(held, key=lambda place: place.began_at, default=None)
        if first is None or first.began_at + turn_s > now or self._served_at.get(site_id, 0.0) > first.began_at:
            return False
        self._cut_off.add(first.task)
        first.task.add_done_callback(self._cut_off.discard)
        first.task.cancel()
        return True

    async def give(self, request: Request, write: Callable[[bytes], Awaitable[None]], who: str) -> None:
        """Writes the frames of `state` or `payloads` as fast as the other side takes them, and raises as they do.

        Raises NotRead if it hardly does, or not at all, or if it has had its turn: it has a place that others wait for.
        """
        frames = self.state(request) if isinstance(request, peer_pb2.FetchStateRequest) else self.payloads(request)
        async with aclosing(frames):  # its place is free again
            await self._write(frames, write, who)

    async def _write(self, frames: AsyncIterator[bytes], write: Callable[[bytes], Awaitable[None]], who: str) -> None:
        loop = asyncio.get_running_loop()
        waited_s = 0.0  # in writes: the time to read from the disk is not the other side's
        progress = Progress(self.pace, waited_s, share=MAX_REQUESTS)
        task = asyncio.current_task()
        try:
            async for frame in frames:
                began = loop.time()
                await write_within(self.pace.stall_s, write, frame, who)
                waited_s += loop.time() - began
                progress.moved(len(frame), waited_s)
                problem = progress.problem(waited_s)
                if problem:
                    raise NotRead(f"{who} is too slow in taking what it asked for: {problem}")
        except asyncio.CancelledError:
            if task is None or task not in self._cut_off:
                raise
            self._cut_off.discard(task)
            task.uncancel()
            raise NotRead(f"{who} has had its turn, and others wait for its place") from None

    def _in_pool(self, work: Callable[[], list[bytes]]) -> asyncio.Future[list[bytes]]:
        return asyncio.get_running_loop().run_in_executor(self.pool, work)

    @asynccontextmanager
    async def _turn(self, frame: bytes) -> AsyncGenerator[None]:
        """Around handing out one frame; it ends when the next one is asked for, so when this one is written."""
        async with self.uplink.give(len(frame), self.pace.stall_s / TURNS_PER_STALL):
            self.counters.sent_bytes += len(frame)
            yield


def _state_frames(outer: OuterState, chunks: list[int], frame_bytes: int) -> list[bytes]:
    records = ((chunk, outer.read(chunk)) for chunk in chunks)
    items = (Encoded(chunk, record.data, b"", record.version) for chunk, record in records)
    frames = []
    for parts in slices(items, frame_bytes, frame_bytes):
        message = peer_pb2.FetchStateResponse()
        for item, start, end in parts:
            total, data = item.num_bytes, item.data[start:end]
            message.chunks.add(chunk=item.chunk, version=item.version, offset_bytes=start, total_bytes=total, data=data)
        frames.append(message.SerializeToString())
    return frames
