"""PeerService: what other nodes may ask of this one. A thin shell; messages are parsed here so that refusals count."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

import grpc
import grpc.aio

from atoll.node.exchange.catchup.donor_server import Request
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.frames import MAX_HAS_PAYLOADS, parse
from atoll.node.exchange.peers.prober import probe
from atoll.node.exchange.peers.rpc import Context, NotRead, check_header
from atoll.node.exchange.sync.downstream import Downstream
from atoll.node.exchange.sync.exchange import Exchange
from atoll.node.exchange.sync.reduction import MAX_STREAMS
from atoll.node.tasks import end
from atoll.protocol import wire
from atoll.protocol.errors import AtollError, InvalidMessage, NotYetError, RefusedError
from atoll.protocol.measuring import MAX_S, MAX_SITES, PACE, Measures, Write
from atoll.protocol.messages import Header, Member
from atoll.protocol.pace import Buckets
from atoll.protocol.status import abort, cut_off
from atoll.protocol.text import clean
from atoll.protocol.v1 import peer_pb2

log = logging.getLogger(__name__)
T = TypeVar("T")
Opening = TypeVar("Opening", peer_pb2.ExchangeRequest, peer_pb2.DonateRequest)
Answer = Callable[["PeerService", Any, Context], Coroutine[Any, Any, T]]

OPEN_WAIT_S = 10.0
DIAL_LIMIT_S = 5.0
"""For a caller that wants to know whether it can be dialled."""
MAX_ADDRESS = 256


def _refusing(answer: Answer[T]) -> Answer[T]:
    """What an answer raises is the peer's answer; a peer that does not read is not waited for."""

    @wraps(answer)
    async def refusing(service: PeerService, asked: Any, context: Context) -> T:
        try:
            return await answer(service, asked, context)
        except asyncio.CancelledError:
            if reason := service.hub.claims.ban_of(context):  # else the call stays open, in silence
                await cut_off(context, RefusedError(reason))
            raise
        except NotRead as error:
            log.warning("%s", error)
            await cut_off(context, error)
        except AtollError as error:
            if isinstance(error, RefusedError):
                service.hub.counters.refuse(error)
            await abort(context, error)

    return refusing


class PeerService:
    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._dials = Buckets[str](PACE, MAX_SITES)
        self._measures = Measures(
            hub.run_id,
            hub.claims.security,
            check=lambda context, header: hub.claims.check(context, header.site_id),
            give=self._give_in_turn,
        )
        self._streams: dict[tuple[Exchange, int], dict[int, asyncio.Task[Any]]] = {}  # of a site: the newest by range

    @property
    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """By the method's name."""
        return {
            "Exchange": grpc.stream_stream_rpc_method_handler(self.exchange),
            "FetchState": grpc.unary_stream_rpc_method_handler(self.fetch_state),
            "FetchPayloads": grpc.unary_stream_rpc_method_handler(self.fetch_payloads),
            "Donate": grpc.stream_stream_rpc_method_handler(self.donate),
            "Probe": grpc.unary_unary_rpc_method_handler(self.probe),
            "DialMe": grpc.unary_unary_rpc_method_handler(self.dial_me),
            "Measure": grpc.stream_stream_rpc_method_handler(self._measures.answer),
        }

    @_refusing
    async def exchange(self, _requests: Any, context: Context) -> None:
        request = await _first_message(peer_pb2.ExchangeRequest, context)
        self.hub.claims.check(context, request.open.header.site_id)
        if len(request.open.has_payloads) > MAX_HAS_PAYLOADS:
            raise InvalidMessage(f"{len(request.open.has_payloads)} payloads listed, at most {MAX_HAS_PAYLOADS} may be")
        exchange, member = await self.hub.find(request.open)
        self.hub.claims.check(context, member.site_id)  # a stream that came before its plan has been named by it
        ids = range(request.open.first_chunk, request.open.first_chunk + request.open.num_chunks)
        key = exchange, member.site_id  # what hangs of another attempt has other ranges, and takes no place
        streams = self._streams.setdefault(key, {})
        if (old := streams.get(ids.start)) is not None:
            old.cancel()  # a peer has one stream for a range; this one replaces a broken one
        elif len(streams) >= MAX_STREAMS * (1 + len(member.endpoints)):
            raise NotYetError(f"site {member.site_id} has {len(streams)} streams of sync {exchange.plan.sync} here")
        stream = asyncio.create_task(Downstream(exchange, context, member, ids, set(request.open.has_payloads)).run())
        streams[ids.start] = stream
        try:
            await asyncio.wait({stream})
            if stream.cancelled():
                raise NotYetError("another stream of this site replaced this one")
            failure = stream.exception()
            if isinstance(failure, RefusedError) and not isinstance(failure, InvalidMessage):
                await abort(context, failure)  # the exchange is over: nothing that the peer sent was refused
            stream.result()
        finally:
            await end([stream])
            if streams.get(ids.start) is stream:
                del streams[ids.start]
            if not streams and self._streams.get(key) is streams:
                del self._streams[key]

    @_refusing
    async def fetch_state(self, data: bytes, context: Context) -> None:
        await self._give(parse(peer_pb2.FetchStateRequest, data), context)

    @_refusing
    async def fetch_payloads(self, data: bytes, context: Context) -> None:
        await self._give(parse(peer_pb2.FetchPayloadsRequest, data), context)

    @_refusing
    async def donate(self, _requests: Any, context: Context) -> None:
        """A donor has dialled this site. Its stream is used by whoever expects it."""
        expected = self.hub.expected_donors
        request = await _first_message(peer_pb2.DonateRequest, context)
        check_header(request.open.header, self.hub.run_id)
        self.hub.claims.check(context, request.open.header.site_id)
        stream = expected.accept(request.open, self.hub.identity(), context)
        try:
            await stream.over
        finally:
            expected.gone(stream)

    @_refusing
    async def probe(self, data: bytes, context: Context) -> bytes:
        header = parse(peer_pb2.ProbeRequest, data).header
        check_header(header, self.hub.run_id)
        self.hub.claims.check(context, header.site_id)
        return peer_pb2.ProbeResponse(header=wire.to_proto(self.hub.identity())).SerializeToString()

    @_refusing
    async def dial_me(self, data: bytes, context: Context) -> bytes:
        """Within the queue of that address, as where a member says to be there."""
        request = parse(peer_pb2.DialMeRequest, data)
        check_header(request.header, self.hub.run_id)
        self.hub.claims.check(context, request.header.site_id)
        caller = self.hub.claims.security.caller(context)
        if caller is None:
            raise RefusedError("sites with certificates are dialled; this run is in plain text")
        if not self._dials.take(caller.subject.name, asyncio.get_running_loop().time()):
            raise NotYetError(f"{caller.subject} was dialled {PACE.at_once} times just now: try again in a minute")
        asked = wire.from_proto(Header, request.header)
        address, name = request.address[:MAX_ADDRESS], caller.subject.name
        member = Member(site_id=asked.site_id, incarnation=asked.incarnation, address=address, name=name)
        problem = ""
        try:
            await probe(self.hub.dialer, self.hub.identity(), member, DIAL_LIMIT_S)
        except AtollError as error:
            problem = clean(str(error))
        return peer_pb2.DialMeResponse(problem=problem).SerializeToString()

    async def _give_in_turn(self, write: Write, frame: bytes) -> None:
        """As to somebody who catches up: after an exchange."""
        async with self.hub.uplink.give(len(frame), MAX_S):
            self.hub.counters.sent_bytes += len(frame)
            await write(frame)

    async def _give(self, request: Request, context: Context) -> None:
        self.hub.claims.check(context, request.header.site_id)
        who = f"site {request.header.site_id} ({context.peer()})"
        await self.hub.served_donor().give(request, context.write, who)


async def _first_message(cls: type[Opening], context: Context) -> Opening:
    """Raises InvalidMessage unless it opens the stream."""
    try:
        async with asyncio.timeout(OPEN_WAIT_S):
            data = await context.read()
    except TimeoutError:
        raise InvalidMessage(f"no first message within {OPEN_WAIT_S:.0f} s") from None
    request = parse(cls, data if isinstance(data, bytes) else b"")
    if request.WhichOneof("body") != "open":
        raise InvalidMessage("the first message of a stream must open it")
    return request
