"""Host 0 of a site of several hosts: serves the others, whose ranks are to the node as those of its own.

The other hosts dial in. What their ranks say comes as frames of their local sockets. What hosts hold, exchange and move
is the affair of the modules beside this one. The node's core hears which hosts are missing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from atoll.node import host_protocol as hosts
from atoll.node.core import events as e
from atoll.node.core.host_events import HostErrors, HostsChanged, SnapshotShared
from atoll.node.core.outputs import ShareSnapshot
from atoll.node.core.ranks.pieces import SitePieces
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.home import Home
from atoll.node.daemon.hosts.attached import AttachedHost, Hosts
from atoll.node.daemon.hosts.kept_elsewhere import KeptElsewhere
from atoll.node.daemon.hosts.leading_exchanges import LeadingExchanges
from atoll.node.daemon.hosts.link import (
    ATOLL_VERSION,
    IDLE_LIMIT_S,
    Outbox,
    check_release,
    heard,
    most_connections,
    while_heard,
)
from atoll.node.daemon.hosts.moving import Context, LaidOut, Moving, refusing
from atoll.node.daemon.hosts.ranks_elsewhere import RankElsewhere
from atoll.node.daemon.hosts.replicas import Replicas
from atoll.node.daemon.rank_commands import Meeting
from atoll.node.daemon.rank_connection import Connection
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.peers.rpc import SERVICE
from atoll.node.exchange.service import PeerService
from atoll.node.tasks import Tasks, end
from atoll.protocol import PROTOCOL_VERSION, addresses, transport
from atoll.protocol import messages as m
from atoll.protocol.endpoints import Places
from atoll.protocol.errors import AtollError, InvalidMessage, PeerError, RefusedError
from atoll.protocol.layout import Layout, Manifest
from atoll.protocol.machine import Machine, Network
from atoll.protocol.settings import RunSettings, settings_to_json
from atoll.protocol.time_limits import TimeLimits
from atoll.protocol.trust.access import WITHIN_SITE, guarded
from atoll.protocol.trust.names import host_number
from atoll.protocol.trust.security import PLAIN, Caller, Security
from atoll.protocol.v1 import hosts_pb2

log = logging.getLogger("atoll.node")

STOP_S = 0.5
CLOSE_LIMIT_S = 5.0
"""For the hosts to hear that the site has ended."""
IS_OPEN = (
    "%s is open to the network without credentials, and so is the store in which the ranks of the site's hosts meet: "
    "let nobody but these hosts reach them"
)
STORE_IS_OPEN = (
    "the hosts of this site speak TLS at %s; the store in which their ranks meet is torch's, and so is what ranks say "
    "to each other, in plain text: let nobody but these hosts reach that"
)


class Leader:
    """A site of one host has one too, which listens nowhere and waits for nobody."""

    def __init__(
        self,
        config: NodeConfig,
        settings: RunSettings,
        limits: TimeLimits,
        handle: Callable[[e.Event], None],
        *,
        hub: Hub,
        home: Home,
        donor: Callable[[], m.Donor],
        tasks: Tasks,
        process_addresses: Callable[[], tuple[str, ...]] = tuple,
        network: Network = transport,
        security: Security = PLAIN,
    ) -> None:
        """`donor`: the site, as its other hosts fetch its state from it. `process_addresses`: of the exchange processes
        of host 0."""
        self._config = config
        self._settings = settings
        self._limits = limits
        self._home = home
        self._donor = donor
        self._process_addresses = process_addresses
        self._peers = PeerService(hub)
        self._connected: Callable[[Connection], None] = Connection.close
        self._handle = handle
        self._network = network
        self._security = security
        self._server: grpc.aio.Server | None = None
        self._hosts = attached = Hosts(config.site_hosts)
        self.replicas = Replicas(attached=attached, donor=donor, tasks=tasks)
        self.exchanges = LeadingExchanges(
            attached=attached,
            hub=hub,
            own_of=self._own_of,
            site_id=lambda: donor().site_id,
            log=lambda: self.replicas.present.log,
        )
        self.kept_elsewhere = KeptElsewhere(
            attached=attached,
            hub=hub,
            donor=donor,
            num_hosts=config.site_hosts,
            own_of=self._own_of,
            pace=Pace(stall_s=limits.stall_s, slowest_bytes_per_s=limits.slowest_bytes_per_s),
        )
        self._moving = Moving(
            attached=attached,
            exchanges=self.exchanges,
            limits=limits,
            security=security,
            ranks_of=self._ranks_of,
            handle=handle,
            give_up=self._leave,
        )
        self._sessions = itertools.count(1)
        num_places = config.site_hosts * config.exchange_processes
        self._places = Places((0,) * num_places, config.exchange_processes, 0)  # until the model is known
        self._generation = 0
        self._exited: dict[int, e.WorkersExited] = {}  # by host, how the ranks of this generation ended

    async def open(self, connected: Callable[[Connection], None]) -> None:
        """`connected`: is given each rank of another host. Raises HostError if the address cannot be had."""
        config, self._connected = self._config, connected
        if config.site_hosts == 1:
            return
        self._server = server = self._network.create_server(
            max_message_bytes=hosts.MAX_MESSAGE_BYTES,
            max_connections=most_connections(config.site_hosts),
            idle_limit_s=IDLE_LIMIT_S,
        )
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Attach": grpc.stream_stream_rpc_method_handler(
                self.attach, hosts_pb2.AttachRequest.FromString, hosts_pb2.AttachResponse.SerializeToString
            ),
            **self._moving.handlers,
        }
        of_peers = {
            name: found for name, found in self._peers.handlers.items() if name in ("FetchState", "FetchPayloads")
        }
        for service, found in ((hosts.SERVICE, handlers), (SERVICE, of_peers)):
            allowed = guarded(service, found, self._security, self._refusal, may_call=WITHIN_SITE)
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, allowed),))
        transport.bind(server, config.site_address, self._security.of_server())
        await server.start()
        log.info("waiting for %d other hosts of this site at %s", config.site_hosts - 1, config.site_address)
        if not addresses.is_loopback(config.site_address):
            log.warning(IS_OPEN if self._security is PLAIN else STORE_IS_OPEN, config.site_address)

    def _refusal(self, caller: Caller) -> str:
        """Of whoever has a certificate of another site."""
        return "" if caller.subject.site == self._config.name else f"{caller.subject} is no host of {self._config.name}"

    def say_end(self, exit_code: int, text: str, *, scripts_go_on: bool = False) -> None:
        """To the hosts, which end then, too; the first word of it counts."""
        for host in list(self._hosts.values()):
            host.say(hosts.SiteEnded(exit_code=exit_code, text=text[:4096], scripts_go_on=scripts_go_on))

    async def close(self, exit_code: int, text: str, *, scripts_go_on: bool = False) -> None:
        """The hosts hear how the site ended. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        self.say_end(exit_code, text, scripts_go_on=scripts_go_on)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._hosts.until(lambda: not self._hosts)  # each has heard it, and ended its stream
        await server.stop(STOP_S)

    # --- what the node says

    @property
    def ranks(self) -> LaidOut | None:
        """Of all hosts, once they know where their slices lie, and until they are stopped."""
        return self._moving.laid_out

    def start(self, generation: int, meeting: Meeting | None) -> None:
        """Ranks on the other hosts, too."""
        self._generation, self._exited = generation, {}
        self._end_ranks()
        for host in self._hosts.ready:
            assert meeting is not None
            host.say(
                hosts.StartRanks(generation=generation, store_address=meeting.address, group_name=meeting.group_name)
            )

    def stop(self) -> None:
        """All ranks of the last start."""
        self._end_ranks()
        for host in self._hosts.ready:
            host.say(hosts.StopRanks(generation=self._generation))

    def laid_out(self, pieces: SitePieces, layout: Layout, snapshot: SharedBuffer) -> None:
        """The ranks that were started last are about to be told where their slices lie."""
        own = [self._own_of(number) for number in range(self._config.site_hosts)]
        self._moving.laid_out = ranks = LaidOut(
            generation=self._generation,
            layout=layout,
            pieces=pieces,
            snapshot=snapshot,
            tensors_of=tuple(frozenset(map(layout.name_of, chunks)) for chunks in own),
            key=Machine().token_bytes(hosts.KEY_BYTES),
        )
        addresses_of = {host.number: host.site_address for host in self._hosts.ready}
        everyone = range(self._config.site_hosts)
        for host in self._hosts.ready:
            written = [
                ranks.pieces_for(host.number, self._ranks_of(of)) if of != host.number else [] for of in everyone
            ]
            word = hosts.SiteLaidOut(
                generation=self._generation,
                site_id=self._donor().site_id,
                manifest=layout.manifest,
                chunk_elements=layout.chunk_elements,
                dtypes=tuple(pieces.dtypes.get(spec.name, spec.dtype) for spec in layout.manifest.tensors),
                pieces=tuple(itertools.chain.from_iterable(written)),
                num_pieces=tuple(map(len, written)),
                host_addresses=tuple(addresses_of.get(of, "") for of in everyone),
                key=ranks.key,
            )
            host.say(word)
            host.is_laid_out = True

    def endpoints(self, manifest: Manifest) -> tuple[m.Endpoint, ...]:
        """Where the run finds the chunks of other processes than this one, and of the other hosts. What is without
        chunks is nowhere."""
        num_hosts, num_processes = self._config.site_hosts, self._config.exchange_processes
        self._places = places = Places.of(manifest, self._settings.sync.chunk_elements, num_hosts, num_processes)
        at = {(host.number, number): a for host in self._hosts.ready for number, a in enumerate(host.addresses)}
        at |= {(0, number): address for number, address in enumerate(self._process_addresses(), 1)}
        return tuple(
            m.Endpoint(address=at[place], first_chunk=places.of_process(*place).start)
            for place in itertools.product(range(num_hosts), range(num_processes))
            if place in at and places.of_process(*place)
        )

    def _own_of(self, number: int) -> range:
        return self._places.of_host(number)

    async def publish(self, ranks: LaidOut | None, content: e.Content) -> None:
        """Returns when PUBLISH of all hosts holds it. None is waited for once these ranks are stopped: new ones take
        everything anew."""
        if ranks is not None:
            await self.replicas.publish(content, lambda: ranks is self.ranks)

    async def share(self, output: ShareSnapshot) -> None:
        """All ranks have sealed: each host takes what it is to send, from the hosts whose ranks wrote it."""
        ranks = self.ranks
        if ranks is None or ranks.generation != output.generation:
            return
        if await self.replicas.share_snapshot(output, lambda: ranks is self.ranks):
            self._handle(SnapshotShared(generation=output.generation, step=output.step, seq=output.seq))

    def _end_ranks(self) -> None:
        self._moving.laid_out = None
        self._hosts.changed()

    def exited(self, event: e.WorkersExited, host: int = 0) -> None:
        """The ranks of one host. Where they ended well, those of other hosts may still be at what follows the run."""
        if event.generation != self._generation:
            return
        self._exited[host] = event
        if event.code or len(self._exited) == self._config.site_hosts:
            self._handle(event)

    # --- what hosts ask for

    @refusing
    async def attach(self, _requests: Any, context: Context) -> None:
        """Until either end is gone."""
        lease_s = self._limits.lease_s
        first = hosts.heard_of_host(await heard(context.read, lease_s, "a host of this site"))
        if not isinstance(first, hosts.HostHello):
            raise InvalidMessage("a host of this site says who it is first")
        self._check(first, self._security.caller(context))
        outbox = Outbox(hosts.told, lease_s)
        words = f"host {first.host} of this site" + (f" ({first.machine})" if first.machine else "")
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        host = AttachedHost(
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
                run_id=self._settings.run_id,
                settings_json=settings_to_json(self._settings),
                session=host.session,
                incarnation=self._home.incarnation,
                atoll_version=ATOLL_VERSION,
            )
        )
        why = f"{words} is lost"
        try:
            await while_heard(self._hear_all(host, context), outbox.write_all(context.write))
            why = host.lost.result() if host.lost.done() else why
        except (AtollError, grpc.RpcError) as error:
            why = f"{words} is lost: {error}"
        finally:
            if self._hosts.is_here(host):
                self._leave(host, why)

    def _check(self, hello: hosts.HostHello, caller: Caller | None) -> None:
        """Raises RefusedError, with what to change."""
        check_release(hello, f"host {hello.host} of this site", "host 0")
        config = self._config
        for ours, theirs, what in (
            (PROTOCOL_VERSION, hello.protocol_version, "version of the protocol; run both from one release of atoll"),
            (config.name, hello.site_name, "--name"),
            (config.site_hosts, hello.num_hosts, "--site-hosts"),
            (config.num_ranks, hello.num_ranks, "number of ranks on each host (--ranks)"),
            (config.exchange_processes, hello.num_processes, "--exchange-processes"),
        ):
            if ours != theirs:
                raise RefusedError(f"host 0 of this site has {ours!r}, this host {theirs!r}: {what}")
        if caller is not None and host_number(caller.subject.name) != hello.host:
            raise RefusedError(f"{caller.subject} says to be host {hello.host}: --site-rank is that of its invite")
        if not 0 < hello.host < config.site_hosts:
            raise RefusedError(f"--site-rank {hello.host}: others than host 0 are 1 to {config.site_hosts - 1}")

    async def _hear_all(self, host: AttachedHost, context: Context) -> None:
        """Until it is given up. Raises PeerError when it is gone, InvalidMessage for what makes no sense."""
        reading = asyncio.create_task(self._read_all(host, context))
        given_up = asyncio.create_task(asyncio.wait({host.lost}))
        try:
            await asyncio.wait({reading, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            await end([reading, given_up])

    async def _read_all(self, host: AttachedHost, context: Context) -> None:
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
                    of_ranks = e.WorkersFailed(generation=generation, kind=kind, text=text, exit_code=code)
                    self._handle(of_ranks if generation else e.NodeFailed(text, code))
                case hosts.HostBeat():
                    self.exchanges.heard_beat(host, said)
                case hosts.HostReady():
                    self._is_ready(host, said)
                case hosts.HostHello():
                    raise InvalidMessage(f"{host.words} says who it is a second time")
                case _:
                    self._hear_of_state(host, said)

    def _is_ready(self, host: AttachedHost, ready: hosts.HostReady) -> None:
        found = (ready.address, *ready.process_addresses)
        if host.addresses or not all(map(addresses.is_plain, (*found, ready.site_address))):
            where = ", ".join(map(repr, (*found, ready.site_address)))
            raise InvalidMessage(f"{host.words} says again where it is, or at no address: {where}")
        if len(found) != self._config.exchange_processes:
            raise InvalidMessage(f"{host.words} is at {len(found)} addresses, one for each process is expected")
        host.addresses, host.site_address = found, ready.site_address
        log.info("%s is here", host.words)
        if self._settings.sync.error_feedback:
            errors = tuple(None if at < 0 else at for at in ready.error_commits)
            goes_back = ready.branch != self._home.branch  # from all that it has, see `Replicas.came`
            self._handle(HostErrors((0,) * len(errors) if goes_back else errors))
        self.replicas.came(host, ready, self._home.branch)
        self._tell_core("")
        self._hosts.changed()

    def _hear_of_state(self, host: AttachedHost, said: hosts.HostSaid) -> None:
        if not host.addresses:
            raise InvalidMessage(f"{host.words} says {type(said).__name__} before it is ready")
        match said:
            case hosts.StateHeld():
                self.replicas.holds(host, said)
            case hosts.SourcesWanted():
                self.replicas.bring(host)
            case hosts.StatePublished(number=number):
                if host.follows:  # else it was of another state, and is said again
                    host.published = number
            case hosts.SnapshotTaken():
                self.replicas.took_snapshot(host, said)
            case hosts.HostErrorsAdvanced():
                self.replicas.has_advanced(host, said)
            case hosts.HostKept():
                self.replicas.has_kept(host, said)
            case m.Done():
                self.exchanges.heard_done(host, said)
            case m.Products():
                self.exchanges.heard_products(host, said)
            case m.ExchangeFailed():
                self.exchanges.heard_failed(host, said)
        self._hosts.changed()

    def _ranks_of(self, number: int) -> range:
        return range(number * self._config.num_ranks, (number + 1) * self._config.num_ranks)

    def _leave(self, host: AttachedHost, why: str) -> None:
        """It is here no more. The core hears of that first: what its ranks do not say any more is no crash of them."""
        del self._hosts[host.number]
        if not host.lost.done():
            host.lost.set_result(why)
        self._hosts.changed()
        self.exchanges.lost(host)
        if self._server is not None:
            self._tell_core(why)
        for rank in host.ranks.values():
            rank.ended()

    def _tell_core(self, text: str) -> None:
        self._handle(HostsChanged(self._hosts.missing, text))
