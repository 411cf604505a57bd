"""One node: events from session, workers and tasks go into the core; what the core wants is carried out here."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from atoll import __version__
from atoll.node.core import events as e
from atoll.node.core.context import SiteIdentity
from atoll.node.core.disk import Outer
from atoll.node.core.endings import MAX_REASON_CHARACTERS
from atoll.node.core.node import NodeCore
from atoll.node.core.ranks.outcomes import GroupEvent, RanksJoined
from atoll.node.core.ranks.pieces import SitePieces
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.discover import Run
from atoll.node.daemon.home import Home
from atoll.node.daemon.journal import Journal
from atoll.node.daemon.launcher import Launcher
from atoll.node.daemon.local_server import Greeting
from atoll.node.daemon.observer import Observer
from atoll.node.daemon.parts import REAL_PARTS, Parts
from atoll.node.daemon.plane import DataPlane
from atoll.node.daemon.room import Room, free_for, room_for
from atoll.node.daemon.session import Session, SessionHandlers
from atoll.node.dataplane import saved_model
from atoll.node.dataplane.footprint import footprint
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.prober import Prober
from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.sync.exchange import Exchange
from atoll.node.threads import run_to_its_end
from atoll.protocol import PROTOCOL_VERSION, wire
from atoll.protocol import messages as m
from atoll.protocol.errors import (
    AtollError,
    AverageError,
    HostError,
    InvalidMessage,
    NonFiniteError,
    NoRoomError,
    PeerError,
    StateError,
)
from atoll.protocol.exit_codes import ENDED_AT_ONCE, exit_code_of, exit_code_on_own_disk
from atoll.protocol.layout import Layout, Manifest
from atoll.protocol.machine import Machine

log = logging.getLogger(__name__)

PHASES_OF_A_SYNC = frozenset({"training", "ready", "exchanging", "waiting for commit", "applying"})
"""They come round with every sync, and are shown with --debug only; each commit has a line."""
OF_AN_EXCHANGE = (e.BeginExchange, e.WeighExchange, e.CancelExchange, e.DropSync)
FLUSH_S = 2.0
"""How long the last words to the coordinator may take."""
SCRIPT_END_S = 600.0
"""How long a script may go on after its workers have left the run."""
LEAVING_SCRIPT_END_S = 20.0
"""The same when a person, or the machine as it goes down, has told the site to leave."""
SCRIPT_NOTICE_S = 5.0
"""After which the node says that it waits for that; leaving Python and torch takes a second or two."""


class Node:
    """Owns the core and everything it decides over. `run` returns the exit code and its reason."""

    def __init__(
        self,
        *,
        config: NodeConfig,
        run: Run,
        home: Home,
        plane: DataPlane | None,
        hub: Hub,
        address: str,
        journal: Journal,
        machine: Machine,
        parts: Parts = REAL_PARTS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.config = config
        self.run_settings = run
        self.home = home
        self.plane = plane
        self.hub = hub
        self.journal = journal
        self._parts = parts
        self.local_server = parts.local_server(self._from_workers, self._fail)
        self._launcher: Launcher | None = None
        identity = SiteIdentity(
            name=config.name,
            key=home.key,
            address=address,
            incarnation=home.incarnation,
            atoll_version=__version__,
            from_saved_model=config.from_saved is not None,
            bandwidth_bytes_per_s=config.bandwidth_bytes_per_s,
            process_id=home.process_id,
        )
        held = plane.held() if plane else None
        outer = Outer(commit=held[0], state_hash=held[1], run_step=0, run_tokens=0) if held else None
        self.core = NodeCore(
            identity, run.settings, outer, self._loop.time(), branch=home.branch, num_ranks=config.num_ranks
        )
        self.session = Session(
            config.coordinator,
            None,
            self.core.limits,
            SessionHandlers(
                opened=lambda: self.handle(e.SessionOpened()),
                lost=lambda reason: self.handle(e.SessionLost(reason)),
                received=self._received,
                header=self._header,
                heartbeat=self._heartbeat,
            ),
            machine,
        )
        self.observer = Observer(
            config=config,
            core=self.core,
            session=self.session,
            local_server=self.local_server,
            hub=hub,
            journal=journal,
        )
        self.prober = Prober(
            header=self._header,
            dialer=hub.dialer,
            limits=lambda: self.core.limits,
            found=lambda site_ids: self.handle(e.PeersProbed(site_ids)),
            failed=self._fail,
        )
        self._inbox: deque[e.Event] = deque()  # the first is being handled
        self._result: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: asyncio.Task[None] | None = None
        self._layout: asyncio.Task[None] | None = None
        self._has_buffers = False
        self._of_exchanges: deque[e.Output] = deque()  # not carried out yet; see `_go_on_with_exchanges`
        self._beginning: asyncio.Task[None] | None = None
        self._exchange: Exchange | None = None
        self._fetch: asyncio.Task[None] | None = None
        self._worker_lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._sources: asyncio.Future[m.Sources] | None = None  # asked for by a fetch
        self._model_folder = config.save_dir or home.folder / "model"
        self._model_lock = asyncio.Lock()
        self._has_model_beside = False
        self._kept_model: int | None = None
        self._void_model: int | None = None
        self._phase = ""
        self._is_told_to_leave = False
        self.failure: BaseException | None = None
        """What ended this node where nothing was prepared for it; see `_fail`."""

    # --- life

    async def run(self) -> tuple[int, str]:
        await self.local_server.start()
        self.home.note_socket_folder(Path(self.local_server.path).parent)
        self._launcher = self._parts.launcher(self.config.launch, self.handle, self._fail)
        self._session = self._spawn(self.session.run())
        try:
            code, text = await self._result
            await self.session.close()
            await asyncio.wait({self._session}, timeout=FLUSH_S)
            if code == 0:
                await self._wait_for_workers()
            return code, text
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for task in (tasks := list(self._tasks)):
                task.cancel()
            await self._launcher.stop()  # before the tasks: those in threads end with what they do to the disk
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._drop_model()
            await self.prober.close()
            await self.local_server.close()

    async def end_workers(self) -> None:
        """After the last words to the coordinator. Nothing else that is under way is waited for."""
        if self._session is not None:
            await asyncio.wait({self._session}, timeout=FLUSH_S)
        if self._launcher is not None:
            await self._launcher.stop()

    def leave_now(self, reason: str) -> int:
        """Say goodbye and end, whatever is under way. The exit code: of what it had come to before, if it had."""
        if self._result.done():
            self._spawn(self._stop_workers())
        else:
            self.session.send(m.Leave(reason=reason))
            self._result.set_result((ENDED_AT_ONCE, reason))
        return self._result.result()[0]

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
        self.observer.observe(event)
        outputs = self.core.handle(event, self._loop.time())
        self.hub.site_id = self.core.site.site_id
        for output in outputs:
            self._execute(output)
        if self.core.phase != self._phase:
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
        self._result.set_result((error.exit_code if isinstance(error, AtollError) else HostError.exit_code, text))
        self.session.send(m.Leave(reason=text[:MAX_REASON_CHARACTERS], fatal=True))

    def leave(self, reason: str) -> None:
        self._is_told_to_leave = True
        if self._result.done():
            self.leave_now(reason)
        else:
            self.handle(e.LeaveAsked(reason))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.core.next_deadline()
        if deadline is not None and not self._result.done():
            delay_s = max(deadline - self._loop.time(), 0.0)
            self._timer = self._loop.call_later(delay_s, self.handle, e.Tick())

    def _received(self, header: m.Header, message: m.CoordinatorMessage) -> None:
        if header.run_id != self.run_settings.settings.run_id and not isinstance(message, m.Refused):
            self.session.num_refused_messages += 1
            return
        if isinstance(message, m.Sources) and self._sources is not None and not self._sources.done():
            self._sources.set_result(message)
        self.handle(e.Received(header.term, message))

    def _header(self) -> m.Header:
        site = self.core.site
        return m.Header(
            protocol_version=PROTOCOL_VERSION,
            run_id=self.run_settings.settings.run_id,
            term=site.term,
            site_id=site.site_id,
            incarnation=self.home.incarnation,
            generation=site.workers.generation,
        )

    def _heartbeat(self) -> m.Heartbeat:
        return self.observer.heartbeat()

    # --- outputs

    def _execute(self, output: e.Output) -> None:
        if isinstance(output, OF_AN_EXCHANGE):
            self._of_exchanges.append(output)
            self._go_on_with_exchanges()
        else:
            self._carry_out(output)

    def _go_on_with_exchanges(self) -> None:
        """In their order. An exchange needs the buffers, and what grows with the model is done in a thread."""
        while self._of_exchanges and self._has_buffers and self._beginning is None:
            output = self._of_exchanges.popleft()
            if isinstance(output, e.BeginExchange):
                self._beginning = self._spawn(self._begin_exchange(output.plan))
            else:
                self._carry_out(output)

    def _carry_out(self, output: e.Output) -> None:
        match output:
            case e.Send(message):
                if isinstance(message, m.Leave):
                    self.session.send(self.observer.heartbeat())  # the last figures of this site
                self.session.send(message)
            case e.StartWorkers(generation, settings_json):
                self._spawn(self._start_workers(generation, settings_json))
            case e.StopWorkers():
                self._spawn(self._stop_workers())
            case e.DescribeCrash():
                self._describe_crash(output)
            case e.SendLayout():
                self._layout = self._spawn(self._send_layout(output, self._layout))
            case e.AnswerWorkers(generation=generation, step=step, seq=seq, answer=answer):
                self.local_server.answer(generation, step, seq, answer)
            case e.AnswerDraw():
                self.local_server.answer_draw(output)
            case e.SeedState():
                self._task(self._seed(), _fatal("the starting state: "))
            case e.FetchState(sources):
                self._fetch = self._task(self._fetch_state(sources), lambda error: e.FetchFailed(str(error)))
            case e.CancelFetch():
                if self._fetch is not None:
                    self._fetch.cancel()
            case e.WeighExchange(plan):
                self.hub.weigh(plan)
            case e.CancelExchange():
                if self._exchange is not None:
                    self._exchange.cancel()
            case e.ApplyCommit(commit):
                self._task(self._apply(commit), lambda error: e.ApplyFailed(commit.commit, str(error)))
            case e.PublishState(content):
                self._task(self._publish(content), _fatal())
            case e.DropSync(sync):
                self.hub.drop_sync(sync)
                if self.plane is not None:
                    self._task(run_to_its_end(partial(self.plane.log.drop, sync)), _fatal())
            case e.SaveModel():
                self._task(self._save(output), _fatal("saving the model: "))
            case e.KeepModel(number):
                self._task(self._keep_model(number), _fatal("saving the model: "))
            case e.DropModel(number):
                self._void_model = number
                self._task(self._drop_model(), _fatal("removing a wrong model: "))
            case e.DistrustState(reason):
                log.warning("checking every chunk in %s: %s", self.home.state_folder, reason)
                self._task(self._distrust(), _fatal())
            case e.ListPayloads():
                self._task(self._list_payloads(output), _fatal())
            case e.SendManifest(manifest):
                self._task(self._send_manifest(manifest), _fatal())
            case e.ProbePeers(members):
                self.prober.watch(members)
            case e.DialBack(member):
                self.hub.donations.dial(member)
            case e.ShowEvidence(asked):
                self._task(self._show(asked), _fatal())
            case e.RebuildCommit():
                self._task(self._rebuild(output), _fatal())
            case e.RollBack():
                self._task(self._roll_back(output), _fatal())
            case e.Report(level, text):
                log.log(level, "%s", text)
                self.journal.write("report", level=logging.getLevelName(level), text=text)
            case e.Exit(code, text):
                if not self._result.done():
                    self._result.set_result((code, text))
                self.journal.write("exit", code=code, text=text)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _task(self, work: Coroutine[Any, Any, None], failed: Callable[[Exception], e.Event]) -> asyncio.Task[None]:
        """Run `work`; one of atoll's own errors or an I/O error becomes an event. A HostError ends the site."""

        async def guarded() -> None:
            if self._layout is not None:
                try:
                    await asyncio.wait({self._layout})  # there may be no data plane before
                except asyncio.CancelledError:
                    work.close()
                    raise
                if self.core.site.exit is not None:
                    work.close()  # it could not be made
                    return
            try:
                await work
            except HostError as error:
                self.handle(_fatal()(error))
            except (AtollError, OSError) as error:
                if log.isEnabledFor(logging.DEBUG):
                    log.exception("failed")
                self.handle(failed(error))

        return self._spawn(guarded())

    async def _send_manifest(self, manifest: Manifest) -> None:
        """On the stream that it was asked for on, or not at all: another one has not asked yet."""
        asked_on = self.session.num_streams
        data = await asyncio.to_thread(wire.encode, manifest)
        if self.session.num_streams == asked_on:
            for part in wire.manifest_parts(data):
                self.session.send(part)

    # --- workers

    async def _start_workers(self, generation: int, settings_json: str) -> None:
        async with self._worker_lock:
            if self._result.done():
                return
            settings = self.core.settings
            greeting = Greeting(
                settings_json=settings_json,
                site_name=self.config.name,
                data_paths=tuple(str(p) for p in self.config.data_paths),
                run_seed=settings.seed,
                resumed=self.config.from_saved is not None,
                checkpoint_folder=str(self.home.optimizer_folder) if settings.checkpoint_every else "",
                crashed_from=self.core.ranks.crashed_from,
            )
            group = self.core.ranks.group
            if group is None or group.generation != generation:
                return  # others are to be started, and these are not
            self.local_server.begin(group, greeting)
            assert self._launcher is not None
            try:
                await self._launcher.start(generation, self.local_server.path)
            except AtollError as error:
                self._refuse_workers(generation, error)

    def _refuse_workers(self, generation: int, error: AtollError | OSError) -> None:
        """New ones would not help."""
        if self.local_server.generation == generation:  # not those who came after them
            self.local_server.refuse(str(error))
        kind = e.FailureKind.FATAL
        self.handle(e.WorkersFailed(generation=generation, kind=kind, text=str(error), exit_code=exit_code_of(error)))

    async def _wait_for_workers(self) -> None:
        """They have left the run; their script may still evaluate, or write files of its own."""
        assert self._launcher is not None
        if await self._launcher.wait(SCRIPT_NOTICE_S):
            return
        limit_s = LEAVING_SCRIPT_END_S if self._is_told_to_leave else SCRIPT_END_S
        log.info("the workers have left the run; waiting at most %g s for their script, Ctrl-C ends it", limit_s)
        if not await self._launcher.wait(limit_s):
            log.warning("the script did not end within %g s of leaving the run and is killed", limit_s)

    async def _stop_workers(self) -> None:
        async with self._worker_lock:
            assert self._launcher is not None
            await self._launcher.stop()

    def _from_workers(self, event: GroupEvent) -> None:
        if isinstance(event, RanksJoined):
            self._spawn(self._joined(event))
        elif isinstance(event, e.WorkersFailed) and event.kind is e.FailureKind.CRASHED:
            self.handle(e.WorkersLost(event.generation, event.text))
        else:
            self.handle(event)

    async def _joined(self, ranks: RanksJoined) -> None:
        """Their model is known: what does not fit on this machine is refused before the site offers itself."""
        config, has_buffers = self.config, self.plane is not None and self.plane.snapshot is not None

        def measure() -> Room:
            layout = Layout(ranks.manifest, self.core.settings.sync.chunk_elements)
            return room_for(
                footprint(layout, self.core.settings),
                free_for(self.home.folder, self.home.disk),
                self.home.folder,
                max_retained_bytes=config.max_retained_bytes,
                reduce_buffer_bytes=config.reduce_buffer_bytes,
                has_buffers=has_buffers,
            )

        try:
            room = await asyncio.to_thread(measure)
        except AtollError as error:
            self._refuse_workers(ranks.generation, error)
            return
        # Where workers join again, plans are made by what the site has offered.
        max_retained_bytes = self.hub.max_retained_bytes or room.max_retained_bytes
        self.hub.allow(max_retained_bytes, room.reduce_buffer_bytes)
        log.info("as a reducer this node holds %s", room)
        self.handle(
            e.WorkersJoined(
                generation=ranks.generation,
                manifest=ranks.manifest,
                data_fingerprint=ranks.data_fingerprint,
                max_retained_bytes=max_retained_bytes,
            )
        )

    def _describe_crash(self, output: e.DescribeCrash) -> None:
        assert self._launcher is not None
        lines = () if output.has_exited else self._launcher.last_lines
        text, kind = "\n".join((output.text, *lines)), e.FailureKind.CRASHED
        self.handle(e.WorkersFailed(generation=output.generation, kind=kind, text=text, num_steps=output.num_steps))

    async def _send_layout(self, output: e.SendLayout, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        if self.local_server.generation != output.generation:
            return  # those workers are gone meanwhile
        pieces = self.local_server.pieces
        assert pieces is not None
        try:
            self.plane = plane = await run_to_its_end(partial(self._attached, self.plane, pieces))
            assert plane.snapshot is not None
            assert plane.publish_buffer is not None
            self.hub.serve(plane.layout, lambda: plane.outer, plane.log, self._pace)
            self._has_buffers = True
            self._go_on_with_exchanges()
            await self.local_server.send_layout(
                generation=output.generation,
                site_id=output.site_id,
                incarnation=self.home.incarnation,
                run_seed=output.run_seed,
                layout=plane.layout,
                snapshot=plane.snapshot,
                publish=plane.publish_buffer,
            )
        except (AtollError, OSError) as error:
            self._refuse_workers(output.generation, error)

    def _attached(self, plane: DataPlane | None, pieces: SitePieces) -> DataPlane:
        """In a thread: as much memory as the model takes is allocated, and files of an earlier start are read."""
        if plane is None:
            plane = self._parts.data_plane(
                self.home, self.core.settings, pieces.manifest, self.config.num_kernel_threads
            )
        if plane.layout.manifest.digest != pieces.manifest.digest:
            raise InvalidMessage(
                f"{self.home.folder} holds the state of another model; choose another folder with --home"
            )
        plane.attach_workers(pieces.dtypes)
        return plane

    # --- data plane

    async def _seed(self) -> None:
        assert self.plane is not None
        state_hash = await self.plane.seed(self.config.from_saved)
        if self.plane.snapshot_is_due:  # before anybody counts on it: there is no other copy
            await self.plane.write_snapshot()
        self.handle(e.StateSeeded(state_hash=state_hash))

    async def _fetch_state(self, sources: m.Sources) -> None:
        plane = self.plane
        assert plane is not None
        async with plane.lock:
            fetched = await self.hub.fetch_state(
                site_id=self.core.site.site_id,
                sources=sources,
                refresh=self._ask_for_sources,
                undialable=lambda: self.core.site.unreachable_site_ids,
                outer=await run_to_its_end(plane.fresh_outer),
                log=plane.log,
                optimizer=plane.optimizer,
                pace=self._pace,
            )
        record = fetched.record
        self.handle(
            e.StateFetched(
                commit=fetched.commit,
                state_hash=fetched.state_hash,
                run_step=record.run_step if record else 0,
                run_tokens=record.run_tokens if record else 0,
                final=record is not None and record.final,
            )
        )
        self._snapshot_if_due()

    @property
    def _pace(self) -> Pace:
        limits = self.core.limits
        return Pace(stall_s=limits.stall_s, slowest_bytes_per_s=limits.slowest_bytes_per_s)

    async def _ask_for_sources(self, undialled: tuple[int, ...]) -> m.Sources:
        """What has changed at the coordinator while a fetch is under way; these donors are to dial this site."""
        assert self.plane is not None
        if not self.core.site.welcomed:
            raise PeerError("there is no coordinator to ask who has the state")
        commit = self.plane.outer.commit if self.plane.outer is not None else None
        self._sources = self._loop.create_future()
        asked = m.FindSources(has_state=commit is not None, after_commit=commit or 0, undialled_site_ids=undialled)
        self.session.send(asked)
        try:
            async with asyncio.timeout(self.core.limits.lease_s):
                return await self._sources
        except TimeoutError:
            raise PeerError("the coordinator does not say who has the state") from None
        finally:
            self._sources = None

    async def _begin_exchange(self, plan: m.Plan) -> None:
        assert self.plane is not None
        site_id = self.core.site.site_id
        broken: e.ExchangeBroken | None = None
        try:
            data = self.plane.sync_data(plan)
            share = await run_to_its_end(self.hub.share(plan, data, site_id=site_id), self.hub.pool)
            self._exchange = self.hub.begin(plan, data, share, site_id=site_id)
            self._spawn(self._run_exchange(self._exchange))
            await self._exchange.reducer.make_room()  # what is forgotten is not taken for held by the next one
        except AtollError as error:
            broken = _broken(plan, error)
            if isinstance(error, NoRoomError):
                broken = replace(broken, peer_site_id=site_id, phase="holding contributions")
        self._beginning = None
        if broken is not None:
            self.handle(broken)
        self._go_on_with_exchanges()

    async def _run_exchange(self, exchange: Exchange) -> None:
        plan, started = exchange.plan, self._loop.time()
        try:
            result = await exchange.run()
        except asyncio.CancelledError:
            if self._result.done():
                raise
            return  # another attempt, or the end of the sync
        except (NonFiniteError, HostError) as error:
            self.handle(e.DataPlaneFailed(str(error), error.exit_code))
            return
        except (AtollError, OSError) as error:
            self.handle(_broken(plan, error))
            return
        self.observer.exchange_s = self._loop.time() - started
        self.handle(
            e.ExchangeFinished(
                sync=plan.sync,
                attempt=plan.attempt,
                term=plan.term,
                payload_digest=result.payload_digest,
                tokens=result.tokens,
                sent_bytes=result.sent_bytes,
                received_bytes=result.received_bytes,
                stood_out=_outlier(result.stood_out) if result.stood_out is not None else None,
            )
        )

    async def _apply(self, commit: m.Commit) -> None:
        assert self.plane is not None
        started = self._loop.time()
        state_hash = await self.plane.apply(commit)
        self.observer.apply_s = self._loop.time() - started
        self.handle(e.CommitApplied(commit=commit.commit, state_hash=state_hash))
        log.info("commit %d: step %d, %s", commit.commit, commit.run_step, self.observer.last_sync())
        self._snapshot_if_due()

    def _snapshot_if_due(self) -> None:
        if self.plane is not None and self.plane.snapshot_is_due:
            self._task(self.plane.write_snapshot(), _fatal("a snapshot: "))

    async def _distrust(self) -> None:
        damaged = await self.plane.distrust() if self.plane is not None else []
        log.info("%d chunks are damaged; the others are compared with those of the other sites", len(damaged))
        self.handle(e.StateVerified())

    async def _list_payloads(self, output: e.ListPayloads) -> None:
        assert self.plane is not None
        key = (output.sync, output.term, output.attempt)
        try:
            hashes = await run_to_its_end(partial(self.plane.log.hashes, *key))
        except StateError as error:
            log.warning("%s", error)  # the sync is over meanwhile
            return
        self.handle(e.PayloadsListed(sync=output.sync, attempt=output.attempt, term=output.term, hashes=hashes))

    async def _show(self, asked: m.Show) -> None:
        """A part of it. What is not here, or cannot be read, may be at another site."""
        data, text = b"", "it holds no state"
        try:
            if self.plane is not None:
                data = await self.plane.show(asked.evidence, asked.commit, asked.chunk)
        except (AtollError, OSError) as error:
            text = str(error)
        shown = m.Shown(
            commit=asked.commit,
            evidence=asked.evidence,
            chunk=asked.chunk,
            first_byte=asked.first_byte,
            total_bytes=len(data),
            data=data[asked.first_byte : asked.first_byte + m.EVIDENCE_PART_BYTES],
            text="" if data else text[:1024],
        )
        self.handle(e.EvidenceShown(shown))

    async def _rebuild(self, output: e.RebuildCommit) -> None:
        """A site without room for it, or with a damaged log, goes on with what it holds."""
        assert self.plane is not None
        state_hash, text = b"", ""
        try:
            state_hash = await self.plane.put_aside(output.commit, output.state_hash, output.last_commit)
        except (AtollError, OSError) as error:
            text = str(error)
        oldest = await run_to_its_end(self.plane.oldest)
        self.handle(e.CommitRebuilt(commit=output.commit, state_hash=state_hash, oldest=oldest, text=text))

    async def _roll_back(self, output: e.RollBack) -> None:
        held = await self.plane.roll_back(output.commit) if self.plane is not None else None
        await run_to_its_end(partial(self.home.keep_branch, output.branch))
        self.handle(e.DiskRolledBack(branch=output.branch, held=held))

    async def _publish(self, content: e.Content) -> None:
        assert self.plane is not None
        await self.plane.publish(content)
        self.handle(e.Published(content))

    async def _save(self, output: e.SaveModel) -> None:
        assert self.plane is not None
        folder, at_home = self.config.save_dir, self.home.folder / "model"
        info = {
            "run_step": output.run_step,
            "run_tokens": output.run_tokens,
            "settings": json.loads(self.run_settings.settings_json),
            "site": self.config.name,
        }
        trouble = ""
        # The state first: while an earlier model is put in place or removed the run goes on.
        async with self.plane.frozen(output.commit) as frozen, self._model_lock:
            self._model_folder, self._has_model_beside = folder or at_home, True
            # Rather in another place than nowhere: the run may be over, and the other sites gone.
            why = await self.plane.save(frozen, self._model_folder, info, at_home if folder else None)
            if why is not None:
                self._model_folder = at_home
                trouble = f"the model of commit {output.commit} is in {at_home}, as --save could not be followed: {why}"
                log.error("%s", trouble)
        self.handle(e.ModelSaved(commit=output.commit, trouble=trouble))

    async def _keep_model(self, commit: int) -> None:
        async with self._model_lock:
            self._has_model_beside = False  # if this fails it is left where it is, and that is said
            await run_to_its_end(partial(saved_model.put_in_place, self._model_folder))
            self._kept_model = commit
        log.info("saved the model of commit %d in %s", commit, self._model_folder)
        self.handle(e.ModelKept(commit=commit))

    async def _drop_model(self) -> None:
        """What is written and not in place; and what is, if it turned out to be wrong."""
        async with self._model_lock:
            if self._has_model_beside:
                await run_to_its_end(partial(saved_model.discard, self._model_folder))
                self._has_model_beside = False
            void, self._void_model = self._void_model, None  # once: another commit has that number later
            if void is not None and void == self._kept_model:
                await run_to_its_end(partial(saved_model.take_back, self._model_folder))
                self._kept_model = None

    def close(self) -> None:
        if self.plane is not None:
            self.plane.close()


_MOST = sys.float_info.max
"""The wire carries finite numbers alone."""


def _fatal(doing: str = "") -> Callable[[Exception], e.Event]:
    """What a failure on this machine becomes that no other site can help with."""
    return lambda error: e.DataPlaneFailed(f"{doing}{error}", exit_code_on_own_disk(error))


def _outlier(found: tuple[int, float, float]) -> m.Outlier:
    site_id, norm, limit = found
    return m.Outlier(site_id=site_id, norm=min(norm, _MOST), limit=min(limit, _MOST))


def _broken(plan: m.Plan, error: Exception) -> e.ExchangeBroken:
    peer = error if isinstance(error, PeerError) else None
    average = error if isinstance(error, AverageError) else None
    return e.ExchangeBroken(
        sync=plan.sync,
        attempt=plan.attempt,
        term=plan.term,
        peer_site_id=peer.peer_site_id if peer else 0,
        sending=peer is not None and peer.sending,
        phase=peer.phase if peer else "averaging" if average else "local",
        text=str(error),
        tensor=average.tensor if average else "",
        outliers=tuple(_outlier(found) for found in (average.outliers if average else ())),
    )
