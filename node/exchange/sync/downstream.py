"""A stream of one attempt from a child, or a receiver: contributions in, payloads out, of a range of the own chunks.
Reading never waits for writing."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from atoll.node.exchange.peers.frames import pack_frames, parse
from atoll.node.exchange.peers.jobs import take_chunks
from atoll.node.exchange.peers.rpc import Context, write_within
from atoll.node.exchange.sync.exchange import Exchange
from atoll.node.exchange.sync.reducer import Made
from atoll.node.exchange.sync.retained import AT_ONCE
from atoll.node.exchange.sync.turns import ServedPeer
from atoll.node.tasks import end
from atoll.protocol.errors import InvalidMessage, PeerError
from atoll.protocol.messages import Member
from atoll.protocol.v1 import peer_pb2

HELD_PER_MESSAGE = 1 << 15
EARLY_PAYLOADS = 2
"""Sent at once, the others after the contributions. The connection that carries them was idle since the last sync:
TCP starts slowly on it, better while contributions still fill the uplink than when nothing else does."""
READ_BYTES = 8 << 20
"""Of payloads that are in the log alone, read at once."""


@dataclass(eq=False)
class Downstream:
    """`run` ends when every payload of `ids` that is made here has been sent to `member`."""

    exchange: Exchange
    context: Context
    member: Member
    ids: range
    has_payloads: set[int]

    def __post_init__(self) -> None:
        self._attempt = self.exchange.attempt
        self._reducer = self.exchange.reducer
        self._contributes = self._reducer.takes_from(self.member.site_id)
        own = self._reducer.own.chunks
        self._num_own = bisect_left(own, self.ids.stop) - bisect_left(own, self.ids.start)

    async def run(self) -> None:
        """Raises RefusedError or NotYetError when the attempt ends before; InvalidMessage for what the peer sent."""
        if not self._num_own:
            where = f"chunks {self.ids.start} to {self.ids.stop - 1}"
            raise InvalidMessage(f"site {self.member.site_id} asks for {where}, of which this site reduces none")
        with self._attempt.uplink.exchange(), self.exchange.turns.served(self.member.site_id) as peer:
            await self._send_held()
            reader = asyncio.create_task(self._read())
            writer = asyncio.create_task(self._write_to(peer))
            try:
                await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
                if reader.done():
                    reader.result()
                await writer
            finally:
                await end([reader, writer])

    async def _send(self, frame: bytes) -> None:
        who = f"site {self.member.site_id} ({self._attempt.where})"
        await write_within(self._attempt.pace.stall_s, self.context.write, frame, who)
        self._attempt.sent_average(len(frame))

    async def _say(self, message: peer_pb2.ExchangeResponse) -> None:
        """A word that waits for no turn."""
        self._attempt.uplink.charge(message.ByteSize())
        await self._send(message.SerializeToString())

    async def _send_held(self) -> None:
        held = await self._reducer.held_of(self.member) if self._contributes else []
        held = held[bisect_left(held, self.ids.start) : bisect_left(held, self.ids.stop)]
        for first in range(0, max(1, len(held)), HELD_PER_MESSAGE):
            chunks = held[first : first + HELD_PER_MESSAGE]
            more = first + HELD_PER_MESSAGE < len(held)
            await self._say(peer_pb2.ExchangeResponse(held=peer_pb2.Held(chunks=chunks, more=more)))

    # --- contributions

    async def _read(self) -> None:
        await take_chunks(self._parts, self._expect, lambda items: self._reducer.take(self.member, items))
        site_id = self.member.site_id
        if self._contributes and await self._reducer.misses_any(site_id, self.ids):
            raise PeerError(f"site {site_id} ended its contributions early", site_id)

    async def _parts(self) -> Sequence[peer_pb2.Part] | None:
        attempt, since = self._attempt, self._attempt.loop.time()
        data = await self.context.read()
        if not isinstance(data, bytes):
            return None
        site_id = self.member.site_id
        attempt.received(len(data))
        request = parse(peer_pb2.ExchangeRequest, data)
        if request.follows:
            attempt.links.note(site_id, len(data), since, attempt.loop.time())
        if request.WhichOneof("body") != "contribution":
            raise InvalidMessage(f"site {site_id} sent a message that does not belong here")
        parts = request.contribution.parts
        if not parts:
            raise InvalidMessage(f"site {site_id} sent a message without contributions")
        if self._contributes:
            self._reducer.hear(site_id, parts)
        return parts

    def _expect(self, chunk: int) -> int:
        if not self._contributes:
            raise InvalidMessage(f"site {self.member.site_id} is a receiver of this sync and contributes nothing")
        return self._reducer.expect(chunk)

    # --- payloads

    def _own_of(self, payloads: list[Made]) -> list[Made]:
        """In a thread: those of `ids`."""
        return [item for item in payloads if item.chunk in self.ids]

    async def _write_to(self, peer: ServedPeer) -> None:
        attempt, reducer, site_id = self._attempt, self._reducer, self.member.site_id
        now = attempt.loop.time
        sign_of_life_s = attempt.plan.stall_limit_s / 4
        said_at = now()
        num_left = self._num_own
        num_early = EARLY_PAYLOADS
        num_seen = 0
        finished: list[Made] = []  # of `ids`, and not sent
        while True:
            peer.changed.clear()
            if attempt.closed is not None:
                raise attempt.closed
            if fresh := reducer.payloads[num_seen:]:
                num_seen += len(fresh)
                carries_all = self._num_own == len(reducer.own.chunks)
                finished += fresh if carries_all else await attempt.in_pool(partial(self._own_of, fresh))
            peer.takes_early = num_early > 0
            if finished and (num_early or self.exchange.turns.may_have(site_id)):
                due, finished = (finished[:num_early], finished[num_early:]) if num_early else (finished, [])
                num_early -= min(num_early, len(due))
                num_left -= len(due)
                with attempt.uplink.sending():
                    missing = (item for item in due if item.chunk not in self.has_payloads)
                    for some in _read_at_once(missing):
                        for frame in pack_frames(await reducer.encoded(some), attempt.frame_bytes):
                            await self._send(await attempt.turn(frame))
                            reducer.given(site_id, len(frame))
                said_at = now()
            elif not num_left:
                return
            else:
                # Changes that bring nothing for this peer may be many: they do not put off the sign of life.
                silent_s = said_at + sign_of_life_s - now()
                if silent_s > 0:
                    await peer.wait(silent_s)
                    continue
                said_at = now()
                waiting = reducer.waiting(site_id)
                if waiting is not None:
                    await self._say(peer_pb2.ExchangeResponse(waiting=waiting))


def _read_at_once(made: Iterable[Made]) -> Iterator[list[Made]]:
    """In order: as many as AT_ONCE, and as READ_BYTES of the log has."""
    some, num_bytes = list[Made](), 0
    for item in made:
        if len(some) == AT_ONCE or (item.data is None and some and num_bytes + item.num_bytes > READ_BYTES):
            yield some
            some, num_bytes = [], 0
        some.append(item)
        num_bytes += item.num_bytes if item.data is None else 0
    if some:
        yield some
