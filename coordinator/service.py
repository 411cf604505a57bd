"""The gRPC shell around the core: streams in, events to the core one by one, outputs executed in order."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc

import atoll
from atoll.coordinator import calls, commands, limits
from atoll.coordinator.authority import Authority
from atoll.coordinator.backup import TOKEN_BYTES, backup, place_of
from atoll.coordinator.computing import Computing
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.core import events as e
from atoll.coordinator.core.audit import words_of_line
from atoll.coordinator.core.core import Core
from atoll.coordinator.core.view.document import RunView
from atoll.coordinator.curves_shown import CurvesShown
from atoll.coordinator.deposits import Depositing
from atoll.coordinator.enrolment import Enrolment
from atoll.coordinator.front_door import FrontDoor, listen
from atoll.coordinator.happenings import Happenings
from atoll.coordinator.lease import Leading
from atoll.coordinator.loop_lag import LoopLag
from atoll.coordinator.noting import TOLD_TO_END, noted, refused
from atoll.coordinator.paces import Paces
from atoll.coordinator.rotation import rotation_of
from atoll.coordinator.status_shown import StatusShown
from atoll.coordinator.store import RESTORE, Store
from atoll.coordinator.streams import Bodies, Stream
from atoll.coordinator.sync_timeline import SyncTimeline
from atoll.coordinator.sync_times import SyncTimes
from atoll.coordinator.watchers import Watchers
from atoll.protocol import PROTOCOL_VERSION, addresses, descriptors, messages, transport
from atoll.protocol.deposits import Seal
from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.errors import ConfigError, HostError, PeerError, RefusedError, StateError
from atoll.protocol.machine import REAL, Machine
from atoll.protocol.measuring import Measures
from atoll.protocol.messages import Deposit
from atoll.protocol.settings import RunSettings, settings_from_json, settings_to_json
from atoll.protocol.status import abort, cut_off
from atoll.protocol.trust.access import guarded
from atoll.protocol.trust.security import PLAIN, Caller, Security
from atoll.protocol.v1 import session_pb2

log = logging.getLogger("atoll.coordinator")

SERVICE = "atoll.protocol.v1.CoordinatorService"
MAX_BATCH = 256
"""Events that are handled together."""
STOP_GRACE_S = 2.0
NAME_BYTES = 16
"""Of the socket behind the front door."""
STORE_PATIENCE_S = 2.0
"""Who asks for the run waits so long for what is being kept, then is told what was known before."""
KEEP_VIEW_EVERY_S = 5.0


class CoordinatorServer:
    """One run served over gRPC. `start`, then `run` until `stop` or an error; the store stays the caller's."""

    def __init__(
        self,
        config: CoordinatorConfig,
        settings: RunSettings,
        store: Store,
        parent_json: str = "",
        machine: Machine = REAL,
        *,
        authority: Authority | None = None,
        security: Security = PLAIN,
        leading: Leading | None = None,
    ) -> None:
        """`authority`: of a run that is not in plain text, with what this process shows as `security`. `leading`: of
        one of several that share the store."""
        self._loop = asyncio.get_running_loop()
        self._machine = machine
        self.config = config
        self.address = ""
        self._store = store
        persisted = store.begin(settings, parent_json)
        settings = self.settings = settings_from_json(persisted.run.settings_json)
        self._term = persisted.term
        self._parent = json.loads(persisted.run.parent_json or "null")
        self._commit_times = store.commit_times()
        try:
            secret = machine.token_bytes(DIGEST_BYTES) if settings.sync.audits else b""
            self._core = Core(settings, persisted, self._loop.time(), machine.wall_time(), secret)
        except StateError as error:
            raise StateError(f"the store {config.store_path} is damaged ({error}): {RESTORE}") from error
        self._security = security
        self._enrolment = Enrolment(authority, security, self._core, self._decide) if authority is not None else None
        self.leading = leading
        self._paces = paces = Paces()
        self._rotation = rotation_of(
            authority,
            self._core,
            self._decide,
            lambda known: Watchers(security, known, self._refusal, paces),
            coordinators=self._shared_among,
            leading=leading,
        )
        self._viewed_at = self._loop.time()
        self._kept_view = self._core.view(self._viewed_at)
        self._sync_times, self._timeline, self._happenings = SyncTimes(), SyncTimeline(), Happenings()
        self.hear_kept: list[Callable[[Sequence[e.Record], float], None]] = [self._sync_times.kept]
        self.said_beside: dict[str, Callable[[], Any]] = {"num_lost_spans": lambda: None, "trackers": list}
        self.status = StatusShown(self.document)
        self._keeping_since: float | None = None
        self._streams: dict[int, Stream] = {}
        self._bodies = bodies = Bodies()
        self._asked: dict[int, asyncio.Future[e.Answer]] = {}  # requests of people, not answered yet
        self._numbers = itertools.count(1)  # of streams and requests
        self._stopping = False
        self.loop_lag: LoopLag | None = None
        self._deciding = deciding = asyncio.Lock()  # from a decision until it is kept and sent
        self.curves = CurvesShown(self._core, deciding, self._commit_times)
        seal = Seal(authority.secret if authority is not None else b"", settings.run_id)
        self._depositing = Depositing(store, seal, deciding, bodies)
        self._events: asyncio.Queue[tuple[e.Event, Stream | None] | None] = asyncio.Queue()
        self._computing = Computing(
            lambda event: self._events.put_nowait((event, None)), lambda: self._events.put_nowait(None)
        )
        self._server: grpc.aio.Server | None = None
        self._door: FrontDoor | None = None
        self._calls = calls.Paced()

    # --- life

    async def start(self) -> None:
        """Listens. Raises HostError if the port cannot be had, ConfigError for what is not an address."""
        wanted = (2 if self._rotation is None else 3) * self.settings.max_sites + limits.MORE_CONNECTIONS
        most = descriptors.for_connections(
            descriptors.raise_limit(),
            wanted,
            f"run.max_sites = {self.settings.max_sites}",
            limits.DESCRIPTORS_EACH if self._enrolment is not None else 1,
        )
        server = self._machine.network.create_server(
            max_message_bytes=transport.MAX_SESSION_MESSAGE_BYTES,
            max_received_bytes=limits.MAX_MESSAGE_BYTES,
            max_calls_each=limits.MAX_CALLS_EACH,
            max_connections=most,
        )
        handlers = calls.handlers(self._session, self._status, self._operate)
        if self._enrolment is not None and self._rotation is not None:
            handlers |= {**self._enrolment.handlers, "Watch": self._rotation.watchers.handler}
            handlers |= Measures(self.settings.run_id, self._security).handlers
        allowed = guarded(SERVICE, handlers, self._security, self._refusal, self._let_in)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, allowed),))
        if (credentials := self._security.of_server()) is not None:
            name = self._machine.token_bytes(NAME_BYTES).hex()
            self._door = FrontDoor(name, per_address=self.config.connections_per_address, in_all=most)
            if self._enrolment is not None:
                self._enrolment.address_of = self._door.address_of
        port = await listen(server, self.config.listen, self._door, credentials)
        self._server = server
        self.address = addresses.join_address(addresses.parse_address(self.config.listen)[0], port)
        if self._enrolment is None:
            who = "each user of this machine" if addresses.is_loopback(self.config.listen) else "whoever reaches it"
            log.warning("%s is in plain text: %s can join or disturb the run", self.address, who)
            if self.settings.sync.audits:
                log.warning("sync.audits in plain text: sites sign nothing, so no audit can be shown to others")

    async def run(self) -> None:
        """Handles events until `stop`. Raises what the store raises: then nothing more may be decided."""
        while True:
            now = self._loop.time()
            deadline = self._core.next_deadline()
            try:
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - now)):
                    item = await self._events.get()
            except TimeoutError:
                item = (e.Tick(), None)
            batch: list[tuple[e.Event, Stream | None]] = []
            while item is not None:
                batch.append(item)
                if self._events.empty() or len(batch) == MAX_BATCH:
                    break
                item = self._events.get_nowait()
            try:
                async with self._deciding:
                    self._keep_view()
                    events = [event for event, _ in batch]
                    await self._execute(self._core.handle(events, self._loop.time(), self._machine.wall_time()))
            finally:
                for _, stream in batch:
                    if stream is not None:
                        stream.slots.release()
            if item is None:
                self._computing.raise_fault()
                return

    async def stop(self) -> None:
        """Ends all streams; sites train on and look for a coordinator. A second call does nothing."""
        if self._stopping:
            return
        self._stopping = True
        self._events.put_nowait(None)
        for request in self._asked:
            self._answer(e.Answer(request, TOLD_TO_END))
        for stream in self._streams.values():
            stream.put(None)
        if self._rotation is not None:
            self._rotation.watchers.close()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        if self._door is not None:
            self._door.close()

    async def command(self, line: bytes, by: str, *, is_here: bool = True) -> e.Answer:
        """Does what a line says (commands.py), for that person, who is on this machine or elsewhere."""
        try:
            asked = commands.read(line, by)
        except ConfigError as error:
            return await noted(self._decide, by, words_of_line(line), e.Answer(0, f"not a request: {error}"))
        if isinstance(asked, commands.StatusAsked):
            return e.Answer(0, "", await self.status_json(data_ranges=asked.data_ranges))
        if isinstance(asked, commands.HealthAsked):
            return e.Answer(0, "", "; ".join(self.obstacles()))
        if isinstance(asked, commands.BackupAsked):
            words = f"backup path={json.dumps(asked.path)}"
            return await noted(self._decide, by, words, await self._backup(Path(asked.path), is_here=is_here))
        return await self.ask(asked)

    async def ask(self, asked: e.Asked) -> e.Answer:
        """What a person wants, and what comes of it, once that is kept."""
        if not isinstance(asked, e.InviteAsked | e.RotateAsked):
            return await self._decide(asked)
        if self._enrolment is None or self._rotation is None:
            text = "it is in plain text: whoever reaches it joins without an invite"
            return await refused(self._decide, asked, text)
        if isinstance(asked, e.RotateAsked):
            return await self._rotation.ask(asked)
        return await self._enrolment.invite(asked, self._own_address, self._shared_among())

    def _shared_among(self) -> tuple[str, ...]:
        """Where sites reach this one, and those that stand by, if there are any."""
        return self.leading.addresses(self._own_address) if self.leading is not None else ()

    @property
    def _own_address(self) -> str:
        """Where sites reach this one."""
        return self.config.advertise or self.address

    async def _backup(self, path: Path, *, is_here: bool) -> e.Answer:
        if not is_here:
            return e.Answer(0, "that is for its own machine alone")
        made = place_of(self.config.store_path, self._machine.token_bytes(TOKEN_BYTES))
        try:
            commit = await backup(self._store, made, path, self._deciding, lambda: self._core.last_commit)
        except (HostError, ConfigError) as error:
            return e.Answer(0, str(error))
        return e.Answer(0, "", f"commit {commit}")

    async def _decide(self, asked: e.Asked) -> e.Answer:
        """By the core."""
        if self._stopping:
            return e.Answer(0, TOLD_TO_END)  # nothing more is kept
        request = next(self._numbers)
        answer: asyncio.Future[e.Answer] = self._loop.create_future()
        self._asked[request] = answer
        try:
            self._events.put_nowait((replace(asked, request=request), None))
            return await answer
        finally:
            del self._asked[request]

    def _answer(self, answer: e.Answer) -> None:
        if (asked := self._asked.get(answer.request)) is not None and not asked.done():
            asked.set_result(answer)

    @property
    def _stuck_s(self) -> float:
        return 0.0 if self._keeping_since is None else self._loop.time() - self._keeping_since

    def obstacles(self) -> Iterator[str]:
        """To its work; that it says so, shows that it lives."""
        if (stuck_s := self._stuck_s) > STORE_PATIENCE_S:
            yield f"the store has kept a decision waiting for {stuck_s:.0f} s"
        if (missing := self._core.missing_for_quorum()) > 0:
            yield f"{missing} more {'site is' if missing == 1 else 'sites are'} needed for a quorum"

    def may_look(self, token: str) -> bool:
        """Whether that is a viewer's token."""
        return self._enrolment is not None and self._enrolment.may_look(token)

    async def document(self, *, data_ranges: bool = False) -> dict[str, Any]:
        """The run for people and programs, as on /status.json; of decisions only what is kept. While the store is
        stuck, what was known before."""
        try:
            async with asyncio.timeout(STORE_PATIENCE_S), self._deciding:
                return self._document(self._core.view(self._loop.time()), data_ranges=data_ranges)
        except TimeoutError:
            return self._document(self._kept_view, data_ranges=False)

    async def status_json(self, *, data_ranges: bool = False) -> str:
        """As text."""
        if data_ranges:
            return await asyncio.to_thread(json.dumps, await self.document(data_ranges=True))
        return await self.status.text()

    def _document(self, view: RunView, *, data_ranges: bool) -> dict[str, Any]:
        document = asdict(view)
        for commit in document["commits"]:
            commit["time"] = self._commit_times.get(commit["commit"])
        if data_ranges:
            document["data_ranges"] = [asdict(view) for view in self._core.data_ranges()]
        document["store_stuck_s"] = round(self._stuck_s, 1)
        document["sync_times"] = self._sync_times.document()
        document["timeline"] = self._timeline.document(self._core.median_phases())
        document["events"] = self._happenings.document()
        certified = self._enrolment
        document |= {"root": certified and certified.root_pem, "root_until_s": certified and certified.root_until_s}
        document["time"] = self._machine.wall_time()
        document["delayed_messages"] = dict(self._paces.delayed)
        document |= {name: of() for name, of in self.said_beside.items()}
        document["turned_away"] = self._door.document() if self._door is not None else {}
        document["settings"] = json.loads(settings_to_json(self.settings))
        document |= {"parent": self._parent, "atoll_version": atoll.__version__}
        document["leading"] = self.leading.document() if self.leading is not None else None
        document["coordinators"] = list(self._shared_among())
        if (lag := self.loop_lag) is not None:
            document["event_loop"] = {"lag_p999_s": lag.within_s(0.999), "worst_lag_s": lag.worst_s}
        return document

    def _keep_view(self) -> None:
        """What is shown if the store gets stuck with what comes next."""
        now = self._loop.time()
        if now - self._viewed_at >= KEEP_VIEW_EVERY_S:
            self._viewed_at, self._kept_view = now, self._core.view(now)

    # --- outputs

    async def _execute(self, outputs: list[e.Output]) -> None:
        deposits: tuple[Deposit, ...] = ()
        for output in outputs:
            match output:
                case e.Persist(records):
                    now = self._machine.wall_time()
                    self._keeping_since = self._loop.time()
                    deposits = await asyncio.to_thread(self._store.persist, self._term, records, now)
                    self._keeping_since = None
                    self.status.kept()
                    self._timeline.kept(records, now)
                    for hear in self.hear_kept:
                        hear(records, self._loop.time())
                    for record in records:
                        if isinstance(record, e.CommitRecord):
                            self._commit_times[record.commit.commit] = now
                            self._commit_times.pop(record.commit.commit - messages.MAX_LOG_COMMITS, None)
                    if self._rotation is not None:
                        self._rotation.kept(records)
                case e.Send(number, messages.Sources() as sources):
                    if number in self._streams:
                        await self._streams[number].say_sources(sources)
                case e.Send(number, message):
                    if (stream := self._streams.get(number)) is not None:
                        stream.say(message, self._bodies)
                        if isinstance(message, messages.Welcome):
                            self._depositing.welcomed(stream)
                case e.CloseStream(number, _):
                    if number in self._streams:
                        self._streams[number].put(None)
                case e.Answer():
                    self._answer(output)
                case e.Report(level, text):
                    log.log(level, "%s", text)
                    self._happenings.note(level, text, self._machine.wall_time())
                case e.ReadCommits(first=first, last=last):
                    commits, attestations = await asyncio.to_thread(self._store.read_commits, first, last)
                    read = e.CommitsRead(commits=commits, attestations=attestations)
                    self._events.put_nowait((read, None))
                case e.ReadManifest() | e.Recompute():
                    self._computing.begin(output)
        self._depositing.kept(deposits)

    # --- streams

    async def _session(self, requests: AsyncIterator[bytes], context: Any) -> None:
        certified = self._certified(context)
        stream = Stream(next(self._numbers), self._paces, certified.name if certified is not None else None)
        self._streams[stream.number] = stream
        self._events.put_nowait((e.StreamOpened(stream.number, certified), None))
        header = messages.Header(protocol_version=PROTOCOL_VERSION, run_id=self.settings.run_id, term=self._term)
        reader = asyncio.create_task(stream.read(requests, lambda event: self._happened(event, stream)))
        writer = asyncio.create_task(stream.write(context, header, self._shared_among))
        reason = "cancelled"
        try:
            done, _ = await asyncio.wait((reader, writer, stream.cut_off), return_when=asyncio.FIRST_COMPLETED)
            reason = next(task.result() for task in (stream.cut_off, writer, reader) if task in done)
            if reader in done and not writer.done() and not stream.cut_off.done():
                # The site has said its last word; it may still want to hear ours.
                stream.put(None)
                await asyncio.wait((writer, stream.cut_off), timeout=STOP_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._streams[stream.number]
            self._depositing.gone(stream)
            self._events.put_nowait((e.StreamClosed(stream.number, reason), None))
            is_stuck = not writer.done()
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        if is_stuck:
            log.warning("stream %d is cut off: %s", stream.number, reason)
            await cut_off(context, PeerError(reason))

    def _happened(self, event: e.Event, stream: Stream) -> None:
        if isinstance(event, e.Received) and isinstance(event.message, messages.Hello):
            stream.deposits_to = event.message.deposits_to
        self._events.put_nowait((event, stream))

    def _refusal(self, caller: Caller) -> str:
        return self._enrolment.refusal(caller) if self._enrolment is not None else ""

    def _let_in(self, caller: Caller, method: str, context: Any) -> AbstractContextManager[None]:
        """Raises PeerError for somebody who calls too often: again later is in order."""
        if self._door is not None:
            self._door.is_of(context.peer(), caller.subject)
        self._calls.take(caller, method, self._loop.time())
        return nullcontext()

    def _certified(self, context: Any) -> e.Certified | None:
        """Whom a session is of."""
        caller = self._security.caller(context)
        return e.Certified(caller.subject.name, caller.key_digest) if caller is not None else None

    async def _operate(self, request: session_pb2.OperateRequest, context: Any) -> session_pb2.OperateResponse:
        caller = self._security.caller(context)
        if caller is None:
            text = "this coordinator is in plain text, where nobody is known: commands are for its own machine"
            await abort(context, RefusedError(text))
        by = f"operator {caller.subject.name} (key {caller.key_digest.hex()[:16]})"
        answer = await self.command(request.line.encode(), by, is_here=False)
        return session_pb2.OperateResponse(problem=answer.problem, found=answer.found)

    async def _status(self, request: session_pb2.StatusRequest, context: Any) -> session_pb2.StatusResponse:
        return session_pb2.StatusResponse(json=await self.status_json(data_ranges=request.data_ranges))
