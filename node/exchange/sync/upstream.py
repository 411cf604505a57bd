"""The streams of one attempt to the parent of a reduction: contributions up, payloads down; opened again when they
break. Each carries a range of the chunks over a connection of its own; the parent is judged by all of them together."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc

from atoll.node.exchange.peers.dialer import Dialer, Purpose
from atoll.node.exchange.peers.frames import FRAME_BYTES, MAX_HAS_PAYLOADS, Encoded, batches, pack_frames, parse
from atoll.node.exchange.peers.jobs import take_chunks
from atoll.node.exchange.peers.progress import Worth
from atoll.node.exchange.peers.rpc import EXCHANGE_METHOD, Stream, call_errors, open_stream
from atoll.node.exchange.sync.attempt import Attempt
from atoll.node.exchange.sync.collection import Collection
from atoll.node.exchange.sync.reducer import Reducer
from atoll.node.exchange.sync.reduction import Reduction
from atoll.node.exchange.sync.turns import Turns
from atoll.node.tasks import end, together
from atoll.protocol import wire
from atoll.protocol.errors import AtollError, InvalidMessage, NotYetError, PeerError, RefusedError
from atoll.protocol.v1 import peer_pb2

MAX_BATCH_CHUNKS = 256
BATCHES_AHEAD = 2
"""Encoded batches that wait for the stream; with several streams to one parent one each."""
MAX_CORRUPT = 3
"""Streams that may end with bytes that are not right, before the peer has failed."""
PATIENCE_WINDOWS = 1
"""How long a reducer may say that it waits for others while nothing moves there. It reports them within half of one."""
SENT_AGAIN = 2
"""After streams that broke, at most so many times what there is."""
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0


@dataclass(eq=False, slots=True, kw_only=True)
class Strand:
    """What one of the streams to a parent carries."""

    number: int
    """Of the connection."""
    ids: range
    chunks: list[int]
    num_wanted: int
    """Payloads that are not stored yet."""
    was_open: bool = False
    is_answered: bool = False
    """On this stream the parent has said what it holds. What is written before may be nowhere."""
    is_written: bool = False
    """On this stream all that it lacks is."""


@dataclass(eq=False, kw_only=True)
class Upstream:
    """`run` ends when every payload of this reduction is stored; it raises PeerError when the parent cannot give
    them."""

    attempt: Attempt
    reduction: Reduction
    reducer: Reducer
    """Of the chunks that are averaged here."""
    collection: Collection
    turns: Turns
    dialer: Dialer

    def __post_init__(self) -> None:
        attempt, reduction = self.attempt, self.reduction
        assert reduction.parent is not None, "the top averages"
        self.parent = reduction.parent
        self.chunks = reduction.chunks
        self._where = f"site {self.parent.site_id} at {self.parent.address}"
        self.strands = [self._strand(number, ids) for number, ids in enumerate(reduction.streams)]
        self._unsent = set(range(len(self.strands)))
        self.phase = "connecting"
        self.progress = attempt.new_progress()
        self._worth_up, self._worth_down = Worth(reduction.num_bytes), Worth(reduction.payload_bytes)
        self.waits_for: tuple[int, ...] = ()
        """Sites that the parent says it waits for."""
        # How long contributions may be on their way to the parent: a site that is slower than one may be, or gives
        # nothing for a stall, is reported by the parent.
        pace = attempt.pace
        self._patience_s = pace.stall_s + SENT_AGAIN * reduction.payload_bytes / pace.slowest_share(attempt.num_others)
        self._waits_since = 0.0
        self._peer_moved_bytes = 0  # as it says
        self._peer_moved_at = 0.0
        self._peer_received_bytes = 0  # of this site's contributions, as it says
        self._num_written_bytes = 0
        self._num_useful_bytes = 0
        self._num_corrupt = 0
        self._last_error: AtollError | None = None

    @property
    def is_done(self) -> bool:
        return not any(strand.num_wanted for strand in self.strands)

    @property
    def all_sent(self) -> bool:
        return self.parent not in self.turns.unsent

    @property
    def is_before_average(self) -> bool:
        """The parent has all that this site gives it, and averages nothing before the coordinator has said more: it
        knows who is late with what that takes."""
        return self.all_sent and not self.reducer.influences.are_told

    def restart_clocks(self, now: float) -> None:
        """What was before is not held against the peer."""
        self.progress.restart(now)
        self._waits_since = self._peer_moved_at = now

    async def run(self) -> None:
        self._waits_since = self._peer_moved_at = self.attempt.loop.time()
        await together([self._keep_open(strand) for strand in self.strands])

    async def _keep_open(self, strand: Strand) -> None:
        delay_s = RETRY_FIRST_S
        while strand.num_wanted:
            before, began_at = self._num_useful_bytes, self.attempt.loop.time()
            held = False
            try:
                await self._stream(strand)
            except AtollError as error:
                self._judge(error)
                held = isinstance(error, NotYetError) and self.attempt.loop.time() - began_at > RETRY_MOST_S / 2
            if self._num_useful_bytes > before or held:  # a peer that holds streams takes the next one when it begins
                delay_s = RETRY_FIRST_S
            if strand.num_wanted:
                self.phase = "connecting"
                self.waits_for = ()
                self.attempt.counters.reconnects += not held
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, RETRY_MOST_S)

    def check(self, now: float) -> None:
        """Raises PeerError if the peer makes no progress."""
        problem = "" if self.is_done or self.is_before_average else self.progress.problem(now)
        if not problem:
            return
        self.dialer.disconnect(self.parent, Purpose.EXCHANGE)
        waits = f"; it says that it waits for sites {', '.join(map(str, self.waits_for))}" if self.waits_for else ""
        because = f"; the last error: {self._last_error}" if self._last_error else ""
        raise self._failure(f"{problem}{waits}{because}")

    def _judge(self, error: AtollError) -> None:
        """Raises what another try cannot mend."""
        self._last_error = error
        if isinstance(error, InvalidMessage):
            self._num_corrupt += 1
            if self._num_corrupt >= MAX_CORRUPT:
                raise self._failure(f"{self._num_corrupt} streams ended with refused bytes, the last: {error}")
        elif isinstance(error, RefusedError):
            raise self._failure(str(error)) from error
        elif not isinstance(error, PeerError | NotYetError):
            raise error

    def _failure(self, text: str) -> PeerError:
        return self.attempt.peer_error(self.parent, text, sending=not self.all_sent, phase=self.phase)

    def restore(self) -> None:
        """In a thread, before `run`: an earlier run of the attempt may have left payloads in the log."""
        for strand in self.strands:
            strand.num_wanted = self.collection.num_missing(frozenset(strand.chunks))

    def _strand(self, number: int, ids: range) -> Strand:
        chunks = self.chunks[bisect_left(self.chunks, ids.start) : bisect_left(self.chunks, ids.stop)]
        return Strand(number=number, ids=ids, chunks=chunks, num_wanted=len(chunks))

    async def _in_pool(self, strand: Strand, chosen: Callable[[int], bool]) -> list[int]:
        """Those of its chunks, found in a thread."""
        return await self.attempt.in_pool(lambda: [chunk for chunk in strand.chunks if chosen(chunk)])

    def _moved(self, num_bytes: int) -> None:
        self._num_useful_bytes += num_bytes
        self.progress.moved(num_bytes, self.attempt.loop.time())
        self.attempt.moved(num_bytes)

    async def _stream(self, strand: Strand) -> None:
        """One stream until all payloads that it carries are stored. Raises the reason if it ends before."""
        channel = await self.dialer.channel(self.parent, Purpose.EXCHANGE, strand.number)
        call = open_stream(channel, EXCHANGE_METHOD)
        sender: asyncio.Task[None] | None = None
        strand.is_answered = strand.is_written = False
        try:
            with call_errors(self._where, self.parent.site_id):
                opening = (await self._open(strand)).SerializeToString()
                with suppress(asyncio.InvalidStateError):  # the call has ended: reading says why
                    await call.write(opening)
                self.attempt.uplink.charge(len(opening))
                self.attempt.sent_contribution(len(opening))
                if self.attempt.plan.attempt == 1 and not strand.was_open:
                    # Nothing can be held: the way there and back is saved.
                    sender = self._start_sending(call, strand, strand.chunks)
                strand.was_open = True
                held = await self._read_held(call)
                self.dialer.reached(self.parent)
                if sender is None:
                    missing = await self._in_pool(strand, lambda chunk: chunk not in held) if held else strand.chunks
                    sender = self._start_sending(call, strand, missing)
                strand.is_answered = True
                self._note_sent(strand)
                await self._receive(call, strand)
        except (InvalidMessage, PeerError) as error:
            self.dialer.broke(self.parent, channel)
            if isinstance(error, InvalidMessage):
                self.attempt.counters.refuse(error)
            raise
        finally:
            call.cancel()
            await end([sender] if sender is not None else [])

    async def _open(self, strand: Strand) -> peer_pb2.ExchangeRequest:
        attempt = self.attempt
        have = await self._in_pool(strand, self.collection.has) if strand.num_wanted < len(strand.chunks) else []
        return peer_pb2.ExchangeRequest(
            open=peer_pb2.ExchangeOpen(
                header=wire.to_proto(attempt.header),
                sync=attempt.plan.sync,
                attempt=attempt.plan.attempt,
                plan_term=attempt.plan.term,
                plan_digest=attempt.digest,
                tokens=attempt.tokens,
                reducer_site_id=self.parent.site_id,
                reducer_incarnation=self.parent.incarnation,
                has_payloads=have[:MAX_HAS_PAYLOADS],
                first_chunk=strand.ids.start,
                num_chunks=len(strand.ids),
                spare_ms=attempt.spare_ms,
                contributions_root=self.reducer.roots.own,
            )
        )

    async def _write(self, call: Stream, frame: bytes) -> None:
        frame = await self.attempt.turn(frame)
        await call.write(frame)
        self._num_written_bytes += len(frame)
        self._moved(self._worth_up.of(len(frame)))
        self.attempt.sent_contribution(len(frame))

    async def _read(self, call: Stream) -> peer_pb2.ExchangeResponse | None:
        attempt, since = self.attempt, self.attempt.loop.time()
        data = await call.read()
        if not isinstance(data, bytes):
            return None
        attempt.received(len(data))
        response = parse(peer_pb2.ExchangeResponse, data)
        if response.follows:
            attempt.links.note(self.parent.site_id, len(data), since, attempt.loop.time())
        return response

    async def _read_held(self, call: Stream) -> set[int]:
        held: set[int] = set()
        while True:
            response = await self._read(call)
            if response is None:
                raise PeerError("the stream ended before it began", self.parent.site_id)
            if response.WhichOneof("body") != "held":
                raise self._invalid("the first message must say what is held")
            before = len(held)
            held.update(chunks := frozenset(response.held.chunks))
            if not chunks <= self.reduction.expected:
                raise self._invalid("it holds chunks that it does not reduce")
            if response.held.more and len(held) == before:
                raise self._invalid("it goes on about what it holds and says nothing new")
            if not response.held.more:
                return held

    def _invalid(self, text: str) -> InvalidMessage:
        return InvalidMessage(f"{self._where}: {text}")

    # --- up

    def _start_sending(self, call: Stream, strand: Strand, chunks: list[int]) -> asyncio.Task[None]:
        contributions = chunks if self.attempt.contributes else []
        self.phase = "sending contributions" if contributions else "waiting for payloads"
        sender = asyncio.create_task(self._send(call, strand, contributions))
        sender.add_done_callback(self._sender_done)
        return sender

    async def _send(self, call: Stream, strand: Strand, chunks: list[int]) -> None:
        """Contributions, encoded a few batches ahead."""
        attempt = self.attempt
        ahead = BATCHES_AHEAD if len(self.strands) == 1 else 1
        waiting: deque[asyncio.Future[list[bytes]]] = deque()
        with attempt.uplink.sending():
            try:
                for batch in batches(chunks, attempt.data.max_bytes, FRAME_BYTES, MAX_BATCH_CHUNKS):
                    if len(waiting) == ahead:
                        await self._write_all(call, await waiting.popleft())
                    waiting.append(attempt.in_pool(lambda batch=batch: self._encode(batch)))  # type: ignore[misc]
                while waiting:
                    await self._write_all(call, await waiting.popleft())
            finally:
                for job in waiting:
                    job.cancel()
        await call.done_writing()
        strand.is_written = True
        self._note_sent(strand)

    def _note_sent(self, strand: Strand) -> None:
        if not (strand.is_written and strand.is_answered):
            return
        self._unsent.discard(strand.number)
        if self.attempt.contributes and not self._unsent:
            self.phase = "waiting for payloads"
            self.restart_clocks(self.attempt.loop.time())
            self.turns.sent(self.parent)

    def _sender_done(self, task: asyncio.Task[None]) -> None:
        """A broken stream is the reader's to judge; what failed on this site fails the attempt."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, grpc.RpcError | asyncio.InvalidStateError):
            self.attempt.fail(error)

    async def _write_all(self, call: Stream, frames: list[bytes]) -> None:
        for frame in frames:
            await self._write(call, frame)

    def _encode(self, chunks: list[int]) -> list[bytes]:
        data = self.attempt.data
        items = []
        for chunk in chunks:
            encoded = data.contribution(chunk)
            items.append(Encoded(chunk, encoded, data.payload_hash(encoded), proof=data.proof(chunk)))
        return list(pack_frames(items, self.attempt.frame_bytes))

    # --- down

    def _expect_payload(self, strand: Strand, chunk: int) -> int:
        if chunk not in self.reduction.expected or chunk not in strand.ids:
            raise self._invalid(f"the payload of chunk {chunk}, which it does not make, or not for this stream")
        return self.attempt.data.payload_bytes(chunk, self.attempt.num_contributors)

    async def _receive(self, call: Stream, strand: Strand) -> None:
        """Payloads, stored beside the reading; ends when all are there."""
        await take_chunks(
            lambda: self._payload_parts(call),
            lambda chunk: self._expect_payload(strand, chunk),
            lambda items: self._store(strand, items),
        )
        if strand.num_wanted:
            raise PeerError("the stream ended early", self.parent.site_id)

    async def _payload_parts(self, call: Stream) -> Sequence[peer_pb2.Part] | None:
        while (response := await self._read(call)) is not None:
            if response.WhichOneof("body") == "waiting":
                self._peer_waits(response.waiting)
                continue
            parts = response.payload.parts
            if not parts:
                raise self._invalid("a message that does not belong here")
            self.waits_for = ()
            missing = sum(len(part.data) for part in parts if not self.collection.has(part.chunk))
            self._moved(self._worth_down.of(missing))
            return parts
        return None

    async def _store(self, strand: Strand, items: list[Encoded]) -> None:
        num_stored = await self.collection.store(items)  # several are under way at once
        strand.num_wanted -= num_stored

    def _peer_waits(self, waiting: peer_pb2.Waiting) -> None:
        """A reducer that waits for others, and gets on with them, is not to blame; it judges them itself, and sooner
        than it is judged here. What it says of this site is known better here."""
        now, num_contributors = self.attempt.loop.time(), self.attempt.num_others + 1
        if len(waiting.site_ids) >= num_contributors:
            raise self._invalid(f"it waits for {len(waiting.site_ids)} sites, and {num_contributors} contribute")
        self.waits_for = tuple(waiting.site_ids)
        self.attempt.hurry(waiting.spare_ms)
        if waiting.moved_bytes != self._peer_moved_bytes:
            self._peer_moved_bytes, self._peer_moved_at = waiting.moved_bytes, now
        if not self.all_sent:
            return
        # What was written may be on its way for long. No more than that can arrive, whatever the peer says.
        received = min(waiting.received_bytes, self._num_written_bytes)
        if (more := received - self._peer_received_bytes) > 0:
            self._peer_received_bytes = received
            self.progress.moved(more, now)
            self.attempt.counters.moved_bytes += more  # but it still says that it waits for this peer
        if self._is_excused(now):
            self.progress.restart(now)

    def _is_excused(self, now: float) -> bool:
        """Whether those that the peer says it waits for may really hold it up, and for so long."""
        attempt, peer = self.attempt, self.parent.site_id
        window_s = PATIENCE_WINDOWS * attempt.pace.window_s
        if now - self._waits_since > self._patience_s or now - self._peer_moved_at > window_s:
            return False
        # It was sent everything, or its contributions are on their way here. Of a site of several hosts it may wait for
        # another one.
        if attempt.me.site_id in self.waits_for and not attempt.me.endpoints:
            return self.reducer.takes_from(peer) and self.reducer.misses(peer)
        return any(attempt.is_contributor(site_id) and site_id != peer for site_id in self.waits_for)
