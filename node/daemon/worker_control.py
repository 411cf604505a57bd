"""The workers of a site, as its core wants them: started, given their buffers, described when they crash, stopped."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.ranks.generations import layout_of
from atoll.node.core.ranks.pieces import SitePieces, site_pieces
from atoll.node.daemon.disk_jobs import DiskJobs
from atoll.node.daemon.exchanges import Exchanges
from atoll.node.daemon.launcher import Launcher, script_ended
from atoll.node.daemon.room import room_of
from atoll.node.daemon.shell import Shell
from atoll.node.local_protocol import Greeting
from atoll.node.parallel.settings import check_site
from atoll.protocol.errors import AtollError
from atoll.protocol.exit_codes import exit_code_of
from atoll.protocol.threads import run_to_its_end

log = logging.getLogger(__name__)


def said_of_crash(crash: out.DescribeCrash, ranks_a_host: int, launcher: Launcher) -> tuple[str, ...]:
    """Lines for a person. What ranks of this host printed last says nothing of one on another host."""
    if crash.rank is not None and crash.rank >= ranks_a_host:
        return crash.text, f"what it printed is in the log of host {crash.rank // ranks_a_host} of this site"
    return (crash.text,) if crash.has_exited else (crash.text, *launcher.last_lines)


class WorkerControl:
    """`launcher` is there between `open` and the node's end."""

    def __init__(self, shell: Shell, disk: DiskJobs, exchanges: Exchanges) -> None:
        self.server = shell.parts.local_server(shell.handle, shell.fail)
        self._leader = shell.leader
        self._pieces: SitePieces | None = None  # of the last ranks that joined
        self.launcher: Launcher | None = None
        self._shell = shell
        self._disk = disk
        self._exchanges = exchanges
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Ranks may connect. Raises HostError."""
        shell = self._shell
        await self.server.start()
        shell.home.note_socket_folder(Path(self.server.path).parent)
        self.launcher = shell.parts.launcher(shell.config, self._leader.exited, shell.fail)
        try:
            await self._leader.open(self.server.connected)
        except BaseException:
            await self.server.close()
            raise

    def execute(self, output: out.Output) -> None:
        """Do it, or begin it."""
        match output:
            case out.StartWorkers(generation, settings_json):
                self._shell.tasks.spawn(self._start(generation, settings_json))
            case out.StopWorkers():
                self._shell.tasks.spawn(self.stop())
            case out.DescribeCrash():
                self._describe_crash(output)
            case out.SendLayout():
                self._shell.layout = self._shell.tasks.spawn(self._send_layout(output, self._shell.layout))
            case out.MergePieces():
                self._shell.tasks.spawn(self._merge_pieces(output))
            case out.ShareSnapshot():
                self._shell.tasks.spawn(self._leader.share(output))

    async def _start(self, generation: int, settings_json: str) -> None:
        async with self._lock:
            config, home, core = self._shell.config, self._shell.home, self._shell.core
            if self._shell.has_ended() or core.site.workers.generation != generation:
                return  # others are to be started, and these are not
            greeting = Greeting(
                settings_json=settings_json,
                data_paths=tuple(str(p) for p in config.data_paths),
                checkpoint_folder=str(home.optimizer_folder) if core.settings.checkpoint_every else "",
                crashed_from=core.ranks.crashed_from,
                parallel=config.parallel,
            )
            self.server.begin(generation, greeting)
            assert self.launcher is not None
            try:
                if not config.command:
                    check_site(config.parallel, config.num_site_ranks, core.settings)
                await self.launcher.start(generation, self.server.path)
                self._leader.start(generation, self.launcher.meeting)
            except AtollError as error:
                self._refuse(generation, error)

    async def stop(self) -> None:
        """Once they are started."""
        async with self._lock:
            self._leader.stop()
            await self.end()

    async def end(self) -> None:
        """All processes of this host, though they are being started. Idempotent."""
        if self.launcher is not None:
            await self.launcher.stop()

    def _refuse(self, generation: int, error: AtollError | OSError) -> None:
        """New ones would not help."""
        if self.server.generation == generation:  # not those who came after them
            self.server.refuse(str(error))
        kind, code = e.FailureKind.FATAL, exit_code_of(error)
        self._shell.handle(e.WorkersFailed(generation=generation, kind=kind, text=str(error), exit_code=code))

    async def wait_for_script(self, *, told_to_leave: bool) -> None:
        assert self.launcher is not None
        await script_ended(self.launcher, told_to_leave=told_to_leave)

    # --- what happens to them

    async def _merge_pieces(self, output: out.MergePieces) -> None:
        """Their model is known then: what does not fit on this machine is refused before the site offers itself."""
        config, home, hub, plane = self._shell.config, self._shell.home, self._shell.hub, self._disk.plane
        settings, generation = self._shell.core.settings, output.generation
        pieces = await run_to_its_end(partial(site_pieces, output.ranks, config.num_ranks))
        if isinstance(pieces, str):
            self._shell.handle(e.PiecesMerged(generation=generation, pieces=pieces))
            return
        has_buffers = plane is not None and plane.snapshot is not None
        try:
            room = await asyncio.to_thread(
                room_of,
                config,
                settings,
                pieces.manifest,
                home.folder,
                home.disk,
                has_buffers=has_buffers,
                read_in_place=pieces.reads_in_place and not has_buffers,  # else its file is there
            )
        except AtollError as error:
            self._refuse(generation, error)
            return
        # Where workers join again, plans are made by what the site has offered.
        max_retained_bytes = hub.max_retained_bytes or room.max_retained_bytes
        keeps_errors = settings.sync.error_feedback_down > 0
        hub.allow(max_retained_bytes, room.reduce_buffer_bytes, keeps_errors=keeps_errors)
        log.info("as a reducer this node holds %s", room)
        self._pieces = pieces
        self._shell.handle(
            e.PiecesMerged(
                generation=generation,
                pieces=pieces,
                max_retained_bytes=max_retained_bytes,
                endpoints=self._leader.endpoints(pieces.manifest),
            )
        )

    def _describe_crash(self, output: out.DescribeCrash) -> None:
        assert self.launcher is not None
        said, kind = said_of_crash(output, self._shell.config.num_ranks, self.launcher), e.FailureKind.CRASHED
        text = "\n".join(said)
        failed = e.WorkersFailed(generation=output.generation, kind=kind, text=text, num_steps=output.num_steps)
        self._shell.handle(failed)

    async def _send_layout(self, output: out.SendLayout, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        group = self._shell.core.ranks.group
        is_here = group is not None and group.generation == output.generation and group.pieces is not None
        pieces = group.pieces if is_here and group is not None else self._pieces
        if pieces is None:
            return
        try:
            plane = await self._disk.attach(pieces)
            assert plane.snapshot is not None
            assert plane.published.buffer is not None
            self._exchanges.have_buffers()
            if not is_here or group is None:
                return  # those workers are gone meanwhile; the model is that of those who follow
            told = partial(
                layout_of,
                group,
                output,
                self._shell.home.incarnation,
                plane.layout.chunk_elements,
                outer_name=plane.published.outer_name,
            )
            self._leader.laid_out(pieces, plane.layout, plane.snapshot)
            await self.server.send_layout(output.generation, told, plane.layout, plane.snapshot, plane.published.buffer)
        except (AtollError, OSError) as error:
            self._refuse(output.generation, error)
