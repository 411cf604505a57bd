"""The reducer's end of one stream: contributions in, payloads out. Reading never waits for writing."""

from __future__ import annotations

import asyncio

import grpc.aio

from atoll.node.exchange.peers.frames import Encoded, PartAssembler, pack_frames, parse
from atoll.node.exchange.peers.jobs import Jobs
from atoll.node.exchange.peers.rpc import write_within
from atoll.node.exchange.sync.exchange import Exchange
from atoll.node.exchange.sync.turns import ServedPeer
from atoll.protocol.errors import InvalidMessage, PeerError
from atoll.protocol.messages import Member
from atoll.protocol.v1 import peer_pb2

Context = grpc.aio.ServicerContext[bytes, bytes]
HELD_PER_MESSAGE = 1 << 15
VERIFIES_AHEAD = 4
"""Frames whose contributions wait for a thread before reading pauses."""
EARLY_PAYLOADS = 2
"""Sent at once, the others after the contributions. The connection that carries them was idle since the last sync:
TCP starts slowly on it, better while contributions still fill the uplink than when nothing else does."""


class Downstream:
    """`run` ends when every payload made here has been sent to `member`."""

    def __init__(self, exchange: Exchange, context: Context, member: Member, has_payloads: set[int]) -> None:
        self._exchange = exchange
        self._context = context
        self._member = member
        self._has_payloads = has_payloads
        self._contributes = exchange.takes_from(member.site_id)

    async def run(self) -> None:
        """Raises RefusedError or NotYetError when the exchange ends before; InvalidMessage for what the peer sent."""
        with self._exchange.uplink.exchange():
            await self._run()

    async def _run(self) -> None:
        await self._send_held()
        reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
            await writer
        finally:
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _send(self, frame: bytes) -> None:
        who = f"site {self._member.site_id} ({self._exchange.where})"
        await write_within(self._exchange.pace.stall_s, self._context.write, frame, who)
        self._exchange.note_sent(len(frame))

    async def _send_held(self) -> None:
        held = await self._exchange.held_of(self._member) if self._contributes else []
        for first in range(0, max(1, len(held)), HELD_PER_MESSAGE):
            chunks = held[first : first + HELD_PER_MESSAGE]
            more = first + HELD_PER_MESSAGE < len(held)
            message = peer_pb2.ExchangeResponse(held=peer_pb2.Held(chunks=chunks, more=more))
            await self._send(message.SerializeToString())

    # --- contributions

    async def _read(self) -> None:
        exchange = self._exchange
        assembler = PartAssembler(self._expect)
        jobs = Jobs(VERIFIES_AHEAD)
        try:
            while True:
                data = await jobs.read(self._context.read())
                if not isinstance(data, bytes):
                    break
                self._heard(len(data))
                request = parse(peer_pb2.ExchangeRequest, data)
                if request.WhichOneof("body") != "contribution":
                    raise InvalidMessage(f"site {self._member.site_id} sent a message that does not belong here")
                parts = request.contribution.parts
                if not parts:
                    raise InvalidMessage(f"site {self._member.site_id} sent a message without contributions")
                if self._contributes:
                    exchange.note_contribution_bytes(self._member.site_id, parts)
                done = [item for part in parts if (item := assembler.add(part)) is not None]
                if done:
                    await jobs.begin(self._take(done))
        finally:
            await jobs.finish()  # what arrived whole is kept
        if self._contributes and exchange.is_lacking(self._member.site_id):
            raise PeerError(f"site {self._member.site_id} ended its contributions early", self._member.site_id)

    def _expect(self, chunk: int) -> int:
        if not self._contributes:
            raise InvalidMessage(f"site {self._member.site_id} is a receiver of this sync and contributes nothing")
        return self._exchange.expect_contribution(chunk)

    def _heard(self, size: int) -> None:
        exchange = self._exchange
        exchange.traffic.received_bytes += size
        exchange.counters.received_bytes += size

    async def _take(self, items: list[Encoded]) -> None:
        await self._exchange.in_pool(lambda: self._exchange.verify(items, self._exchange.data.check))
        for item in items:
            self._exchange.take_contribution(self._member, item)
        await self._exchange.fit_memory()

    # --- payloads

    async def _write(self) -> None:
        with self._exchange.turns.served(self._member.site_id) as peer:
            await self._write_to(peer)

    async def _write_to(self, peer: ServedPeer) -> None:
        exchange = self._exchange
        loop = asyncio.get_running_loop()
        sign_of_life_s = exchange.plan.stall_limit_s / 4
        said_at = loop.time()
        num_seen = 0
        while True:
            peer.changed.clear()
            if exchange.closed is not None:
                raise exchange.closed
            early = peer.takes_early = num_seen < EARLY_PAYLOADS
            delay_s = 0.0 if early else exchange.turns.delay_s(self._member.site_id, loop.time())
            if num_seen < len(exchange.payloads) and delay_s == 0:
                fresh = exchange.payloads[num_seen : EARLY_PAYLOADS if early else None]
                num_seen += len(fresh)
                with exchange.uplink.sending():
                    lacking = (item for item in fresh if item.chunk not in self._has_payloads)
                    for frame in pack_frames(lacking, exchange.frame_bytes):
                        await self._send(frame)
                        exchange.note_given(self._member.site_id, len(frame))
                said_at = loop.time()
            elif num_seen == len(exchange.own_chunks):
                return
            else:
                # Changes that bring nothing for this peer may be many: they do not put off the sign of life.
                silent_s = said_at + sign_of_life_s - loop.time()
                if silent_s > 0:
                    await peer.wait(min(delay_s, silent_s) if num_seen < len(exchange.payloads) else silent_s)
                    continue
                said_at = loop.time()
                waiting = exchange.waiting(self._member.site_id)
                if waiting is not None:
                    await self._send(peer_pb2.ExchangeResponse(waiting=waiting).SerializeToString())
