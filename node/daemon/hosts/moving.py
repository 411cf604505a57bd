"""What moves between host 0 and the others beside their words: slices of SNAPSHOT, both ways, and payloads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import grpc
import grpc.aio

from atoll.node import host_protocol as hosts
from atoll.node.core import events as e
from atoll.node.core.host_events import SlicesArrived
from atoll.node.core.ranks.pieces import SitePieces
from atoll.node.daemon.hosts.attached import AttachedHost, Hosts
from atoll.node.daemon.hosts.leading_exchanges import LeadingExchanges
from atoll.node.daemon.hosts.link import heard, receive_slices, send_slices
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.dataplane.slices import Wanted, views
from atoll.node.local_protocol import Piece
from atoll.protocol import wire
from atoll.protocol.errors import AtollError, InvalidMessage, PeerError, RefusedError, StaleError
from atoll.protocol.layout import Layout
from atoll.protocol.status import abort
from atoll.protocol.time_limits import TimeLimits
from atoll.protocol.trust.names import host_number
from atoll.protocol.trust.security import Security
from atoll.protocol.v1 import hosts_pb2

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """What a generation of ranks holds, and the site's SNAPSHOT."""

    generation: int
    layout: Layout
    pieces: SitePieces
    snapshot: SharedBuffer
    tensors_of: tuple[frozenset[str], ...]
    """Those whose chunks each host has."""

    key: bytes
    """With which hosts ask each other for what these ranks wrote."""

    def pieces_for(self, host: int, ranks: range) -> list[Piece]:
        """What these ranks write of that host's tensors."""
        written = range(ranks.start, min(ranks.stop, len(self.pieces.owned)))
        return [p for rank in written for p in self.pieces.owned_by(rank) if p.name in self.tensors_of[host]]

    def pieces_from(self, rank: int, *, all_tensors: bool) -> list[Piece]:
        """What host 0 needs of a rank of another host: where it makes the state of it, all tensors."""
        return [p for p in self.pieces.owned_by(rank) if all_tensors or p.name in self.tensors_of[0]]


def refusing(answer: Callable[..., Any]) -> Callable[..., Any]:
    """What an answer raises is the host's answer."""

    @wraps(answer)
    async def refusing(service: Any, asked: Any, context: Context) -> Any:
        try:
            return await answer(service, asked, context)
        except AtollError as error:
            await abort(context, error)

    return refusing


@dataclass(eq=False, kw_only=True)
class Moving:
    attached: Hosts
    exchanges: LeadingExchanges
    limits: TimeLimits
    security: Security
    ranks_of: Callable[[int], range]
    """Of a host, by its number."""
    handle: Callable[[e.Event], None]
    give_up: Callable[[AttachedHost, str], None]
    """A host, and why."""
    laid_out: LaidOut | None = None
    """Of all hosts, once they know where their slices lie, and until these ranks are stopped."""

    @property
    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """By the method's name."""
        return {
            "PutSlices": grpc.stream_unary_rpc_method_handler(
                self.put_slices, hosts_pb2.PutSlicesRequest.FromString, hosts_pb2.PutSlicesResponse.SerializeToString
            ),
            "TakeSlices": grpc.unary_stream_rpc_method_handler(
                self.take_slices, hosts_pb2.TakeSlicesRequest.FromString, hosts_pb2.TakeSlicesResponse.SerializeToString
            ),
            "PutPayloads": grpc.stream_unary_rpc_method_handler(
                self.put_payloads,
                hosts_pb2.PutPayloadsRequest.FromString,
                hosts_pb2.PutPayloadsResponse.SerializeToString,
            ),
            "TakePayloads": grpc.unary_stream_rpc_method_handler(
                self.take_payloads,
                hosts_pb2.TakePayloadsRequest.FromString,
                hosts_pb2.TakePayloadsResponse.SerializeToString,
            ),
        }

    def _of_session(self, session: int, context: Context) -> AttachedHost:
        """Raises StaleError, RefusedError for another host than the one whose session that is."""
        host = next((host for host in self.attached.ready if host.session == session), None)
        if host is None:
            raise StaleError("what this host has, or asks for, is not wanted any more")
        caller = self.security.caller(context)
        if caller is not None and host_number(caller.subject.name) != host.number:
            raise RefusedError(f"{caller.subject} is not host {host.number}, whose session it says")
        return host

    def _laid_out(self, generation: int) -> LaidOut:
        """Raises StaleError."""
        if self.laid_out is None or self.laid_out.generation != generation:
            running = "none" if self.laid_out is None else f"generation {self.laid_out.generation}"
            raise StaleError(f"slices of generation {generation}; {running} is running")
        return self.laid_out

    # --- slices

    @refusing
    async def put_slices(self, _requests: Any, context: Context) -> hosts_pb2.PutSlicesResponse:
        """Into SNAPSHOT. A host whose slices do not come whole is given up: the snapshot would never be."""
        first = await heard(context.read, self.limits.stall_s, "a host of this site")
        opened = wire.from_proto(hosts.SlicesPut, first.open)
        host, laid_out = self._of_session(opened.session, context), self._laid_out(opened.generation)
        if opened.rank not in self.ranks_of(host.number):
            raise InvalidMessage(f"{host.words} has no rank {opened.rank}")
        wanted = Wanted(fragment=opened.fragment, with_frozen=opened.with_frozen)
        pieces = laid_out.pieces_from(opened.rank, all_tensors=opened.with_frozen)
        into = views(laid_out.layout, laid_out.snapshot.view, pieces, wanted)

        async def read() -> Any:
            part = await context.read()
            if laid_out is not self.laid_out or not self.attached.is_here(host):
                raise StaleError("these slices are not wanted any more")  # others may be on their way to their place
            return part

        try:
            await receive_slices(into, read, self.limits.stall_s, host.words)
        except (InvalidMessage, PeerError) as error:
            if self.attached.is_here(host):
                self.give_up(host, f"{host.words} is lost: {error}")
            raise
        self.handle(SlicesArrived(generation=opened.generation, rank=opened.rank, step=opened.step, seq=opened.seq))
        return hosts_pb2.PutSlicesResponse()

    @refusing
    async def take_slices(self, asked: hosts_pb2.TakeSlicesRequest, context: Context) -> None:
        """What ranks of host 0 wrote, from SNAPSHOT. That does not change until the host says that it has it, or until
        it is given up, and then written under another number."""
        host, laid_out = self._of_session(asked.session, context), self._laid_out(asked.generation)
        wanted = Wanted(fragment=asked.fragment, with_frozen=False)
        pieces = laid_out.pieces_for(host.number, self.ranks_of(0))
        found = views(laid_out.layout, laid_out.snapshot.view, pieces, wanted)
        await send_slices(found, hosts_pb2.TakeSlicesResponse, context.write, self.limits.stall_s, host.words)

    # --- payloads

    @refusing
    async def put_payloads(self, _requests: Any, context: Context) -> hosts_pb2.PutPayloadsResponse:
        """Into the log. They come when they are there; who beats is not silent."""
        first = await heard(context.read, self.limits.stall_s, "a host of this site")
        of = wire.from_proto(hosts.PayloadsOf, first.open)

        async def read() -> bytes | None:
            part = await context.read()
            return part.data if isinstance(part, hosts_pb2.PutPayloadsRequest) else None

        await self.exchanges.take(self._of_session(of.session, context), of, read)
        return hosts_pb2.PutPayloadsResponse()

    @refusing
    async def take_payloads(self, asked: hosts_pb2.TakePayloadsRequest, context: Context) -> None:
        of = wire.from_proto(hosts.PayloadsOf, asked.of)

        host = self._of_session(of.session, context)

        async def write(data: bytes) -> None:
            await context.write(hosts_pb2.TakePayloadsResponse(data=data))

        async def write_soon(data: bytes) -> None:
            if not self.attached.is_here(host):
                raise StaleError(f"{host.words} is not here any more")
            try:
                async with asyncio.timeout(self.limits.stall_s):
                    await write(data)
            except TimeoutError:
                raise PeerError(f"{host.words} does not take the payloads that it asked for") from None

        if asked.is_committed:
            await self.exchanges.give_committed(host, of, write_soon)
        else:
            await self.exchanges.give(host, of, write)
