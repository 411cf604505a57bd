"""What `atoll doctor` finds out about links, as a site that has joined: how fast they are to the coordinator and to
some of the sites, and whether one of these can dial this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.protocol.errors import AtollError, NotYetError

if TYPE_CHECKING:
    import grpc.aio

    from atoll.node.daemon.doctor import Finding
    from atoll.node.exchange.peers.dialer import Dialer
    from atoll.protocol.machine import Machine
    from atoll.protocol.measuring import Speed
    from atoll.protocol.messages import Header, Member
    from atoll.protocol.trust.enrolled import Enrolled
    from atoll.protocol.trust.security import MutualTls

MOST_MEASURED = 3
"""Sites. Each takes some seconds."""
TRIES, PAUSE_S = 4, 1.5
"""Of a link that somebody else measures."""
DIAL_BACK_LIMIT_S = 12.0
MOST_ASKED = 4
"""Sites, to dial this machine: each that does not answer takes as long as that."""
MOST_CHARACTERS = 256
"""Of what a site says."""
MEASURE_METHOD = "/atoll.protocol.v1.CoordinatorService/Measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    joined: Enrolled
    coordinator: str
    document: dict[str, Any]
    """The run's status."""
    machine: Machine
    listen: str
    """Where others are to try to dial this machine; empty: they are not."""
    advertise: str

    @property
    def name(self) -> str:
        return self.joined.subject.name

    @property
    def header(self) -> Header:
        from atoll.protocol import PROTOCOL_VERSION
        from atoll.protocol.messages import Header

        known = [site["site_id"] for site in self.document["sites"] if site["name"] == self.name]
        return Header(
            protocol_version=PROTOCOL_VERSION,
            run_id=self.joined.subject.run_id,
            term=0,
            site_id=known[0] if known else 0,
            incarnation=0,
        )

    def others(self) -> list[Member]:
        """Sites that are here."""
        from atoll.protocol.messages import Member

        return [
            Member(site_id=site["site_id"], incarnation=0, address=site["address"], name=site["name"])
            for site in self.document["sites"]
            if site["connected"] and site["site_id"] and site["name"] != self.name
        ]


def findings(asked: Asked) -> list[Finding]:
    return asyncio.run(_found(asked))


async def _found(asked: Asked) -> list[Finding]:
    from atoll.node.daemon import doctor
    from atoll.protocol.trust.joining import renew
    from atoll.protocol.trust.names import Kind, Subject
    from atoll.protocol.trust.security import MutualTls

    run_id = asked.joined.subject.run_id
    before_coordinator = MutualTls(run_id, asked.joined.shown)
    found = [await _to_coordinator(asked, before_coordinator)]
    try:
        subject = Subject(run_id, Kind.SITE, asked.name)
        shown = await renew(before_coordinator, [asked.coordinator], subject, asked.machine.network)
    except AtollError as error:
        return [*found, doctor.unknown("links", str(error))]
    among_sites = MutualTls(run_id, shown)
    async with _dialling(asked.machine, among_sites) as dialer:
        speeds: list[Speed] = []
        for member in asked.others()[:MOST_MEASURED]:
            found.append(await _to_site(asked, dialer, member, speeds))
        if speeds:
            found += doctor.all_links(speeds, _slowest_bytes_per_s(asked))
        if asked.listen:
            found.append(await _dialled_back(asked, dialer, among_sites))
    return found


@asynccontextmanager
async def _dialling(machine: Machine, tls: MutualTls) -> AsyncIterator[Dialer]:
    from atoll.node.exchange.peers.dialer import Dialer
    from atoll.node.relay.client import RelayClient

    relays = RelayClient(tls, machine)
    dialer = Dialer(machine.network, tls, relays)
    try:
        yield dialer
    finally:
        await dialer.close()
        relays.close()


async def _to_coordinator(asked: Asked, tls: MutualTls) -> Finding:
    from atoll.node.daemon import doctor
    from atoll.protocol.transport import MAX_FRAME_BYTES
    from atoll.protocol.trust.names import Kind

    network, handshake = asked.machine.network, tls.towards(Kind.COORDINATOR)
    async with network.open_channel(
        asked.coordinator, handshake=handshake, max_message_bytes=MAX_FRAME_BYTES
    ) as channel:
        try:
            speed = await _measured(asked, channel, MEASURE_METHOD, "the coordinator")
        except AtollError as error:
            return doctor.unknown("link", str(error))
    return doctor.coordinators_link(speed)


async def _to_site(asked: Asked, dialer: Dialer, member: Member, speeds: list[Speed]) -> Finding:
    """Its speed is one of `speeds` then."""
    from atoll.node.daemon import doctor
    from atoll.node.exchange.peers.dialer import Purpose
    from atoll.node.exchange.peers.rpc import MEASURE_METHOD as OF_PEERS

    try:
        channel = await dialer.channel(member, Purpose.FETCH)
        speed = await _measured(asked, channel, OF_PEERS, f"site {member.name} at {member.address}")
    except AtollError as error:
        return doctor.unknown(f"link to {member.name}", str(error))
    speeds.append(speed)
    return doctor.link(member.name, speed, int(asked.document["contribution_bytes"]), _slowest_bytes_per_s(asked))


def _slowest_bytes_per_s(asked: Asked) -> int:
    from atoll.protocol.time_limits import time_limits

    return time_limits(str(asked.document["settings"]["time_limits"])).slowest_bytes_per_s


async def _measured(asked: Asked, channel: grpc.aio.Channel, method: str, where: str) -> Speed:
    """Again in a moment where another's link is measured. Raises AtollError."""
    from atoll.protocol import wire
    from atoll.protocol.measuring import measured

    return await _again(lambda: measured(channel, method, wire.to_proto(asked.header), where))


async def _again(ask: Callable[[], Coroutine[Any, Any, Speed]]) -> Speed:
    for _ in range(TRIES - 1):
        try:
            return await ask()
        except NotYetError:
            await asyncio.sleep(PAUSE_S)
    return await ask()


async def _dialled_back(asked: Asked, dialer: Dialer, tls: MutualTls) -> Finding:
    """By the first site that can be asked, which dials what this machine would advertise."""
    from atoll.node.daemon import doctor
    from atoll.node.exchange.peers.dialer import Purpose
    from atoll.node.exchange.peers.frames import parse
    from atoll.node.exchange.peers.rpc import DIAL_ME_METHOD, call_errors
    from atoll.protocol import wire
    from atoll.protocol.text import clean
    from atoll.protocol.v1 import peer_pb2

    async with AsyncExitStack() as stack:
        address = await _listening(asked, tls, stack)
        request = peer_pb2.DialMeRequest(header=wire.to_proto(asked.header), address=address).SerializeToString()
        said = "no other site is here to try it"
        for member in asked.others()[:MOST_ASKED]:
            try:
                channel = await dialer.channel(member, Purpose.PROBE)
                call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                    DIAL_ME_METHOD, request_serializer=None, response_deserializer=None
                )
                with call_errors(f"site {member.name}", member.site_id):
                    answer = parse(peer_pb2.DialMeResponse, await call(request, timeout=DIAL_BACK_LIMIT_S))
            except AtollError as error:
                said = str(error)
                continue
            return doctor.dialled_back(member.name, address, clean(answer.problem[:MOST_CHARACTERS]))
        return doctor.unknown("dial-back", f"{address}: {said}")
    raise AssertionError("the stack swallows nothing")


async def _listening(asked: Asked, tls: MutualTls, stack: AsyncExitStack) -> str:
    """As the node would, and answers probes; what it would advertise. Raises HostError or ConfigError."""
    import grpc

    from atoll.node.daemon.discover import address_for_peers
    from atoll.node.exchange.peers.listener import listen
    from atoll.protocol import wire
    from atoll.protocol.v1 import peer_pb2

    async def probe(_data: bytes, _context: Any) -> bytes:
        return peer_pb2.ProbeResponse(header=wire.to_proto(asked.header)).SerializeToString()

    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Probe": grpc.unary_unary_rpc_method_handler(probe)}
    server, port = await listen(asked.listen, handlers, asked.machine.network, security=tls)
    stack.push_async_callback(server.stop, 0.2)
    return asked.advertise or address_for_peers(asked.listen, port, asked.coordinator)
