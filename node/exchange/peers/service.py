"""PeerService: what other nodes may ask of this one. A thin shell; messages are parsed here so that refusals count."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from atoll.node.exchange.peers.frames import MAX_HAS_PAYLOADS, parse
from atoll.node.exchange.peers.rpc import SERVICE, NotRead, check_header
from atoll.node.exchange.sync.downstream import Context, Downstream
from atoll.node.exchange.sync.exchange import Exchange
from atoll.protocol import wire
from atoll.protocol.errors import AtollError, InvalidMessage, NotYetError, RefusedError
from atoll.protocol.messages import Member
from atoll.protocol.status import abort
from atoll.protocol.v1 import common_pb2, peer_pb2

if TYPE_CHECKING:
    from atoll.node.exchange.hub import Hub

log = logging.getLogger(__name__)

OPEN_WAIT_S = 10.0


class PeerService:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._streams: dict[tuple[int, int], asyncio.Task[Any]] = {}  # the newest of (sync, site)

    async def exchange(self, _requests: Any, context: Context) -> None:
        try:
            exchange, member, has_payloads = await self._open(context)
        except AtollError as error:
            await self._refuse(context, error)
            return
        key = (exchange.plan.sync, member.site_id)
        if (old := self._streams.get(key)) is not None:
            old.cancel()  # a peer has one stream; this one replaces a broken one
        stream = asyncio.create_task(Downstream(exchange, context, member, has_payloads).run())
        self._streams[key] = stream
        try:
            await asyncio.wait({stream})
            if stream.cancelled():
                await abort(context, NotYetError("another stream of this site replaced this one"))
            failure = stream.exception()
            if isinstance(failure, NotRead):
                log.warning("%s", failure)
                raise asyncio.CancelledError(str(failure))
            if isinstance(failure, InvalidMessage):
                self._hub.counters.refuse(failure)
            if isinstance(failure, AtollError):
                await abort(context, failure)
            stream.result()
        finally:
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
            if self._streams.get(key) is stream:
                del self._streams[key]

    async def _open(self, context: Context) -> tuple[Exchange, Member, set[int]]:
        request = parse(peer_pb2.ExchangeRequest, await _first_message(context))
        if request.WhichOneof("body") != "open":
            raise InvalidMessage("the first message of a stream must open it")
        if len(request.open.has_payloads) > MAX_HAS_PAYLOADS:
            raise InvalidMessage(f"{len(request.open.has_payloads)} payloads listed, at most {MAX_HAS_PAYLOADS} may be")
        exchange, member = await self._hub.find(request.open)
        return exchange, member, set(request.open.has_payloads)

    async def fetch_state(self, data: bytes, context: Context) -> None:
        try:
            request = parse(peer_pb2.FetchStateRequest, data)
            await self._give(self._hub.served_donor().state(request), request.header, context)
        except AtollError as error:
            await self._refuse(context, error)

    async def fetch_payloads(self, data: bytes, context: Context) -> None:
        try:
            request = parse(peer_pb2.FetchPayloadsRequest, data)
            await self._give(self._hub.served_donor().payloads(request), request.header, context)
        except AtollError as error:
            await self._refuse(context, error)

    async def donate(self, _requests: Any, context: Context) -> None:
        """A donor has dialled this site. Its stream is used by whoever expects it."""
        expected = self._hub.expected_donors
        try:
            request = parse(peer_pb2.DonateRequest, await _first_message(context))
            if request.WhichOneof("body") != "open":
                raise InvalidMessage("the first message of a stream must open it")
            check_header(request.open.header, self._hub.run_id)
            stream = expected.accept(request.open, self._hub.identity(), context)
        except AtollError as error:
            await self._refuse(context, error)
        try:
            await stream.over
        finally:
            expected.gone(stream)

    async def probe(self, data: bytes, context: Context) -> bytes:
        try:
            check_header(parse(peer_pb2.ProbeRequest, data).header, self._hub.run_id)
            return peer_pb2.ProbeResponse(header=wire.to_proto(self._hub.identity())).SerializeToString()
        except AtollError as error:
            await self._refuse(context, error)

    async def _give(self, frames: AsyncGenerator[bytes], header: common_pb2.Header, context: Context) -> None:
        try:
            who = f"site {header.site_id} ({context.peer()})"
            await self._hub.served_donor().give(frames, context.write, who)
        except NotRead as error:
            log.warning("%s", error)
            raise asyncio.CancelledError(str(error)) from None
        finally:
            await frames.aclose()  # its place is free again

    async def _refuse(self, context: Context, error: AtollError) -> NoReturn:
        if isinstance(error, RefusedError):
            self._hub.counters.refuse(error)
        await abort(context, error)


async def _first_message(context: Context) -> bytes:
    """Empty if there is none."""
    try:
        async with asyncio.timeout(OPEN_WAIT_S):
            data = await context.read()
    except TimeoutError:
        raise InvalidMessage(f"no first message within {OPEN_WAIT_S:.0f} s") from None
    return data if isinstance(data, bytes) else b""


def add_peer_service(hub: Hub, server: grpc.aio.Server) -> None:
    service = PeerService(hub)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Exchange": grpc.stream_stream_rpc_method_handler(service.exchange),
        "FetchState": grpc.unary_stream_rpc_method_handler(service.fetch_state),
        "FetchPayloads": grpc.unary_stream_rpc_method_handler(service.fetch_payloads),
        "Donate": grpc.stream_stream_rpc_method_handler(service.donate),
        "Probe": grpc.unary_unary_rpc_method_handler(service.probe),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
