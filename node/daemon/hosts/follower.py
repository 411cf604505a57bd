"""A host of a site that does not lead: it has ranks, and follows host 0, which alone knows what the site is in the
run."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import grpc
import grpc.aio

from atoll.node import host_protocol as hosts
from atoll.node.core.events import WorkersExited
from atoll.node.daemon.config import NodeConfig, default_home
from atoll.node.daemon.exchange_processes.fleet import ExchangeProcesses
from atoll.node.daemon.health import health_server
from atoll.node.daemon.home import Home
from atoll.node.daemon.hosts.endpoint import Endpoint
from atoll.node.daemon.hosts.link import ATOLL_VERSION, Outbox, check_release, heard, send_slices, while_heard
from atoll.node.daemon.hosts.rank_socket import RankSocket, Sealed, Shared
from atoll.node.daemon.hosts.slices_between import SlicesServed
from atoll.node.daemon.launcher import WORKERS_END_LIMIT_S, Launcher, script_ended
from atoll.node.daemon.peers import meet_peers, prepare_kernels
from atoll.node.daemon.rank_commands import Meeting
from atoll.node.daemon.rank_connection import FLUSH_S
from atoll.node.daemon.security import PLAIN_TEXT, Identity, NodeSecurity
from atoll.node.daemon.site_log import log_to
from atoll.node.local_protocol import MAX_TEXT_CHARACTERS
from atoll.node.tasks import together
from atoll.protocol import PROTOCOL_VERSION, notify, transport, wire
from atoll.protocol.addresses import parse_proxy
from atoll.protocol.errors import (
    AtollError,
    ConfigError,
    HostError,
    NonFiniteError,
    PeerError,
    RefusedError,
    StaleError,
)
from atoll.protocol.exit_codes import ENDED_AT_ONCE, exit_code_of
from atoll.protocol.machine import Machine
from atoll.protocol.settings import settings_from_json
from atoll.protocol.signals import Signals, end_process
from atoll.protocol.status import error_of, from_rpc_error, was_cancelled
from atoll.protocol.time_limits import PRESETS, TimeLimits, time_limits
from atoll.protocol.trust.names import Kind, host_of_site
from atoll.protocol.v1 import hosts_pb2

log = logging.getLogger("atoll.node")

Stream = grpc.aio.StreamStreamCall[hosts_pb2.AttachRequest, hosts_pb2.AttachResponse]
Attach = grpc.aio.StreamStreamMultiCallable[hosts_pb2.AttachRequest, hosts_pb2.AttachResponse]
SHORTEST_LEASE_S = min(limits.lease_s for limits in PRESETS.values())
"""Until the leader has said which one the run has."""
RETRY_S = 0.5
LEADER_WAIT_S = 1800.0
"""How long a host waits for host 0, which may be started later, or be started again; for the coordinator as long."""


async def run_follower(config: NodeConfig) -> int:
    """Serves this host's part of the site until the site has ended; its exit code. Raises atoll's errors, and
    CancelledError for a signal."""
    async with AsyncExitStack() as stack:
        this = asyncio.current_task()
        assert this is not None

        def first(name: str) -> None:
            log.warning("%s: this host leaves its site, which waits for it; again to end at once", name)
            this.cancel()

        signals = Signals(first, lambda _: end_process(ENDED_AT_ONCE), WORKERS_END_LIMIT_S)
        stack.callback(signals.close)
        machine = Machine.through(parse_proxy(config.proxy))
        identity = await asyncio.to_thread(Identity.of, config, machine.wall_time())
        security = PLAIN_TEXT
        if identity is not None:
            security = await identity.secured(identity.addresses, machine, stack, LEADER_WAIT_S)
        code, text = await Follower(config, stack, security).run()
        log.log(logging.INFO if code == 0 else logging.ERROR, "%s", text)
        return code


class Follower:
    """`run` returns the site's exit code and what there is to say of it."""

    def __init__(self, config: NodeConfig, stack: AsyncExitStack, security: NodeSecurity = PLAIN_TEXT) -> None:
        self._config = config
        self._stack = stack
        self._security = security
        self._where = f"host 0 of this site at {config.site_address}"
        self._limits: TimeLimits = PRESETS["wan"]  # until the leader has said those of the run
        self._outbox: Outbox[hosts_pb2.AttachRequest] = Outbox(hosts.said, SHORTEST_LEASE_S)
        self._session = 0
        self._incarnation = 0  # of the site
        self._welcome_said: hosts.HostWelcome | None = None  # the first
        self._is_welcome = False  # on this stream
        self._process = Machine().token_bytes(16)
        self._generation = 0
        self._home: Home | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rank_socket = RankSocket(config, self._say, self._put_later, self._fail)
        self._launcher = Launcher(config, self._exited, self._fail)
        self._puts: asyncio.Queue[Sealed] = asyncio.Queue()
        self._endpoint: Endpoint | None = None
        self._welcome_heard = asyncio.Event()  # on this stream
        self._launches: asyncio.Queue[hosts.StartRanks | hosts.StopRanks] = asyncio.Queue()

    async def run(self) -> tuple[int, str]:
        """Raises RefusedError if the leader does not want this host, PeerError if it is not there for too long."""
        watched = asyncio.create_task(notify.stay_watched())
        self._stack.callback(watched.cancel)
        self._rank_socket.socket.open()
        self._stack.push_async_callback(self._rank_socket.close)
        self._stack.push_async_callback(self._launcher.stop)
        loop, told = asyncio.get_running_loop(), ""
        give_up_at = loop.time() + LEADER_WAIT_S
        while True:
            try:
                return await self._attached()
            except PeerError as error:
                if self._is_welcome:
                    give_up_at, told = loop.time() + LEADER_WAIT_S, ""
                self._is_welcome = False
                await self._launcher.stop()
                self._rank_socket.drop()
                if loop.time() >= give_up_at:
                    raise
                if str(error) != told:
                    log.warning("%s; the workers of this host wait for it", error)
                    told = str(error)
                await asyncio.sleep(RETRY_S)

    async def _attached(self) -> tuple[int, str]:
        """As long as the leader hears this host; its end if the site has ended."""
        config, ended = self._config, asyncio.get_running_loop().create_future()
        self._outbox = outbox = Outbox(hosts.said, SHORTEST_LEASE_S, self._beat)
        self._puts, self._launches, self._welcome_heard = asyncio.Queue(), asyncio.Queue(), asyncio.Event()
        async with AsyncExitStack() as stack:
            words, slices, payloads = (self._channel() for _ in range(3))  # a beat waits for no slices
            for channel in (words, slices, payloads):
                stack.push_async_callback(channel.close)
                channel.get_state(try_to_connect=True)  # by what is shown now, which may have expired at the first use
            attach: Attach = words.stream_stream(
                hosts.ATTACH_METHOD,
                request_serializer=hosts_pb2.AttachRequest.SerializeToString,
                response_deserializer=hosts_pb2.AttachResponse.FromString,
            )
            call = attach()
            stack.callback(call.cancel)
            self._say(
                hosts.HostHello(
                    protocol_version=PROTOCOL_VERSION,
                    site_name=config.name,
                    host=config.site_rank,
                    num_hosts=config.site_hosts,
                    num_ranks=config.num_ranks,
                    machine=socket.gethostname()[:256],
                    process=self._process,
                    num_processes=config.exchange_processes,
                    atoll_version=ATOLL_VERSION,
                )
            )
            try:
                beside = [outbox.write_all(call.write), self._launch_all(), self._put_all(slices), self._failure()]
                beside.append(self._follow(payloads))
                await while_heard(self._hear_all(call, ended), together(beside))
            except grpc.RpcError as error:
                raise from_rpc_error(error, self._where) from None
            except asyncio.InvalidStateError:  # a word that was said as the stream ended
                raise PeerError(f"{self._where} closed the connection") from None
            except asyncio.CancelledError:
                if was_cancelled():
                    raise
                raise PeerError(f"{self._where} cancelled the connection") from None
            except (AssertionError, LookupError, TypeError, ValueError) as error:
                await self._say_fault(call, error)
                raise
            if not ended.done():
                raise PeerError(f"{self._where} closed the connection")
            told = ended.result()
            self._rank_socket.drop()  # scripts that have left the run go on
            await script_ended(self._launcher, told_to_leave=not told.scripts_go_on)
            return told.exit_code, told.text

    def _channel(self) -> grpc.aio.Channel:
        """To host 0, and to no other host of this site."""
        leader = host_of_site(self._config.name, 0)
        return transport.open_channel(
            self._config.site_address,
            handshake=self._security.among_sites.towards(Kind.HOST, leader),
            max_message_bytes=hosts.MAX_MESSAGE_BYTES,
        )

    def _beat(self) -> hosts.HostBeat:
        return self._endpoint.beat() if self._endpoint is not None else hosts.HostBeat()

    def _say(self, message: hosts.HostSaid) -> None:
        self._outbox.say(message)

    def _fail(self, error: BaseException) -> None:
        """For an error that nothing was prepared for."""
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _failure(self) -> None:
        await asyncio.shield(self._failed)

    # --- what the leader says

    async def _hear_all(
        self,
        call: Stream,
        ended: asyncio.Future[hosts.SiteEnded],
    ) -> None:
        while True:
            told = hosts.heard_of_leader(await heard(call.read, self._limits.lease_s, self._where))
            match told:
                case hosts.HostWelcome():
                    self._welcome(told)
                case hosts.StartRanks() | hosts.StopRanks():
                    self._launches.put_nowait(told)
                case hosts.RankFrame(connection=number, data=data):
                    await self._guarded(self._generation, self._rank_socket.tell(number, data))
                case hosts.RankClosed(connection=number):
                    self._rank_socket.hang_up(number)
                case hosts.SiteLaidOut(generation=generation):
                    await self._guarded(generation, self._lay_out(told))
                case hosts.SiteEnded():
                    ended.set_result(told)
                    return
                case hosts.HostBeat():
                    pass
                case _:
                    assert self._endpoint is not None, "it has said that it is ready"
                    self._endpoint.tell(told)

    def _welcome(self, welcome: hosts.HostWelcome) -> None:
        """Raises InvalidMessage for settings that this version does not know, RefusedError for another run or atoll."""
        check_release(welcome, self._where, "this host")
        config, settings = self._config, settings_from_json(welcome.settings_json)
        self._welcome_said = first = self._welcome_said or welcome
        if (first.run_id, first.settings_json) != (welcome.run_id, welcome.settings_json):
            raise RefusedError(
                f"{self._where} is in run {welcome.run_id!r} with other settings than this host began with, in run "
                f"{first.run_id!r}: start this host again"
            )
        self._is_welcome, self._session = True, welcome.session
        self._incarnation = welcome.incarnation
        self._limits = time_limits(settings.time_limits)
        self._outbox.lease_s = self._limits.lease_s
        if self._home is None:
            folder = config.home or default_home(welcome.run_id, f"{config.name}-host{config.site_rank}", os.environ)
            self._home = home = Home(folder, Machine())
            self._stack.callback(home.close)
            self._stack.push_async_callback(self._launcher.stop)  # before the home and its log are closed
            log_to(home.folder, self._stack, config, welcome.run_id)
            home.note_socket_folder(Path(self._rank_socket.socket.path).parent)
            log.info("run %s, host %d of site %s, home %s", welcome.run_id, config.site_rank, config.name, home.folder)
        self._rank_socket.keep_checkpoints(self._home.optimizer_folder)
        self._welcome_heard.set()

    # --- the state of the site

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        """As an endpoint, from the Welcome on. Raises PeerError where attaching anew may help; anything else as it
        begins ends this host."""
        await self._welcome_heard.wait()
        if self._endpoint is None:
            self._endpoint = await self._make_endpoint()
        try:
            await self._endpoint.serve(channel, self._session, self._incarnation)
        except (HostError, ConfigError, NonFiniteError) as error:
            self._say(_failed(0, error))
            await asyncio.get_running_loop().create_future()  # the site ends
        except PeerError:
            raise
        except (AtollError, OSError) as error:
            raise PeerError(f"this host could not follow {self._where}: {error}") from None

    async def _make_endpoint(self) -> Endpoint:
        assert self._home is not None
        assert self._welcome_said is not None
        config, settings = self._config, settings_from_json(self._welcome_said.settings_json)
        await asyncio.to_thread(prepare_kernels)
        towards = next(iter(config.coordinators), config.site_address)
        async with AsyncExitStack() as stack:  # host 0 may be lost meanwhile: then all of it is made anew
            met = await meet_peers(
                config,
                settings.run_id,
                self._home,
                Machine(),
                stack,
                security=self._security.among_sites,
                towards=towards,
            )
            log.info("listening for peers on %s", met.address)
            folder, lease_s = self._home.folder, self._limits.lease_s
            processes = ExchangeProcesses(config, settings, met, home=folder, lease_s=lease_s)
            stack.push_async_callback(processes.close)
            if config.exchange_processes > 1:
                await processes.start()
            served = SlicesServed(config, met.security, self._limits, met.hub, self._rank_socket.written_for)
            endpoint = Endpoint(
                config,
                settings,
                self._limits,
                home=self._home,
                met=met,
                processes=processes,
                site_address=await served.open(stack),
                say=self._say,
            )
            if (standing := self._security.standing) is not None:
                standing.tell_banned(endpoint.ban)
            stack.callback(endpoint.close)
            await endpoint.load()
            health = health_server(folder, self._obstacles)
            await health.start()
            stack.push_async_callback(health.close)
            notify.tell("READY=1", f"STATUS=host {config.site_rank} of site {config.name} of run {settings.run_id}")
            self._stack.push_async_callback(stack.pop_all().aclose)
        return endpoint

    def _obstacles(self) -> Iterator[str]:
        """To its work, for `atoll health`."""
        if not self._is_welcome:
            yield f"{self._where} does not hear this host"

    async def _lay_out(self, told: hosts.SiteLaidOut) -> None:
        endpoint = self._endpoint
        assert endpoint is not None
        await endpoint.lay_out(told)
        plane = endpoint.plane
        assert plane is not None
        assert plane.snapshot is not None
        assert plane.published.buffer is not None
        self._rank_socket.share(
            Shared(
                layout=plane.layout,
                snapshot=plane.snapshot,
                publish=plane.published.buffer,
                tensors_of=endpoint.tensors_of,
                key=told.key,
            )
        )

    # --- ranks

    async def _launch_all(self) -> None:
        """In their order, beside what is heard: ranks may take seconds to end."""
        while True:
            match told := await self._launches.get():
                case hosts.StartRanks():
                    await self._guarded(told.generation, self._start(told))
                case hosts.StopRanks(generation=generation):
                    if generation == self._generation:
                        await self._launcher.stop()

    async def _say_fault(self, call: Stream, error: Exception) -> None:
        """Of this code: the site hears of it before this host ends."""
        text = f"{type(error).__name__}: {error}; its log says where, please report it"[:MAX_TEXT_CHARACTERS]
        log.error("a failure that nothing was prepared for", exc_info=error)
        failed = hosts.HostFailed(generation=0, text=text, exit_code=HostError.exit_code)
        with suppress(grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await call.write(hosts.said(failed))

    async def _start(self, told: hosts.StartRanks) -> None:
        log.info("starting workers")
        self._rank_socket.drop()
        self._generation = told.generation
        meeting = Meeting(address=told.store_address, group_name=told.group_name)
        await self._launcher.start(told.generation, self._rank_socket.socket.path, meeting)

    async def _guarded(self, generation: int, work: Coroutine[None, None, None]) -> None:
        """What goes wrong on this host alone ends the site, which hears why."""
        try:
            await work
        except (AtollError, OSError) as error:
            self._say(_failed(generation, error))

    def _exited(self, event: WorkersExited) -> None:
        self._say(hosts.RanksExited(generation=event.generation, code=event.code, text=event.text[: 1 << 16]))

    # --- slices

    def _put_later(self, sealed: Sealed) -> None:
        self._puts.put_nowait(sealed)

    async def _put_all(self, channel: grpc.aio.Channel) -> None:
        """One after the other: a rank's newest slices are the last that arrive."""
        put = channel.stream_unary(
            hosts.PUT_METHOD,
            request_serializer=hosts_pb2.PutSlicesRequest.SerializeToString,
            response_deserializer=hosts_pb2.PutSlicesResponse.FromString,
        )
        while True:
            sealed = await self._puts.get()
            if sealed.generation != self._generation:
                continue
            report = sealed.report
            opened = hosts.SlicesPut(
                session=self._session,
                generation=sealed.generation,
                rank=sealed.rank,
                step=report.step,
                seq=report.seq,
                fragment=report.fragment,
                with_frozen=sealed.with_frozen,
            )
            call = put()
            try:
                await call.write(hosts_pb2.PutSlicesRequest(open=wire.to_proto(opened)))
                found = self._rank_socket.sealed_views(sealed)
                await send_slices(found, hosts_pb2.PutSlicesRequest, call.write, self._limits.stall_s, self._where)
                await call.done_writing()
                await call
            except (grpc.RpcError, asyncio.InvalidStateError):
                self._unless_stale(error_of(await call.code(), await call.details() or "", self._where))
            finally:
                call.cancel()

    def _unless_stale(self, error: AtollError) -> None:
        """Raises PeerError: the leader is attached to anew. What it does not want any more is no error."""
        if not isinstance(error, StaleError):
            raise PeerError(str(error)) from None


def _failed(generation: int, error: AtollError | OSError) -> hosts.HostFailed:
    text = str(error)[:MAX_TEXT_CHARACTERS]
    return hosts.HostFailed(generation=generation, text=text, exit_code=exit_code_of(error))
