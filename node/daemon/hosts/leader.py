"""Host 0 of a site of several hosts: serves the others, whose ranks are to the node as those of its own.

The other hosts dial in. What their ranks say comes as frames of their local sockets; what ranks have sealed is put into
the site's SNAPSHOT, and what is published is taken from its PUBLISH. The node's core hears which hosts are missing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import grpc
import grpc.aio

from atoll.node import host_protocol as hosts
from atoll.node.core import events as e
from atoll.node.core.ranks.pieces import SitePieces
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.hosts.link import Outbox, heard, receive_slices, send_slices, while_heard
from atoll.node.daemon.rank_commands import Meeting
from atoll.node.daemon.rank_connection import FLUSH_S, Connection
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.dataplane.slices import Wanted, views
from atoll.node.local_protocol import LENGTH_BYTES
from atoll.node.tasks import end
from atoll.protocol import PROTOCOL_VERSION, addresses, transport, wire
from atoll.protocol.errors import AtollError, InvalidMessage, PeerError, RefusedError, StaleError
from atoll.protocol.layout import Layout
from atoll.protocol.machine import Network
from atoll.protocol.settings import RunSettings, settings_to_json
from atoll.protocol.status import abort
from atoll.protocol.time_limits import TimeLimits
from atoll.protocol.v1 import hosts_pb2

log = logging.getLogger("atoll.node")

Context = grpc.aio.ServicerContext[Any, Any]
STOP_S = 0.5
CLOSE_LIMIT_S = 5.0
"""For the hosts to hear that the site has ended."""
IDLE_LIMIT_S = 86_400.0
"""Of connections for slices, between two windows."""
MAX_FRAMES = 1024
"""Of one rank, that wait to be read."""

IS_OPEN = (
    "%s is open to the network without credentials, and so is the store in which the ranks of the site's hosts meet: "
    "let nobody but these hosts reach them"
)


Ranks = dict[int, "RankElsewhere"]
"""Of a host, by the number of the connection."""


class RankElsewhere(Connection):
    """A rank of another host."""

    def __init__(self, number: int, may_be: range, outbox: Outbox[hosts_pb2.AttachResponse], of: Ranks) -> None:
        """`of`: those of its host, by their numbers, of which it is one until it is closed."""
        super().__init__(may_be)
        self._number, self._of = number, of
        self._outbox = outbox
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()

    def came(self, frame: bytes) -> None:
        """From the rank. Raises InvalidMessage where it says more than this node can read."""
        if self._frames.qsize() >= MAX_FRAMES:
            raise InvalidMessage(f"{MAX_FRAMES} messages of a rank wait to be read")
        self._frames.put_nowait(frame)

    def ended(self) -> None:
        """At the rank's end."""
        self._frames.put_nowait(None)

    def send_frame(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        """Its host has buffers of its own to pass on."""
        self._outbox.say(hosts.RankFrame(connection=self._number, data=frame[LENGTH_BYTES:]))

    async def read_frame(self) -> bytes | None:
        return await self._frames.get()

    async def write_all(self) -> None:
        await asyncio.get_running_loop().create_future()  # the host's stream does

    async def flush(self) -> None:
        await self._outbox.flush(FLUSH_S)

    def shut(self) -> None:
        self._outbox.say(hosts.RankClosed(connection=self._number))
        self.ended()

    def close(self) -> None:
        self._of.pop(self._number, None)
        self._outbox.say(hosts.RankClosed(connection=self._number))


@dataclass(slots=True, kw_only=True)
class _Host:
    number: int
    process: bytes
    session: int
    words: str  # for people
    outbox: Outbox[hosts_pb2.AttachResponse]
    lost: asyncio.Future[str]  # why, if the leader gives it up
    ranks: Ranks
    has_frozen: bool = False  # of this generation's ranks
    taken: int = 0  # the last number that is in its PUBLISH


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """What a generation of ranks holds, and the buffers of the site."""

    generation: int
    layout: Layout
    pieces: SitePieces
    snapshot: SharedBuffer
    publish: SharedBuffer


def _refusing(answer: Callable[..., Any]) -> Callable[..., Any]:
    """What an answer raises is the host's answer."""

    @wraps(answer)
    async def refusing(leader: Leader, asked: Any, context: Context) -> Any:
        try:
            return await answer(leader, asked, context)
        except AtollError as error:
            await abort(context, error)

    return refusing


class Leader:
    """A site of one host has one too, which listens nowhere and waits for nobody."""

    def __init__(
        self,
        config: NodeConfig,
        settings: RunSettings,
        limits: TimeLimits,
        handle: Callable[[e.Event], None],
        network: Network = transport,
    ) -> None:
        self._config = config
        self._settings = settings
        self._limits = limits
        self._connected: Callable[[Connection], None] = Connection.close
        self._handle = handle
        self._network = network
        self._server: grpc.aio.Server | None = None
        self._hosts: dict[int, _Host] = {}
        self._sessions = itertools.count(1)
        self.ranks: LaidOut | None = None
        """Of all hosts, once they know where their slices lie, and until they are stopped."""
        self._published: tuple[int, Wanted] | None = None
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()  # a host has taken what was published, or is lost
        self._generation = 0
        self._exited: dict[int, e.WorkersExited] = {}  # by host, how the ranks of this generation ended

    async def open(self, connected: Callable[[Connection], None]) -> None:
        """`connected`: is given each rank of another host. Raises HostError if the address cannot be had."""
        config, self._connected = self._config, connected
        if config.site_hosts == 1:
            return
        self._server = server = self._network.create_server(
            max_message_bytes=hosts.MAX_MESSAGE_BYTES,
            max_connections=4 * config.site_hosts,
            idle_limit_s=IDLE_LIMIT_S,
        )
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Attach": grpc.stream_stream_rpc_method_handler(
                self.attach, hosts_pb2.AttachRequest.FromString, hosts_pb2.AttachResponse.SerializeToString
            ),
            "PutSlices": grpc.stream_unary_rpc_method_handler(
                self.put_slices, hosts_pb2.PutSlicesRequest.FromString, hosts_pb2.PutSlicesResponse.SerializeToString
            ),
            "TakeSlices": grpc.unary_stream_rpc_method_handler(
                self.take_slices, hosts_pb2.TakeSlicesRequest.FromString, hosts_pb2.TakeSlicesResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(hosts.SERVICE, handlers),))
        transport.bind(server, config.site_address, None)
        await server.start()
        log.info("waiting for %d other hosts of this site at %s", config.site_hosts - 1, config.site_address)
        if not addresses.is_loopback(config.site_address):
            log.warning(IS_OPEN, config.site_address)

    async def close(self, exit_code: int, text: str) -> None:
        """The hosts hear how the site ended. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        there = list(self._hosts.values())
        for host in there:
            host.outbox.say(hosts.SiteEnded(exit_code=exit_code, text=text[:4096]))
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                while self._hosts:  # until each has heard it, and ended its stream
                    self._changed.clear()
                    await self._changed.wait()
        await server.stop(STOP_S)

    # --- what the node says

    def start(self, generation: int, meeting: Meeting | None) -> None:
        """Ranks on the other hosts, too."""
        self._generation, self._published, self._exited = generation, None, {}
        self._end_ranks()
        for host in self._hosts.values():
            assert meeting is not None
            host.has_frozen = False
            host.outbox.say(
                hosts.StartRanks(generation=generation, store_address=meeting.address, group_name=meeting.group_name)
            )

    def stop(self) -> None:
        """All ranks of the last start."""
        self._end_ranks()
        for host in self._hosts.values():
            host.outbox.say(hosts.StopRanks(generation=self._generation))

    def laid_out(self, pieces: SitePieces, layout: Layout, snapshot: SharedBuffer, publish: SharedBuffer) -> None:
        """The ranks that were started last are about to be told where their slices lie."""
        self.ranks = LaidOut(
            generation=self._generation, layout=layout, pieces=pieces, snapshot=snapshot, publish=publish
        )

    async def publish(self, ranks: LaidOut | None, fragment: int, num_moments: int) -> None:
        """Returns when all hosts have what PUBLISH holds of the fragment. Hosts that are lost meanwhile are not waited
        for, and none is once these ranks are stopped: new ones take everything anew."""
        told = list(self._hosts.values())
        if ranks is None or ranks is not self.ranks or not told:
            return
        number = next(self._numbers)
        with_frozen = not all(host.has_frozen for host in told)
        self._published = number, Wanted(fragment=fragment, with_frozen=with_frozen, num_moments=num_moments)
        for host in told:
            host.outbox.say(hosts.SlicesPublished(generation=ranks.generation, number=number))
        while ranks is self.ranks and any(host.taken < number and self._is_here(host) for host in told):
            self._changed.clear()
            await self._changed.wait()
        for host in told:
            host.has_frozen |= ranks is self.ranks

    def _end_ranks(self) -> None:
        self.ranks = None
        self._changed.set()

    def _is_here(self, host: _Host) -> bool:
        """Not lost, and not attached anew since."""
        return self._hosts.get(host.number) is host

    def exited(self, event: e.WorkersExited, host: int = 0) -> None:
        """The ranks of one host. Where they ended well, those of other hosts may still be at what follows the run."""
        if event.generation != self._generation:
            return
        self._exited[host] = event
        if event.code or len(self._exited) == self._config.site_hosts:
            self._handle(event)

    # --- what hosts ask for

    @_refusing
    async def attach(self, _requests: Any, context: Context) -> None:
        """Until either end is gone."""
        lease_s = self._limits.lease_s
        first = hosts.heard_of_host(await heard(context.read, lease_s, "a host of this site"))
        if not isinstance(first, hosts.HostHello):
            raise InvalidMessage("a host of this site says who it is first")
        self._check(first)
        outbox = Outbox(hosts.told, lease_s)
        words = f"host {first.host} of this site" + (f" ({first.machine})" if first.machine else "")
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        host = _Host(
            number=first.host,
            process=first.process,
            session=next(self._sessions),
            words=words,
            outbox=outbox,
            lost=lost,
            ranks={},
        )
        if (before := self._hosts.get(first.host)) is not None:
            if before.process != first.process:
                raise PeerError(f"another process is {before.words} still, and is waited for, at most {lease_s:g} s")
            self._leave(before, f"{words} attaches anew")
        self._hosts[host.number] = host
        outbox.say(
            hosts.HostWelcome(
                run_id=self._settings.run_id, settings_json=settings_to_json(self._settings), session=host.session
            )
        )
        log.info("%s is here", words)
        self._tell_core("")
        why = f"{words} is lost"
        try:
            await while_heard(self._hear_all(host, context), outbox.write_all(context.write))
            why = host.lost.result() if host.lost.done() else why
        except (AtollError, grpc.RpcError) as error:
            why = f"{words} is lost: {error}"
        finally:
            if self._is_here(host):
                self._leave(host, why)

    def _check(self, hello: hosts.HostHello) -> None:
        """Raises RefusedError, with what to change."""
        config = self._config
        for ours, theirs, what in (
            (PROTOCOL_VERSION, hello.protocol_version, "version of the protocol; run both from one release of atoll"),
            (config.name, hello.site_name, "--name"),
            (config.site_hosts, hello.num_hosts, "--site-hosts"),
            (config.num_ranks, hello.num_ranks, "number of ranks on each host (--ranks)"),
        ):
            if ours != theirs:
                raise RefusedError(f"host 0 of this site has {ours!r}, this host {theirs!r}: {what}")
        if not 0 < hello.host < config.site_hosts:
            raise RefusedError(f"--site-rank {hello.host}: others than host 0 are 1 to {config.site_hosts - 1}")

    async def _hear_all(self, host: _Host, context: Context) -> None:
        """Until it is given up. Raises PeerError when it is gone, InvalidMessage for what makes no sense."""
        reading = asyncio.create_task(self._read_all(host, context))
        given_up = asyncio.create_task(asyncio.wait({host.lost}))
        try:
            await asyncio.wait({reading, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            await end([reading, given_up])

    async def _read_all(self, host: _Host, context: Context) -> None:
        while True:
            said = hosts.heard_of_host(await heard(context.read, self._limits.lease_s, host.words))
            match said:
                case hosts.RankFrame(connection=number, data=data):
                    if number not in host.ranks:
                        host.ranks[number] = rank = RankElsewhere(
                            number, self._ranks_of(host.number), host.outbox, host.ranks
                        )
                        self._connected(rank)
                    host.ranks[number].came(data)
                case hosts.RankClosed(connection=number):
                    if (gone := host.ranks.pop(number, None)) is not None:
                        gone.ended()
                case hosts.RanksExited(generation=generation, code=code, text=text):
                    exited = e.WorkersExited(generation=generation, code=code, text=f"{host.words}: {text}")
                    self.exited(exited, host.number)
                case hosts.HostFailed(generation=generation, text=text, exit_code=code):
                    kind, text = e.FailureKind.FATAL, f"{host.words}: {text}"
                    self._handle(e.WorkersFailed(generation=generation, kind=kind, text=text, exit_code=code))
                case hosts.SlicesTaken(number=number):
                    host.taken = number
                    self._changed.set()
                case hosts.HostHello():
                    raise InvalidMessage(f"{host.words} says who it is a second time")

    def _ranks_of(self, number: int) -> range:
        return range(number * self._config.num_ranks, (number + 1) * self._config.num_ranks)

    def _leave(self, host: _Host, why: str) -> None:
        """It is here no more. The core hears of that first: what its ranks do not say any more is no crash of them."""
        del self._hosts[host.number]
        if not host.lost.done():
            host.lost.set_result(why)
        self._changed.set()
        if self._server is not None:
            self._tell_core(why)
        for rank in host.ranks.values():
            rank.ended()

    def _tell_core(self, text: str) -> None:
        missing = tuple(number for number in range(1, self._config.site_hosts) if number not in self._hosts)
        self._handle(e.HostsChanged(missing, text))

    def _of_session(self, session: int) -> tuple[_Host, LaidOut]:
        """Raises StaleError."""
        host = next((host for host in self._hosts.values() if host.session == session), None)
        if host is None or self.ranks is None:
            raise StaleError("the slices of this host are not wanted any more")
        return host, self.ranks

    @_refusing
    async def put_slices(self, _requests: Any, context: Context) -> hosts_pb2.PutSlicesResponse:
        """Into SNAPSHOT. A host whose slices do not come whole is given up: the snapshot would never be."""
        first = await heard(context.read, self._limits.stall_s, "a host of this site")
        opened = wire.from_proto(hosts.SlicesPut, first.open)
        host, laid_out = self._of_session(opened.session)
        if opened.generation != laid_out.generation:
            raise StaleError(f"slices of generation {opened.generation}; generation {laid_out.generation} is running")
        if opened.rank not in self._ranks_of(host.number):
            raise InvalidMessage(f"{host.words} has no rank {opened.rank}")
        wanted = Wanted(fragment=opened.fragment, with_frozen=opened.with_frozen)
        into = views(laid_out.layout, laid_out.snapshot.view, laid_out.pieces.owned_by(opened.rank), wanted)

        async def read() -> Any:
            part = await context.read()
            if laid_out is not self.ranks or not self._is_here(host):
                raise StaleError("these slices are not wanted any more")  # others may be on their way to their place
            return part

        try:
            await receive_slices(into, read, self._limits.stall_s, host.words)
        except (InvalidMessage, PeerError) as error:
            if self._is_here(host):
                self._leave(host, f"{host.words} is lost: {error}")
            raise
        self._handle(e.SlicesArrived(generation=opened.generation, rank=opened.rank, step=opened.step, seq=opened.seq))
        return hosts_pb2.PutSlicesResponse()

    @_refusing
    async def take_slices(self, asked: hosts_pb2.TakeSlicesRequest, context: Context) -> None:
        """From PUBLISH, which does not change until this host says that it has them."""
        host, laid_out = self._of_session(asked.session)
        if self._published is None or self._published[0] != asked.number:
            raise StaleError("PUBLISH holds something else by now")
        wanted, ranks = self._published[1], self._ranks_of(host.number)
        opened = hosts.SlicesOpen(
            fragment=wanted.fragment, with_frozen=wanted.with_frozen, num_moments=wanted.num_moments
        )
        await context.write(hosts_pb2.TakeSlicesResponse(open=wire.to_proto(opened)))
        pieces = [piece for rank in ranks for piece in laid_out.pieces.offered[rank]]
        found = views(laid_out.layout, laid_out.publish.view, pieces, wanted)
        await send_slices(found, hosts_pb2.TakeSlicesResponse, context.write, self._limits.stall_s, host.words)
