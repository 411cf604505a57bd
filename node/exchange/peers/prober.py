"""Whether peers can be dialled, now and then, and at once when they are new. A wrong host at an address is noticed."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import grpc.aio

from atoll.node.exchange.peers.dialer import Dialer, Purpose
from atoll.node.exchange.peers.frames import parse
from atoll.node.exchange.peers.rpc import PROBE_METHOD, call_errors
from atoll.node.tasks import end, watched
from atoll.protocol import wire
from atoll.protocol.endpoints import places_of
from atoll.protocol.errors import AtollError, InvalidMessage, PeerError
from atoll.protocol.messages import Header, Member
from atoll.protocol.time_limits import TimeLimits
from atoll.protocol.v1 import peer_pb2

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Probes under way of peers that were looked at before. Those that are new wait for no turn: hosts that take the
connection and say nothing would hold all turns, and there are few new ones."""
TRIES = 2
"""Before a peer counts as one that cannot be dialled; a heartbeat apart. (One that was admitted just now may not have
heard its own id yet.)"""
LEASES_IF_REACHED = 10.0
"""Until the next look at a peer; at one that cannot be dialled: one lease."""


@dataclass(eq=False, kw_only=True)
class Prober:
    """`watch` peers; `found` hears of each change of the set that cannot be dialled. One not tried yet is not in it.
    `failed` hears of what goes wrong here, and is no fault of a peer."""

    header: Callable[[], Header]
    dialer: Dialer
    limits: Callable[[], TimeLimits]
    found: Callable[[tuple[int, ...]], None]
    failed: Callable[[BaseException], None]
    _watched: dict[Member, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _problems: dict[Member, str] = field(default_factory=dict, init=False)
    _turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE), init=False)

    def watch(self, members: tuple[Member, ...]) -> None:
        """Instead of those before, each at all of its places."""
        before = self._unreachable()
        places = [place for member in members for place in places_of(member)]
        for place in [place for place in self._watched if place not in places]:
            self._watched.pop(place).cancel()
            self._problems.pop(place, None)
        for place in places:
            if place not in self._watched:
                self._watched[place] = watched(self._look(place), self.failed)
        if self._unreachable() != before:
            self.found(self._unreachable())

    async def close(self) -> None:
        await end(self._watched.values())

    def _unreachable(self) -> tuple[int, ...]:
        return tuple(sorted({member.site_id for member in self._problems}))

    async def _look(self, member: Member) -> None:
        for is_new in itertools.chain([True], itertools.repeat(False)):
            problem = await self._try(member, is_new=is_new)
            self._note(member, problem)
            lease_s = self.limits().lease_s
            await asyncio.sleep(lease_s if problem else LEASES_IF_REACHED * lease_s)

    async def _try(self, member: Member, *, is_new: bool) -> str:
        problem = ""
        for count in range(TRIES):
            if count:
                await asyncio.sleep(self.limits().heartbeat_s)
            try:
                async with nullcontext() if is_new else self._turn:
                    await self._probe(member)
                self.dialer.reached(member)
                return ""
            except AtollError as error:
                self.dialer.failed(member)
                problem = str(error)
        return problem

    def _note(self, member: Member, problem: str) -> None:
        before = self._unreachable()
        if problem:
            self._problems[member] = problem
        else:
            self._problems.pop(member, None)
        if self._unreachable() == before:
            return
        if problem:
            log.warning("%s; it cannot reduce for this site", problem)
        else:
            log.info("site %d can be dialled at %s now", member.site_id, member.address)
        self.found(self._unreachable())

    async def _probe(self, member: Member) -> None:
        await probe(self.dialer, self.header(), member, self.limits().connect_s)


async def probe(dialer: Dialer, header: Header, member: Member, limit_s: float) -> None:
    """`header`: of the one who asks. Raises PeerError, RefusedError or another of atoll's errors, with the reason."""
    where = f"cannot dial site {member.site_id} at {member.address}"
    channel = await dialer.channel(member, Purpose.PROBE)
    try:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            PROBE_METHOD, request_serializer=None, response_deserializer=None
        )
        with call_errors(where, member.site_id):
            async with asyncio.timeout(limit_s):
                data = await call(peer_pb2.ProbeRequest(header=wire.to_proto(header)).SerializeToString())
    except TimeoutError:
        raise PeerError(f"{where}: no answer within {limit_s:g} s", member.site_id) from None
    finally:
        dialer.disconnect(member, Purpose.PROBE)
    answer = wire.from_proto(Header, parse(peer_pb2.ProbeResponse, data).header)
    theirs = (answer.run_id, answer.site_id, answer.incarnation)
    ours = (header.run_id, member.site_id, member.incarnation)
    if theirs != ours:
        raise InvalidMessage(
            f"{where}: run {theirs[0]!r}, site {theirs[1]}, start {theirs[2]} answers there, not run {ours[0]!r}, "
            f"site {ours[1]}, start {ours[2]}"
        )
