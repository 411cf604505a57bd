"""One node: what happens goes into the core as events, in order; what the core wants goes to the parts that do it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial

from atoll import __version__
from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.context import SiteIdentity
from atoll.node.core.disk import Outer
from atoll.node.core.site import SiteCore
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.deposit_box import box_bytes
from atoll.node.daemon.deposits import Deposits
from atoll.node.daemon.disk_jobs import DiskJobs
from atoll.node.daemon.exchange_processes.fleet import ExchangeProcesses
from atoll.node.daemon.exchanges import Exchanges
from atoll.node.daemon.home import Home
from atoll.node.daemon.hosts.leader import Leader
from atoll.node.daemon.journal import Journal
from atoll.node.daemon.models import Models
from atoll.node.daemon.observer import Observer
from atoll.node.daemon.peers import Met
from atoll.node.daemon.plane import DataPlane
from atoll.node.daemon.security import NodeSecurity
from atoll.node.daemon.session import Session
from atoll.node.daemon.shell import Parts, Shell, fatal
from atoll.node.daemon.telemetry import Telemetry
from atoll.node.daemon.worker_control import WorkerControl
from atoll.node.exchange.peers.prober import Prober
from atoll.node.tasks import Tasks
from atoll.protocol import messages as m
from atoll.protocol import wire
from atoll.protocol.errors import AtollError, HostError, NonFiniteError
from atoll.protocol.machine import Machine
from atoll.protocol.settings import RunSettings
from atoll.protocol.trust.names import Kind
from atoll.protocol.trust.words import Words

log = logging.getLogger(__name__)

PHASES_OF_A_SYNC = frozenset({"training", "ready", "exchanging", "waiting for commit", "applying"})
"""They come round with every sync, and are shown with --debug only; each commit has a line."""
FLUSH_S = 2.0
"""How long the last words to the coordinator may take."""


class Node:
    """Owns the core and everything it decides over. `run` returns the exit code and its reason."""

    def __init__(
        self,
        *,
        config: NodeConfig,
        settings: RunSettings,
        home: Home,
        plane: DataPlane | None,
        met: Met,
        journal: Journal,
        machine: Machine,
        security: NodeSecurity = NodeSecurity(),  # noqa: B008 it is frozen
        parts: Parts = Parts(),  # noqa: B008 it is frozen
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._run_id = settings.run_id
        self.home = home
        self.hub = hub = met.hub
        self.journal = journal
        hello = m.Hello(
            name=config.name,
            key=home.key,
            address=met.address,
            atoll_version=__version__,
            from_saved_model=config.from_saved is not None,
            process_id=home.process_id,
            takes_changes=True,
        )
        identity = SiteIdentity(
            hello=hello,
            incarnation=home.incarnation,
            bandwidth_bytes_per_s=config.bandwidth_bytes_per_s or config.max_upload_bytes_per_s,
            start_limit_s=config.start_limit_s,
        )
        held = plane.held() if plane else None
        outer: Outer | None = None
        if plane is not None and held is not None:
            touched = plane.log.history.touched(held[0]) or ()
            outer = Outer(commit=held[0], state_hash=held[1], run_step=0, run_tokens=0, touched=touched)
        errors: tuple[int | None, ...] = ()
        if plane is not None:
            plane.divide(0, config.site_hosts, config.exchange_processes)
            errors = plane.errors.commits(plane.own) if plane.errors is not None else ()
        self.core = core = SiteCore(
            identity,
            settings,
            outer,
            self._loop.time(),
            branch=home.branch,
            num_ranks=config.num_site_ranks,
            num_hosts=config.site_hosts,
            held_errors=errors,
        )
        self._inbox: deque[e.Event] = deque()  # the first is being handled
        self._result: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._phase = ""
        self._is_told_to_leave = False
        self.failure: BaseException | None = None
        """What ended this node where nothing was prepared for it; see `_fail`."""
        observer = Observer(
            config=config, core=core, hub=hub, journal=journal, num_refused=self._num_refused, attached=met.attached
        )
        self.session = Session(
            addresses=config.coordinators,
            handshake=lambda: security.before_coordinator.towards(Kind.COORDINATOR),
            limits=core.limits,
            machine=machine,
            opened=self._opened,
            lost=lambda reason: self.handle(e.SessionLost(reason)),
            received=self._received,
            header=self._header,
            metadata=observer.session_metadata,
        )
        self._session: asyncio.Task[None] | None = None
        self.prober = Prober(
            header=self._header,
            dialer=hub.dialer,
            limits=lambda: core.limits,
            found=lambda site_ids: self.handle(e.PeersProbed(site_ids)),
            failed=self._fail,
        )
        tasks = Tasks(self._fail)
        self.telemetry = Telemetry(
            core=core,
            observer=observer,
            machine=machine,
            home=home.folder,
            tasks=tasks,
            say=self.session.send,
            num_parameters=self._num_parameters,
            certificate_until_s=lambda: security.identity_until_s,
        )
        self.deposits = Deposits(
            parts.deposit_box(home.deposit_file, box_bytes(config.max_disk_bytes)), tasks, self.session.send
        )
        processes = ExchangeProcesses(config, settings, met, home=home.folder, lease_s=core.limits.lease_s)
        self.shell = shell = Shell(
            config=config,
            home=home,
            parts=parts,
            core=core,
            hub=hub,
            leader=Leader(
                config,
                settings,
                core.limits,
                self.handle,
                hub=hub,
                home=home,
                donor=self._as_donor,
                tasks=tasks,
                process_addresses=lambda: processes.addresses,
                network=machine.network,
                security=security.among_sites,
            ),
            processes=processes,
            observer=observer,
            handle=self.handle,
            fail=self._fail,
            tasks=tasks,
            has_ended=self._result.done,
            words=Words(self._run_id, standing.before_coordinator) if (standing := security.standing) else None,
        )
        self.disk = DiskJobs(shell, plane)
        observer.num_written = lambda: self.disk.num_written
        self.models = Models(shell, self.disk)
        self.exchanges = Exchanges(shell, self.disk)
        self.workers = WorkerControl(shell, self.disk, self.exchanges)

    # --- life

    async def run(self) -> tuple[int, str]:
        try:
            if self.shell.config.exchange_processes > 1:
                await self.shell.processes.start()
                self.shell.tasks.spawn(self._watch_processes())
            await self.workers.open()
            self._session = self.shell.tasks.spawn(self.session.run())
            code, text = await self._result
            await self.session.close()
            await asyncio.wait({self._session}, timeout=FLUSH_S)
            if code == 0:
                await self.workers.wait_for_script(told_to_leave=self._is_told_to_leave)
            return code, text
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for task in (tasks := list(self.shell.tasks)):
                task.cancel()
            await self.workers.end()  # before the tasks: those in threads end with what they do to the disk
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.models.drop()
            await self.prober.close()
            code, text = self._result.result() if self._result.done() else (0, "it was stopped")
            scripts_go_on = self._result.done() and not (code or self._is_told_to_leave)
            await self.shell.leader.close(code, text, scripts_go_on=scripts_go_on)
            await self.workers.server.close()
            await self.shell.processes.close()

    async def _watch_processes(self) -> None:
        """What no new exchange process helps with ends this node, as its own failure does."""
        try:
            await self.shell.processes.failed()
        except (NonFiniteError, HostError) as error:
            self.handle(e.NodeFailed(str(error), error.exit_code))

    async def end_workers(self) -> None:
        """After the last words to the coordinator and the other hosts. Nothing else that is under way is waited for."""
        self.shell.leader.say_end(*self._result.result())
        if self._session is not None:
            await asyncio.wait({self._session}, timeout=FLUSH_S)
        await self.workers.end()

    def leave(self, reason: str) -> None:
        """After the sync under way."""
        self._is_told_to_leave = True
        if self._result.done():
            self.leave_now(reason)
        else:
            self.handle(e.LeaveAsked(reason))

    def leave_now(self, reason: str) -> int:
        """Say goodbye and end, whatever is under way. The exit code: of what it had come to before, if it had."""
        if self._result.done():
            self.shell.tasks.spawn(self.workers.stop())
        else:
            self.handle(e.LeaveAsked(reason, at_once=True))
        return self._result.result()[0]

    def close(self) -> None:
        self.disk.close()
        self.deposits.close()

    # --- events

    def handle(self, event: e.Event) -> None:
        """Give the core an event and carry out what it wants, in order; an event that comes of that waits its turn.
        Raises nothing: what goes wrong on the way ends this node, and is no failure of whoever brought the event."""
        self._inbox.append(event)
        if len(self._inbox) > 1:
            return
        try:
            while self._inbox:
                self._handle(self._inbox[0])
                self._inbox.popleft()
        except Exception as error:
            self._inbox.clear()
            self._fail(error)

    def _handle(self, event: e.Event) -> None:
        outputs = self.core.handle(event, self._loop.time())
        if self.hub.site_id != self.core.site.site_id:
            self.hub.site_id = self.core.site.site_id
            self.shell.processes.identify()
        for happened in self.core.handled:
            self.shell.observer.observe(happened)
        for output in outputs:
            self.shell.observer.wanted(output)
            self._execute(output)
        if self.core.phase != self._phase and self.failure is None:
            routine = self._phase in PHASES_OF_A_SYNC and self.core.phase in PHASES_OF_A_SYNC
            self._phase = self.core.phase
            log.log(logging.DEBUG if routine else logging.INFO, "%s", self._phase)
            self.journal.write("phase", phase=self._phase)
        self._set_timer()

    def _fail(self, error: BaseException) -> None:
        """End this node with the reason, whatever its core makes of it: half of what the core wanted was not done."""
        text = str(error)
        if not isinstance(error, AtollError | OSError):
            text = f"this node cannot go on: {type(error).__name__}: {error}; its log says where, please report it"
            log.error("a failure that nothing was prepared for", exc_info=error)
        if self._result.done():
            log.error("while it ended: %s", text)
            return
        self.failure = error
        code = error.exit_code if isinstance(error, AtollError) else HostError.exit_code
        self._result.set_result((code, text))  # first: it may be the core that fails
        self.handle(e.NodeFailed(text, code))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.core.next_deadline()
        if deadline is not None and not self._result.done():
            delay_s = max(deadline - self._loop.time(), 0.0)
            self._timer = self._loop.call_later(delay_s, self.handle, e.Tick())

    def _received(self, header: m.Header, message: m.CoordinatorMessage) -> None:
        if header.run_id != self._run_id and not isinstance(message, m.Refused):
            self.session.num_refused_messages += 1
        elif isinstance(message, m.Deposits):
            self.deposits.take(message)
        elif isinstance(message, m.ReturnDeposits):
            self.deposits.give_back(message)
        else:
            if isinstance(message, m.Welcome):
                self.shell.observer.logged.is_wanted = message.takes_logged
            self.handle(e.Received(header.term, message))

    def _header(self) -> m.Header:
        return self.hub.identity(self.core.site.term)

    def _as_donor(self) -> m.Donor:
        """Of the other hosts of this site."""
        site_id, config = self.core.site.site_id, self.shell.config
        return m.Donor(
            site_id=site_id,
            incarnation=self.home.incarnation,
            address=config.site_address,
            commit=0,
            name=config.name,
        )

    def _opened(self) -> None:
        self.telemetry.soon()
        self.shell.observer.logged.is_wanted = False
        self.handle(e.SessionOpened())

    def _num_parameters(self) -> int:
        plane = self.disk.plane
        return plane.layout.manifest.num_trainable if plane is not None else 0

    def _num_refused(self) -> int:
        return self.session.num_refused_messages + self.workers.server.num_malformed

    # --- outputs

    def _execute(self, output: out.Output) -> None:
        match output:
            case out.Send(m.Hello() as hello):
                self.session.send(self.deposits.in_hello(hello))
            case out.Send(message):
                self.session.send(message)
            case out.Beat():
                self.session.send(self.shell.observer.heartbeat())
                self.telemetry.beat()
                self.shell.observer.logged.beat(self.session.send)
            case out.Fulfil(asked):
                self._fulfil(asked)
            case out.ListPayloads(plan):
                self.shell.start(partial(self.disk.list_payloads, plan), fatal())
            case out.Report(level, text):
                log.log(level, "%s", text)
                self.journal.write("report", level=logging.getLevelName(level), text=text)
            case out.Exit(code, text):
                if not self._result.done():
                    self._result.set_result((code, text))
                    self.journal.write("exit", code=code, text=text)
            case out.KeepContributions():
                self.shell.start(partial(self.disk.keep_contributions, output), fatal())
            case out.SaveModel() | out.KeepModel() | out.DropModel() | out.KeepBest() | out.DropBest():
                self.models.execute(output)
            case (
                out.BeginExchange()
                | out.WeighExchange()
                | out.InfluenceExchange()
                | out.HurryExchange()
                | out.CancelExchange()
                | out.DropSync()
            ):
                self.exchanges.execute(output)
            case (
                out.StartWorkers()
                | out.StopWorkers()
                | out.DescribeCrash()
                | out.SendLayout()
                | out.MergePieces()
                | out.ShareSnapshot()
            ):
                self.workers.execute(output)
            case out.RefuseRank() | out.AnswerWorkers() | out.AnswerDraw():
                self.workers.server.execute(output)
            case _:
                self.disk.execute(output)

    def _fulfil(self, asked: m.CoordinatorMessage) -> None:
        match asked:
            case m.SendManifest():
                self.shell.start(self._say_manifest, fatal())
            case m.Peers(members=members):
                self.prober.watch(members)
            case m.DialBack(member=member):
                self.hub.donations.dial(member)
            case m.Drain(reason=reason):
                self.leave(f"asked to by an operator: {reason}")
            case m.Banned(names=names):
                self.hub.ban(names)
                self.shell.processes.ban(names)
                self.journal.write("banned", names=list(names))
            case m.AuditChunk():
                self.shell.start(partial(self._audit, asked), fatal())
            case m.Show():
                self.shell.start(partial(self.disk.show, asked), fatal())
            case m.RebuildCommit():
                self.shell.start(partial(self.disk.rebuild, asked), fatal())

    async def _audit(self, asked: m.AuditChunk) -> e.Event:
        """A chunk that another site has reduced."""
        return e.Fulfilled(await self.disk.auditor.audit(asked))

    async def _say_manifest(self) -> None:
        """In parts, on the stream that it was asked for on, or not at all: another one has not asked yet."""
        joined, asked_on = self.core.ctx.joined, self.session.num_streams
        assert joined is not None
        data = await asyncio.to_thread(wire.encode, joined.manifest)
        if self.session.num_streams == asked_on:
            for part in wire.manifest_parts(data):
                self.handle(e.Fulfilled(part))
