"""The stream of one (sync, attempt) to one reducer: contributions up, payloads down; opened again when it breaks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from atoll.node.exchange.peers.frames import (
    FRAME_BYTES,
    MAX_HAS_PAYLOADS,
    Encoded,
    PartAssembler,
    pack_frames,
    parse,
)
from atoll.node.exchange.peers.jobs import Jobs
from atoll.node.exchange.peers.progress import Worth
from atoll.node.exchange.peers.rpc import EXCHANGE_METHOD
from atoll.protocol import wire
from atoll.protocol.errors import AtollError, InvalidMessage, NotYetError, PeerError, RefusedError
from atoll.protocol.status import from_rpc_error, was_cancelled
from atoll.protocol.v1 import peer_pb2

if TYPE_CHECKING:
    from atoll.node.exchange.sync.exchange import Exchange
    from atoll.node.exchange.sync.reduction import ReducersShare

MAX_BATCH_CHUNKS = 256
BATCHES_AHEAD = 2
"""Encoded batches that wait for the stream."""
STORES_AHEAD = 4
"""Frames whose payloads wait for the disk before reading pauses."""
MAX_CORRUPT = 3
"""Streams that may end with bytes that are not right, before the peer has failed."""
PATIENCE_WINDOWS = 1
"""How long a reducer may say that it waits for others while nothing moves there. It reports them within half of one."""
SENT_AGAIN = 2
"""After streams that broke, at most so many times what there is."""
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0

Stream = grpc.aio.StreamStreamCall[bytes, bytes]


class Upstream:
    """`run` ends when every payload of this reducer is stored; it raises PeerError when the peer cannot give them."""

    def __init__(self, exchange: Exchange, share: ReducersShare) -> None:
        self.member = share.member
        self.chunks = share.chunks
        self._exchange = exchange
        self._expected = share.expected
        self._num_wanted = len(share.chunks)  # payloads that are not stored yet
        self.phase = "connecting"
        self.progress = exchange.new_progress()
        self._worth_up, self._worth_down = Worth(share.num_bytes), Worth(share.num_bytes)
        self.waits_for: tuple[int, ...] = ()
        """Sites that this reducer says it waits for."""
        self._patience_s = self._longest_wait_s(SENT_AGAIN * share.num_bytes)
        self._waits_since = 0.0
        self._peer_moved_bytes = 0  # as it says
        self._peer_moved_at = 0.0
        self._peer_received_bytes = 0  # of this site's contributions, as it says
        self._num_written_bytes = 0
        self._num_useful_bytes = 0
        self._num_corrupt = 0
        self._last_error: AtollError | None = None
        self._done = False

    @property
    def all_sent(self) -> bool:
        return self.member.site_id not in self._exchange.turns.unsent

    @property
    def is_done(self) -> bool:
        return self._done

    def restart_clocks(self, now: float) -> None:
        """What was before is not held against the peer."""
        self.progress.restart(now)
        self._waits_since = self._peer_moved_at = now

    def _longest_wait_s(self, num_bytes: int) -> float:
        """How long contributions may be on their way to this reducer: one that is slower than a site may be, or gives
        nothing for a stall, is reported by the reducer."""
        exchange = self._exchange
        pace = exchange.pace
        return pace.stall_s + num_bytes / pace.slowest_share(len(exchange.plan.contributors) - 1)

    async def run(self) -> None:
        delay_s = RETRY_FIRST_S
        self._waits_since = self._peer_moved_at = self._now()
        while self._num_wanted:
            before, began_at = self._num_useful_bytes, self._now()
            held = False
            try:
                await self._stream()
            except AtollError as error:
                self._judge(error)
                held = isinstance(error, NotYetError) and self._now() - began_at > RETRY_MOST_S / 2
            if self._num_useful_bytes > before or held:  # a peer that holds streams takes the next one when it begins
                delay_s = RETRY_FIRST_S
            if self._num_wanted:
                self.phase = "connecting"
                self.waits_for = ()
                self._exchange.counters.reconnects += not held
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, RETRY_MOST_S)
        self._done = True

    def check(self, now: float) -> None:
        """Raises PeerError if the peer makes no progress."""
        problem = "" if self._done else self.progress.problem(now)
        if not problem:
            return
        self._exchange.disconnect(self.member.address)
        waits = f"; it says that it waits for sites {', '.join(map(str, self.waits_for))}" if self.waits_for else ""
        because = f"; the last error: {self._last_error}" if self._last_error else ""
        raise self._failure(f"{problem}{waits}{because}")

    def _judge(self, error: AtollError) -> None:
        """Raises what another try cannot mend."""
        self._last_error = error
        if isinstance(error, InvalidMessage | PeerError):
            self._exchange.disconnect(self.member.address)
            self._exchange.dialer.failed(self.member)
        if isinstance(error, InvalidMessage):
            self._num_corrupt += 1
            if self._num_corrupt >= MAX_CORRUPT:
                raise self._failure(f"{self._num_corrupt} streams ended with refused bytes, the last: {error}")
        elif isinstance(error, RefusedError):
            raise self._failure(str(error)) from error
        elif not isinstance(error, PeerError | NotYetError):
            raise error

    def _failure(self, text: str) -> PeerError:
        return self._exchange.peer_error(self.member, text, sending=not self.all_sent, phase=self.phase)

    def note_stored_before(self, stored: AbstractSet[int]) -> None:
        """In a thread, before `run`."""
        self._num_wanted = len(self._expected - stored) if stored else len(self._expected)

    async def _in_pool(self, chosen: Callable[[int], bool]) -> list[int]:
        """Those of its chunks, found in a thread."""
        return await self._exchange.in_pool(lambda: [chunk for chunk in self.chunks if chosen(chunk)])

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _moved(self, num_bytes: int) -> None:
        self._num_useful_bytes += num_bytes
        self.progress.moved(num_bytes, self._now())
        self._exchange.note_moved(num_bytes)

    async def _stream(self) -> None:
        """One stream until all payloads are stored. Raises the reason if it ends before."""
        channel = await self._exchange.connect(self.member)
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            EXCHANGE_METHOD,
            request_serializer=None,  # frames are bytes, see parts.py
            response_deserializer=None,
        )
        call: Stream = method()
        sender: asyncio.Task[None] | None = None
        try:
            opening = (await self._open()).SerializeToString()
            await call.write(opening)
            self._exchange.note_sent(len(opening))
            held = await self._read_held(call)
            self._exchange.dialer.reached(self.member)
            missing = self.chunks if self._exchange.contributes else []
            if held and missing:
                missing = await self._in_pool(lambda chunk: chunk not in held)
            self.phase = "sending contributions" if missing else "waiting for payloads"
            sender = asyncio.create_task(self._send(call, missing))
            sender.add_done_callback(self._sender_done)
            await self._receive(call)
        except InvalidMessage as error:
            self._exchange.counters.refuse(error)
            raise
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise await _reason(call, error, f"site {self.member.site_id} at {self.member.address}") from None
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            raise PeerError("the peer cancelled the stream", self.member.site_id) from None
        finally:
            call.cancel()
            if sender is not None:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)

    async def _open(self) -> peer_pb2.ExchangeRequest:
        exchange = self._exchange
        have = await self._in_pool(exchange.is_stored) if self._num_wanted < len(self.chunks) else []
        return peer_pb2.ExchangeRequest(
            open=peer_pb2.ExchangeOpen(
                header=wire.to_proto(exchange.header),
                sync=exchange.plan.sync,
                attempt=exchange.plan.attempt,
                plan_term=exchange.plan.term,
                plan_digest=exchange.plan_digest,
                tokens=exchange.me.tokens,
                reducer_site_id=self.member.site_id,
                reducer_incarnation=self.member.incarnation,
                has_payloads=have[:MAX_HAS_PAYLOADS],
            )
        )

    async def _write(self, call: Stream, frame: bytes) -> None:
        await call.write(frame)
        self._num_written_bytes += len(frame)
        self._moved(self._worth_up.of(len(frame)))
        self._exchange.note_sent(len(frame))

    async def _read(self, call: Stream) -> peer_pb2.ExchangeResponse | None:
        data = await call.read()
        if not isinstance(data, bytes):
            return None
        self._exchange.traffic.received_bytes += len(data)
        self._exchange.counters.received_bytes += len(data)
        return parse(peer_pb2.ExchangeResponse, data)

    async def _read_held(self, call: Stream) -> set[int]:
        held: set[int] = set()
        while True:
            response = await self._read(call)
            if response is None:
                raise PeerError("the stream ended before it began", self.member.site_id)
            if response.WhichOneof("body") != "held":
                raise self._invalid("the first message must say what is held")
            before = len(held)
            held.update(chunks := frozenset(response.held.chunks))
            if not chunks <= self._expected:
                raise self._invalid("it holds chunks that it does not reduce")
            if response.held.more and len(held) == before:
                raise self._invalid("it goes on about what it holds and says nothing new")
            if not response.held.more:
                return held

    def _invalid(self, text: str) -> InvalidMessage:
        return InvalidMessage(f"site {self.member.site_id} at {self.member.address}: {text}")

    # --- up

    async def _send(self, call: Stream, chunks: list[int]) -> None:
        """Contributions, encoded a few batches ahead."""
        exchange = self._exchange
        waiting: deque[asyncio.Future[list[bytes]]] = deque()
        with exchange.uplink.sending():
            try:
                for batch in self._batches(chunks):
                    if len(waiting) == BATCHES_AHEAD:
                        await self._write_all(call, await waiting.popleft())
                    waiting.append(exchange.in_pool(lambda batch=batch: self._encode(batch)))  # type: ignore[misc]
                while waiting:
                    await self._write_all(call, await waiting.popleft())
            finally:
                for job in waiting:
                    job.cancel()
        await call.done_writing()
        if exchange.contributes:
            self.phase = "waiting for payloads"
            now = self._now()
            self.restart_clocks(now)
            exchange.turns.sent(self.member.site_id, now)

    def _sender_done(self, task: asyncio.Task[None]) -> None:
        """A broken stream is the reader's to judge; what failed on this site fails the exchange."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, grpc.RpcError | asyncio.InvalidStateError):
            self._exchange.fail(error)

    async def _write_all(self, call: Stream, frames: list[bytes]) -> None:
        for frame in frames:
            await self._write(call, frame)

    def _batches(self, chunks: list[int]) -> Iterator[list[int]]:
        """Chunks that fill a frame together, or one large chunk; of small ones not more than are counted at once."""
        batch: list[int] = []
        size = 0
        for chunk in chunks:
            more = self._exchange.data.max_bytes(chunk)
            if batch and (size + more > FRAME_BYTES or len(batch) == MAX_BATCH_CHUNKS):
                yield batch
                batch, size = [], 0
            batch.append(chunk)
            size += more
        if batch:
            yield batch

    def _encode(self, chunks: list[int]) -> list[bytes]:
        data = self._exchange.data
        items = []
        for chunk in chunks:
            encoded = data.contribution(chunk)
            items.append(Encoded(chunk, encoded, data.payload_hash(encoded)))
        return list(pack_frames(items, self._exchange.frame_bytes))

    # --- down

    def _expect_payload(self, chunk: int) -> int:
        if chunk not in self._expected:
            raise self._invalid(f"the payload of chunk {chunk}, which it does not make")
        return self._exchange.data.max_bytes(chunk)

    async def _receive(self, call: Stream) -> None:
        """Payloads, stored beside the reading; ends when all are there."""
        assembler = PartAssembler(self._expect_payload)
        stores = Jobs(STORES_AHEAD)
        try:
            while True:
                response = await stores.read(self._read(call))
                if response is None:
                    break
                if response.WhichOneof("body") == "waiting":
                    self._peer_waits(response.waiting)
                    continue
                parts = response.payload.parts
                if not parts:
                    raise self._invalid("a message that does not belong here")
                self.waits_for = ()
                lacking = sum(len(part.data) for part in parts if not self._exchange.is_stored(part.chunk))
                self._moved(self._worth_down.of(lacking))
                done = [item for part in parts if (item := assembler.add(part)) is not None]
                if done:
                    await stores.begin(self._store(done))
        finally:
            await stores.finish()
        if self._num_wanted:
            raise PeerError("the stream ended early", self.member.site_id)

    async def _store(self, items: list[Encoded]) -> None:
        num_stored = await self._exchange.store(items)  # several are under way at once
        self._num_wanted -= num_stored

    def _peer_waits(self, waiting: peer_pb2.Waiting) -> None:
        """A reducer that waits for others, and gets on with them, is not to blame; it judges them itself, and sooner
        than it is judged here. What it says of this site is known better here."""
        now, num_contributors = self._now(), len(self._exchange.plan.contributors)
        if len(waiting.site_ids) >= num_contributors:
            raise self._invalid(f"it waits for {len(waiting.site_ids)} sites, and {num_contributors} contribute")
        self.waits_for = tuple(waiting.site_ids)
        if waiting.moved_bytes != self._peer_moved_bytes:
            self._peer_moved_bytes, self._peer_moved_at = waiting.moved_bytes, now
        if not self.all_sent:
            return
        # What was written may be on its way for long. No more than that can arrive, whatever the peer says.
        received = min(waiting.received_bytes, self._num_written_bytes)
        if (more := received - self._peer_received_bytes) > 0:
            self._peer_received_bytes = received
            self.progress.moved(more, now)
            self._exchange.counters.moved_bytes += more  # but it still says that it waits for this peer
        if self._is_excused(now):
            self.progress.restart(now)

    def _is_excused(self, now: float) -> bool:
        """Whether those that the peer says it waits for may really hold it up, and for so long."""
        exchange, peer = self._exchange, self.member.site_id
        window_s = PATIENCE_WINDOWS * exchange.pace.window_s
        if now - self._waits_since > self._patience_s or now - self._peer_moved_at > window_s:
            return False
        if exchange.me.site_id in self.waits_for:  # it was sent everything, or its contributions are on their way here
            return exchange.takes_from(peer) and exchange.is_lacking(peer)
        return any(exchange.is_contributor(site_id) and site_id != peer for site_id in self.waits_for)


async def _reason(call: Stream, error: Exception, where: str) -> AtollError:
    """Why a call ended. A write to an ended call says only that it has ended; its status says why."""
    if isinstance(error, grpc.RpcError):
        return from_rpc_error(error, where)
    return from_rpc_error(
        grpc.aio.AioRpcError(
            await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        ),
        where,
    )
