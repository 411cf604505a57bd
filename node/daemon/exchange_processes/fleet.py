"""The exchange processes beside a node: started with it, and again when one ends; what they hear and say."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.node import host_protocol as hosts
from atoll.node import process_protocol as processes
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.exchange_processes.attached import AttachedProcess, Processes
from atoll.node.daemon.exchange_processes.process_exchanges import ProcessExchanges
from atoll.node.daemon.hosts.link import BEATS_A_LEASE, while_heard
from atoll.node.daemon.peers import Met
from atoll.node.daemon.plane import DataPlane
from atoll.node.daemon.rank_connection import RankConnection
from atoll.node.tasks import Tasks, end
from atoll.protocol import messages as m
from atoll.protocol.addresses import join_address, parse_address, parse_proxy
from atoll.protocol.errors import AtollError, HostError, NonFiniteError, PeerError
from atoll.protocol.settings import RunSettings, settings_to_json
from atoll.protocol.trust.security import MutualTls, Shown

log = logging.getLogger("atoll.node")

START_LIMIT_S = 120.0
"""Until a process listens: it may have kernels to compile."""
END_LIMIT_S = 5.0
"""For a process that is told to end."""
MAX_STARTS_IN_A_ROW = 3
"""Of a process that does its part of no exchange between them."""
LONG_LIFE_S = 60.0
"""After which its end is no sign that the next one ends, too."""
PROGRAM = (sys.executable, "-P", "-m", "atoll.node.daemon.exchange_processes")


@dataclass(frozen=True, slots=True)
class _LaidOut:
    words: dict[int, processes.ProcessLayout]
    snapshot: int  # its descriptor


class ExchangeProcesses:
    """`start` it, and `close` it. A host of one process has one too, which starts nothing."""

    def __init__(
        self,
        config: NodeConfig,
        settings: RunSettings,
        met: Met,
        *,
        home: os.PathLike[str],
        lease_s: float,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """`lease_s`: a process that says nothing for so long is killed. `program`: of each, before its descriptor."""
        self._program = program
        self._config = config
        self._settings = settings
        self._met = met
        self._home = home
        self._lease_s = lease_s
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure.add_done_callback(lambda failure: failure.cancelled() or failure.exception())
        self._tasks = Tasks(self._fail)
        self._attached = attached = Processes(config.exchange_processes - 1)
        self._parts: list[range] = [range(0)] * config.exchange_processes
        self.exchanges = ProcessExchanges(
            attached=attached,
            hub=met.hub,
            own_of=lambda n: self._parts[n],
            site_id=lambda: met.hub.site_id,
            tasks=self._tasks,
        )
        self._ports: dict[int, int] = {}  # of each, from its first start on
        self._laid_out: _LaidOut | None = None
        self._banned = m.Banned()

    # --- life

    async def start(self) -> None:
        """Returns when all of them listen. Raises HostError."""
        if isinstance(self._met.security, MutualTls):
            self._met.security.told.append(self._show)
        for number in self._attached.numbers:
            self._tasks.spawn(self._keep(number))
        ready = self._attached.until(lambda: len(self._ports) == len(self._attached.numbers))
        await while_heard(ready, self.failed())

    async def close(self) -> None:
        """Idempotent."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def failed(self) -> None:
        """Raises what no new process would help with, as soon as there is something."""
        await asyncio.shield(self._failure)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of each, for peers. Once they have started."""
        if not self._attached.numbers:
            return ()  # of a site behind a relay, which has no ports
        host, port = parse_address(self._met.address)
        is_mapped = bool(self._config.advertise)
        return tuple(
            join_address(host, port + number if is_mapped else self._ports[number]) for number in self._attached.numbers
        )

    async def _keep(self, number: int) -> None:
        """Running, whatever ends it. Raises HostError where that does not help."""
        num_starts, loop = 0, asyncio.get_running_loop()
        while True:
            started = loop.time()
            how, has_worked = await self._run(number)
            num_starts = 0 if has_worked or loop.time() - started > LONG_LIFE_S else num_starts + 1
            text = f"exchange process {number} of this host has ended: {how}"
            if num_starts == MAX_STARTS_IN_A_ROW or number not in self._ports:
                raise HostError(f"{text}; see the log for what it said")
            log.warning("%s; it is started again", text)

    async def _run(self, number: int) -> tuple[str, bool]:
        """Once, until it has ended: how, and whether it has taken part in an exchange."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            child = await asyncio.create_subprocess_exec(
                *(*self._program, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the node, which ends them
            )
        connection = RankConnection(ours)
        process = AttachedProcess(number=number, words=f"exchange process {number} of this host", connection=connection)
        problem = ""
        try:
            process.say(self._first_word(number))
            await while_heard(self._hear_all(process), connection.write_all())
        except ConnectionError:
            pass  # it has ended with something unread
        except (AtollError, OSError) as error:
            problem = str(error)
        finally:
            connection.close()
            if self._attached.is_here(process):
                del self._attached[number]
            self._attached.changed()
            self.exchanges.lost(process)
            code = await self._ended(child, 0.0 if problem else END_LIMIT_S)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{problem} ({how})" if problem else how, process.has_worked

    async def _ended(self, child: asyncio.subprocess.Process, limit_s: float) -> int:
        """Its exit code: it ends by the end of its connection, or is killed."""
        waiting = asyncio.ensure_future(child.wait())
        try:
            await asyncio.wait({waiting}, timeout=limit_s)
        finally:
            if not waiting.done():
                child.kill()
                await asyncio.wait({waiting}, timeout=END_LIMIT_S)  # it is gone at once, also where this is cancelled
        return await waiting

    def _first_word(self, number: int) -> processes.ProcessStart:
        config, security, (host, port) = self._config, self._met.security, parse_address(self._met.listen_on)
        port = port + number if port else self._ports.get(number, 0)
        return processes.ProcessStart(
            number=number,
            home=os.fsencode(self._home),
            settings_json=settings_to_json(self._settings),
            listen_on=join_address(host, port),
            num_threads=config.num_exchange_threads,
            nice=config.nice,
            is_debug=config.debug,
            beat_s=self._lease_s / BEATS_A_LEASE,
            num_processes=config.exchange_processes,
            shown=processes.ProcessShown.of(security.shown) if isinstance(security, MutualTls) else None,
            proxy=parse_proxy(config.proxy),
        )

    # --- what they say

    async def _hear_all(self, process: AttachedProcess) -> None:
        """Until it is gone. Raises PeerError for silence, InvalidMessage."""
        limit_s = START_LIMIT_S
        while True:
            frame = await self._frame(process.connection, limit_s)
            if frame is None:
                return
            self._hear(process, processes.heard_of_process(frame))
            if self._attached.is_here(process):
                limit_s = self._lease_s

    async def _frame(self, connection: RankConnection, limit_s: float) -> bytearray | None:
        """Raises PeerError for silence. Where it was this process that stood still, what was said meanwhile is there,
        and is read within one more beat."""
        reading = asyncio.ensure_future(connection.read_frame())
        try:
            for wait_s in (limit_s, self._lease_s / BEATS_A_LEASE):
                await asyncio.wait({reading}, timeout=wait_s)
                if reading.done():
                    return reading.result()
        finally:
            await end([reading])
        raise PeerError(f"it has said nothing for {limit_s:g} s")

    def _hear(self, process: AttachedProcess, said: processes.ProcessSaid) -> None:
        match said:
            case processes.ProcessReady(port=port):
                self._ports[process.number] = port
                self._attached[process.number] = process
                process.say(self._identity())
                process.say(self._banned)
                if isinstance(self._met.security, MutualTls):  # it may have been renewed meanwhile
                    process.say(processes.ProcessShown.of(self._met.security.shown))
                self._lay_out(process)
                self._attached.changed()
            case hosts.HostBeat():
                self.exchanges.heard_beat(process, said)
            case processes.ProcessLog(level=level, text=text):
                log.log(min(level, logging.ERROR), "exchange process %d: %s", process.number, text)
            case processes.ProcessFailed(text=text, exit_code=code):
                kind = NonFiniteError if code == NonFiniteError.exit_code else HostError
                self._fail(kind(f"{process.words}: {text}"))
            case processes.PayloadsStored():
                self.exchanges.stored(process, said)
            case m.Done():
                process.has_worked = True
                self.exchanges.heard_done(process, said)
            case m.Products():
                self.exchanges.heard_products(process, said)
            case m.ExchangeFailed():
                self.exchanges.heard_failed(process, said)

    # --- what they are told

    def _identity(self) -> processes.ProcessIdentity:
        hub = self._met.hub
        return processes.ProcessIdentity(site_id=hub.site_id, incarnation=hub.incarnation)

    def identify(self) -> None:
        """Who the site is has changed."""
        for process in self._attached.values():
            process.say(self._identity())

    def ban(self, names: tuple[str, ...]) -> None:
        """As the hub of the node does."""
        self._banned = m.Banned(names=names)
        for process in self._attached.values():
            process.say(self._banned)

    def _show(self, shown: Shown) -> None:
        for process in self._attached.values():
            process.say(processes.ProcessShown.of(shown))

    def lay_out(self, plane: DataPlane) -> None:
        """What the ranks of the site hold: from now on processes take part in exchanges."""
        if not self._attached.numbers:
            return
        assert plane.snapshot is not None
        hub, manifest = self._met.hub, plane.layout.manifest
        self._parts = plane.parts
        words = {
            number: processes.ProcessLayout(
                manifest=manifest,
                chunk_elements=plane.layout.chunk_elements,
                dtypes=tuple(plane.dtypes.get(spec.name, spec.dtype) for spec in manifest.tensors),
                first_chunk=plane.parts[number].start,
                end_chunk=plane.parts[number].stop,
                max_retained_bytes=hub.max_retained_bytes,
                reduce_buffer_bytes=hub.reduce_buffer_bytes,
            )
            for number in self._attached.numbers
        }
        self._laid_out = _LaidOut(words, plane.snapshot.fd)
        self.identify()
        for process in self._attached.values():
            self._lay_out(process)
        self._attached.changed()

    def _lay_out(self, process: AttachedProcess) -> None:
        if (found := self._laid_out) is not None:
            process.say(found.words[process.number], (found.snapshot,))
            process.is_laid_out = True
