"""Slices of SNAPSHOT between two hosts of a site of which neither is host 0, on the site's own network.

Each host serves what its own ranks have sealed, and takes what ranks of all others wrote of its tensors from the hosts
of these ranks. So no slice travels twice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from atoll.node import host_protocol as hosts
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.discover import local_address_towards
from atoll.node.daemon.hosts.link import IDLE_LIMIT_S, most_connections, receive_slices, send_slices
from atoll.node.daemon.hosts.moving import Context, refusing
from atoll.node.daemon.plane import DataPlane
from atoll.node.dataplane.slices import Items, Wanted, views
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.rpc import SERVICE
from atoll.node.exchange.service import PeerService
from atoll.node.local_protocol import Piece
from atoll.node.tasks import together
from atoll.protocol import addresses, transport, wire
from atoll.protocol.errors import InvalidMessage, RefusedError, StaleError
from atoll.protocol.status import error_of
from atoll.protocol.time_limits import TimeLimits
from atoll.protocol.trust.access import WITHIN_SITE, guarded
from atoll.protocol.trust.names import Kind, host_number, host_of_site
from atoll.protocol.trust.security import Caller, Security
from atoll.protocol.v1 import hosts_pb2

log = logging.getLogger("atoll.node")

Call = grpc.aio.UnaryStreamCall[Any, Any]
STOP_S = 0.5
LEADER = "host 0 of this site"


class SlicesServed:
    """`written_for` gives what is asked for, or raises what the asking host is told."""

    def __init__(
        self,
        config: NodeConfig,
        security: Security,
        limits: TimeLimits,
        hub: Hub,
        written_for: Callable[[hosts.TakeFromHostRequest], Iterable[Items]],
    ) -> None:
        self._config = config
        self._security = security
        self._limits = limits
        self._peers = PeerService(hub)
        self._written_for = written_for

    async def open(self, stack: AsyncExitStack) -> str:
        """The address, on the network by which this host reaches host 0. `stack` ends it."""
        config = self._config
        server = transport.create_server(
            max_message_bytes=transport.MAX_FRAME_BYTES,
            max_connections=most_connections(config.site_hosts),
            idle_limit_s=IDLE_LIMIT_S,
        )
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "TakeFromHost": grpc.unary_stream_rpc_method_handler(
                self.take_from_host,
                hosts_pb2.TakeFromHostRequest.FromString,
                hosts_pb2.TakeFromHostResponse.SerializeToString,
            )
        }
        of_peers = {"FetchPayloads": self._peers.handlers["FetchPayloads"]}  # host 0 asks for what is kept here
        for service, found in ((hosts.SERVICE, handlers), (SERVICE, of_peers)):
            allowed = guarded(service, found, self._security, self._refusal, may_call=WITHIN_SITE)
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, allowed),))
        here = await asyncio.to_thread(local_address_towards, config.site_address)
        port = transport.bind(server, addresses.join_address(here, 0), self._security.of_server())
        await server.start()
        stack.push_async_callback(server.stop, STOP_S)
        return addresses.join_address(here, port)

    def _refusal(self, caller: Caller) -> str:
        """Of whoever has a certificate of another site."""
        return "" if caller.subject.site == self._config.name else f"{caller.subject} is no host of {self._config.name}"

    @refusing
    async def take_from_host(self, asked: hosts_pb2.TakeFromHostRequest, context: Context) -> None:
        of = wire.from_proto(hosts.TakeFromHostRequest, asked)
        caller = self._security.caller(context)
        if caller is not None and host_number(caller.subject.name) != of.host:
            raise RefusedError(f"{caller.subject} asks for slices of host {of.host}")
        found, who = self._written_for(of), f"host {of.host} of this site"
        await send_slices(found, hosts_pb2.TakeFromHostResponse, context.write, self._limits.stall_s, who)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """A host whose ranks write of this host's tensors."""

    number: int
    address: str
    pieces: tuple[Piece, ...]


class SlicesTaken:
    """Of one host: what it knows of others from the layout of their ranks."""

    def __init__(self, config: NodeConfig, security: Security) -> None:
        self._config = config
        self._security = security
        self._generation = 0
        self._key = b""
        self._writers: tuple[_Writer, ...] = ()
        self._channels: dict[str, grpc.aio.Channel] = {}  # by address
        self._opened_for = 0  # the generation

    def lay_out(self, told: hosts.SiteLaidOut) -> None:
        """Raises InvalidMessage."""
        counts, where, own = told.num_pieces, told.host_addresses, self._config.site_rank
        if not len(counts) == len(where) == self._config.site_hosts or sum(counts) != len(told.pieces):
            raise InvalidMessage(f"{len(told.pieces)} pieces of {len(counts)} hosts that are at {len(where)} addresses")
        rest = iter(told.pieces)
        writers = [
            _Writer(number=number, address=address, pieces=tuple(itertools.islice(rest, count)))
            for number, (count, address) in enumerate(zip(counts, where, strict=True))
        ]
        others = [writer for writer in writers[1:] if writer.pieces]
        if writers[own].pieces or not all(addresses.is_plain(writer.address) for writer in others):
            raise InvalidMessage("pieces of hosts without an address, or of this host itself")
        self._generation, self._key, self._writers = told.generation, told.key, (writers[0], *others)

    async def take(
        self, job: hosts.TakeSnapshot, plane: DataPlane, leader: grpc.aio.Channel, session: int, stall_s: float
    ) -> bool:
        """What ranks of other hosts wrote of this one's tensors, into its own SNAPSHOT. False if that snapshot is not
        wanted any more. Raises PeerError, naming the host that does not give it."""
        if job.generation != self._generation:
            return False
        if self._opened_for != job.generation:  # by what is shown now
            await self.close()
            self._opened_for = job.generation
        assert plane.snapshot is not None
        wanted, taking = Wanted(fragment=job.fragment, with_frozen=False), []
        for writer in self._writers:
            into = list(views(plane.layout, plane.snapshot.view, writer.pieces, wanted))
            if writer.number == 0:
                taking.append(_received(_asked_of_leader(leader, job, session), into, stall_s, LEADER))
            elif into:
                who = f"host {writer.number} of this site at {writer.address}"
                taking.append(_received(self._asked(writer, job), into, stall_s, who))
        try:
            await together(taking)
        except StaleError as error:  # those ranks are gone, or another program answers at that address
            log.warning("no slices of step %d: %s", job.step, error)
            return False
        return True

    def _asked(self, writer: _Writer, job: hosts.TakeSnapshot) -> Call:
        method: grpc.aio.UnaryStreamMultiCallable[Any, Any] = self._channel(writer).unary_stream(
            hosts.TAKE_FROM_HOST_METHOD,
            request_serializer=hosts_pb2.TakeFromHostRequest.SerializeToString,
            response_deserializer=hosts_pb2.TakeFromHostResponse.FromString,
        )
        own = self._config.site_rank
        return method(
            hosts_pb2.TakeFromHostRequest(host=own, key=self._key, fragment=job.fragment, step=job.step, seq=job.seq)
        )

    def _channel(self, writer: _Writer) -> grpc.aio.Channel:
        if writer.address not in self._channels:
            handshake = self._security.towards(Kind.HOST, host_of_site(self._config.name, writer.number))
            self._channels[writer.address] = transport.open_channel(
                writer.address, handshake=handshake, max_message_bytes=transport.MAX_FRAME_BYTES
            )
        return self._channels[writer.address]

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()


def _asked_of_leader(leader: grpc.aio.Channel, job: hosts.TakeSnapshot, session: int) -> Call:
    method: grpc.aio.UnaryStreamMultiCallable[Any, Any] = leader.unary_stream(
        hosts.TAKE_METHOD,
        request_serializer=hosts_pb2.TakeSlicesRequest.SerializeToString,
        response_deserializer=hosts_pb2.TakeSlicesResponse.FromString,
    )
    of = {"generation": job.generation, "fragment": job.fragment, "step": job.step, "seq": job.seq}
    return method(hosts_pb2.TakeSlicesRequest(session=session, **of))


async def _received(call: Call, into: list[Items], stall_s: float, who: str) -> None:
    try:
        await receive_slices(into, call.read, stall_s, who)
    except grpc.RpcError:
        raise error_of(await call.code(), await call.details() or "", who) from None
    finally:
        call.cancel()
