"""What a host does for its site beside running ranks: it holds the state of the site, and exchanges its own chunks.

Words of the leader are followed one after the other, as host 0 does its own jobs: so a commit is applied before what is
published of it, and an exchange begins on the base that it needs. One that cannot be followed leaves the host behind;
it is told then what the leader holds, and what was said before that does not count.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import grpc.aio

from atoll.node import host_protocol as hosts
from atoll.node.core.events import Difference, Values
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.exchange_processes.fleet import ExchangeProcesses
from atoll.node.daemon.followed_exchanges import beat_of
from atoll.node.daemon.home import Home
from atoll.node.daemon.hosts.host_exchanges import HostExchanges, sync_data
from atoll.node.daemon.hosts.slices_between import SlicesTaken
from atoll.node.daemon.peers import Met
from atoll.node.daemon.plane import DataPlane
from atoll.node.daemon.room import room_of
from atoll.node.dataplane.kept_contributions import Kept, KeptContributions, own_places
from atoll.node.exchange.peers.progress import Pace
from atoll.node.local_protocol import MAX_TEXT_CHARACTERS
from atoll.node.tasks import together
from atoll.protocol import messages as m
from atoll.protocol.endpoints import Places
from atoll.protocol.errors import (
    AtollError,
    ConfigError,
    DigestMismatch,
    HostError,
    InvalidMessage,
    PeerError,
    StaleError,
    StateError,
)
from atoll.protocol.settings import RunSettings
from atoll.protocol.threads import run_to_its_end
from atoll.protocol.time_limits import TimeLimits

log = logging.getLogger("atoll.node")

Job = hosts.OfState | hosts.OfExchange
GOES_BACK = "host 0 of this site goes back from what this host was to fetch"


class Endpoint:
    """`serve` runs while the host is attached to its leader; `plane` outlives that."""

    def __init__(
        self,
        config: NodeConfig,
        settings: RunSettings,
        limits: TimeLimits,
        *,
        home: Home,
        met: Met,
        processes: ExchangeProcesses,
        site_address: str,
        say: Callable[[hosts.HostSaid], None],
    ) -> None:
        """`site_address`: where the other hosts of the site ask for slices."""
        self._config = config
        self._settings = settings
        self._limits = limits
        self._home = home
        self._hub = met.hub
        self._address = met.address
        self._processes = processes
        self._say = say
        self.plane: DataPlane | None = None
        self._site_address = site_address
        self._kept: KeptContributions | None = None  # in a run with audits
        self._keeping: dict[int, tuple[int, Kept]] = {}  # by fragment: what other hosts keep is not known yet
        self._slices = SlicesTaken(config, met.security)
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._level = logging.DEBUG if settings.sync.steps_at_nodes else logging.INFO  # of what comes with each commit
        self._is_behind = False
        self._number = 0  # of what the leader told this host to hold, or to go back to, last
        self._num_rollbacks = 0  # that wait
        self._has_plane = asyncio.Event()
        self._sources: asyncio.Future[m.Sources] | None = None  # wanted by the fetch

    def close(self) -> None:
        if self.plane is not None:
            self.plane.close()

    def ban(self, names: tuple[str, ...]) -> None:
        """Sites of these names, and of no others, are not dialled and not answered from now on."""
        self._hub.ban(names)
        self._processes.ban(names)

    # --- life

    async def load(self) -> None:
        """What an earlier start left on this host's disk, if anything. Raises StateError if it is another run's."""
        load = partial(DataPlane.load, self._home, self._settings, self._config.num_kernel_threads)
        if (plane := await run_to_its_end(load)) is not None:
            await self._have(plane)

    def beat(self) -> hosts.HostBeat:
        return beat_of(self._hub.counters)

    async def serve(self, channel: grpc.aio.Channel, session: int, incarnation: int) -> None:
        """Until it is cancelled. `channel`: to the leader, beside the words. Raises atoll's errors for what this host
        cannot go on from."""
        self._hub.incarnation = incarnation
        self._processes.identify()
        self._jobs, self._is_behind, self._sources = asyncio.Queue(), False, None
        self._number = self._num_rollbacks = 0
        self._keeping.clear()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(error: BaseException) -> None:
            if not failed.done():
                failed.set_exception(error)

        exchanges = HostExchanges(
            hub=self._hub,
            channel=channel,
            session=session,
            say=self._say,
            level=self._level,
            failed=fail,
            processes=self._processes.exchanges,
            kept=lambda: self._kept,
        )
        self._say(await self._ready())

        async def follow() -> None:
            while True:
                await self._do(await self._jobs.get(), exchanges, channel, session)

        async def failure() -> None:
            await failed

        try:
            await together([follow(), failure(), self._processes.failed()])
        finally:
            await exchanges.close()
            await self._slices.close()

    async def _ready(self) -> hosts.HostReady:
        held, errors = await self._held(), self.plane.errors if self.plane is not None else None
        commits: tuple[int | None, ...] = ()
        if self.plane is not None and errors is not None:
            commits = await run_to_its_end(partial(errors.commits, self.plane.own))
        return hosts.HostReady(
            address=self._address,
            has_state=held.has_state,
            commit=held.commit,
            state_hash=held.state_hash,
            branch=self._home.branch,
            error_commits=tuple(-1 if at is None else at for at in commits),
            process_addresses=self._processes.addresses,
            site_address=self._site_address,
        )

    async def _have(self, plane: DataPlane) -> None:
        """Raises HostError for the disk."""
        config, sync = self._config, self._settings.sync
        if sync.audits:
            keeps = partial(KeptContributions, self._home.kept_folder, sync.num_kept_syncs)
            self._kept = await run_to_its_end(keeps)
        plane.divide(config.site_rank, config.site_hosts, config.exchange_processes)
        self.plane = plane
        self._has_plane.set()
        self._hub.serve(plane.layout, lambda: plane.outer, plane.log, self._pace, self._kept)

    @property
    def _pace(self) -> Pace:
        return Pace(stall_s=self._limits.stall_s, slowest_bytes_per_s=self._limits.slowest_bytes_per_s)

    @property
    def tensors_of(self) -> tuple[frozenset[str], ...]:
        """Those whose chunks each host of the site has."""
        config, layout = self._config, self._present.layout
        places = Places.of(layout.manifest, layout.chunk_elements, config.site_hosts, config.exchange_processes)
        return tuple(frozenset(map(layout.name_of, places.of_host(host))) for host in range(config.site_hosts))

    @property
    def _present(self) -> DataPlane:
        """Raises InvalidMessage."""
        if self.plane is None:
            raise InvalidMessage("host 0 says what to do with a model before it says what that is")
        return self.plane

    @property
    def _has_buffers(self) -> bool:
        return self.plane is not None and self.plane.snapshot is not None

    def tell(self, job: Job) -> None:
        """What the leader says, after what was said before."""
        asked = self._sources if self._sources is not None and not self._sources.done() else None  # by a fetch
        match job:
            case hosts.HoldState() if asked is not None:
                asked.set_result(job.sources)
                self._number = job.number
                return
            case hosts.RollBackHost():
                self._num_rollbacks += 1
                if asked is not None:
                    asked.set_exception(StaleError(GOES_BACK))
        self._jobs.put_nowait(job)

    async def lay_out(self, told: hosts.SiteLaidOut) -> None:
        """What the site's ranks hold: there is room for the state, and there are buffers, when this returns.

        Raises HostError for the memory or the disk, ConfigError for another model than before, InvalidMessage.
        """
        if len(told.dtypes) != len(told.manifest.tensors):
            raise InvalidMessage(f"{len(told.dtypes)} dtypes of {len(told.manifest.tensors)} tensors")
        self._slices.lay_out(told)
        self._hub.site_id = told.site_id
        if self.plane is not None and self.plane.layout.manifest.digest != told.manifest.digest:
            raise ConfigError(
                f"{self._home.folder} holds the state of another model than host 0 has; choose another with --home"
            )
        config, settings, home = self._config, self._settings, self._home
        room = await asyncio.to_thread(
            room_of, config, settings, told.manifest, home.folder, home.disk, has_buffers=self._has_buffers
        )
        keeps_errors = settings.sync.error_feedback_down > 0
        self._hub.allow(room.max_retained_bytes, room.reduce_buffer_bytes, keeps_errors=keeps_errors)
        if self.plane is None:
            make = partial(DataPlane, home, settings, told.manifest, config.num_kernel_threads)
            await self._have(await run_to_its_end(make))
        names = (spec.name for spec in told.manifest.tensors)
        dtypes = dict(zip(names, told.dtypes, strict=True))
        await run_to_its_end(partial(self._present.attach_workers, dtypes))
        self._processes.lay_out(self._present)

    # --- what the leader wants

    async def _do(self, job: Job, exchanges: HostExchanges, channel: grpc.aio.Channel, session: int) -> None:
        match job:
            case hosts.HoldState():
                await self._hold(job)
            case hosts.RollBackHost():
                await self._roll_back(job)
            case m.Weights() | m.Influences() | hosts.HurryAtHost() | hosts.CancelAtHost():
                exchanges.tell(job)
            case hosts.DropAtHost(sync=sync):
                exchanges.drop(sync)
                if self.plane is not None:
                    await run_to_its_end(partial(self.plane.log.drop, sync))
            case hosts.BeginAtHost() if self._is_behind or not self._has_buffers:
                exchanges.refuse(job.plan, StateError("this host lacks what the site trained, or its state"))
            case hosts.BeginAtHost():
                self._hub.site_id = job.site_id
                await exchanges.begin(job, self._present)
            case hosts.AdvanceAtHost():
                await self._advance_errors(job)
            case hosts.KeptBySite():
                await self._complete(job)
            case _ if self._is_behind:
                pass  # it is said again
            case hosts.ApplyAtHost(commit=commit):
                await self._apply(commit, exchanges)
            case hosts.PublishAtHost():
                await self._publish(job)
            case hosts.KeepAtHost():
                await self._keep(job)
            case hosts.TakeSnapshot():
                await self._take_snapshot(job, channel, session)

    async def _held(self, lacks: str = "") -> hosts.StateHeld:
        held = await run_to_its_end(self.plane.held) if self.plane is not None else None
        commit, state_hash = held or (None, b"")
        return hosts.StateHeld(
            has_state=commit is not None,
            commit=commit or 0,
            state_hash=state_hash,
            lacks=lacks[:MAX_TEXT_CHARACTERS],
            number=self._number,
        )

    async def _apply(self, commit: m.Commit, exchanges: HostExchanges) -> None:
        """With payloads of host 0 where this host did not take part in the exchange, or not to its end."""
        plane = self._present
        try:
            try:
                await plane.apply(commit)
            except (StateError, DigestMismatch):
                await exchanges.take_committed(commit, plane)
                await plane.apply(commit)
        except (StateError, DigestMismatch) as error:
            self._is_behind = True
            self._say(await self._held(str(error)))
        else:
            held = await self._held()
            log.log(self._level, "commit %d: the state has hash %s", held.commit, held.state_hash.hex()[:12])
            self._say(held)

    async def _hold(self, job: hosts.HoldState) -> None:
        """What the leader holds: by its payloads, or its chunks. Where the leader goes back meanwhile, that is void."""
        if job.number < self._number:
            return  # a fetch asked meanwhile, and was told of what came after it
        await self._has_plane.wait()  # a host without any learns of the model from its ranks' layout
        plane = self._present
        self._hub.site_id, self._is_behind, self._number = job.site_id, False, job.number
        try:
            async with plane.fetching() as outer:
                fetched = await self._hub.fetch_state(
                    sources=job.sources,
                    refresh=self._ask_for_sources,
                    undialable=lambda: (),
                    outer=outer,
                    log=plane.log,
                    optimizer=plane.optimizer,
                    pace=self._pace,
                )
        except StaleError:
            if not self._num_rollbacks:
                raise
            return
        log.info("at commit %d, as host 0 of this site", fetched.commit)
        self._say(await self._held())

    async def _ask_for_sources(self, _: tuple[int, ...]) -> m.Sources:
        if self._num_rollbacks:
            raise StaleError(GOES_BACK)
        self._sources = asyncio.get_running_loop().create_future()
        self._say(hosts.SourcesWanted())
        try:
            async with asyncio.timeout(self._limits.lease_s):
                return await self._sources
        except TimeoutError:
            raise PeerError("host 0 of this site does not say what it holds") from None
        finally:
            self._sources = None

    async def _roll_back(self, job: hosts.RollBackHost) -> None:
        self._is_behind, self._number = False, job.number
        self._num_rollbacks -= 1
        if self.plane is not None:
            await self.plane.roll_back(job.last_commit)
        await run_to_its_end(partial(self._home.keep_branch, job.branch))
        self._say(await self._held())

    async def _publish(self, job: hosts.PublishAtHost) -> None:
        version, fragment, num_fragments = job.version, job.fragment, len(self._present.layout.fragments)
        if fragment >= num_fragments:
            raise InvalidMessage(f"fragment {fragment} is to be published, this run has {num_fragments}")
        content = Difference(job.base, version, fragment) if job.is_difference else Values(version, fragment)
        await self._present.publish(content)
        self._say(hosts.StatePublished(number=job.number))

    async def _advance_errors(self, job: hosts.AdvanceAtHost) -> None:
        problem, share = "", 0.0
        try:
            if not self._has_buffers:
                raise StateError("this host came back without what the site trained")
            plane = self._present
            if plane.errors is None:
                raise InvalidMessage("errors are to be advanced in a run without error feedback")
            data = sync_data(plane, job.base_commit, job.fragment, job.error_commits, plane.own)
            share = await plane.advance_errors(job.commit, data)
        except HostError:
            raise
        except AtollError as error:
            problem = str(error)[:MAX_TEXT_CHARACTERS] or repr(error)
        self._say(hosts.HostErrorsAdvanced(commit=job.commit, fragment=job.fragment, problem=problem, share=share))

    async def _keep(self, job: hosts.KeepAtHost) -> None:
        """What this host is to contribute. Raises NonFiniteError, HostError."""
        cover, problem, plane, kept = list[bytes](), "", self._present, self._kept
        if kept is None:
            raise InvalidMessage("contributions are to be kept in a run without audits")
        try:
            if not self._has_buffers:
                raise StateError("this host came back without what the site trained")
            data = sync_data(plane, job.base_commit, job.fragment, job.error_commits, plane.own)
            encode, pool = data.contribution_on_base, self._hub.pool
            keep = partial(kept.keep, job.sync, data.chunks, encode, pool, plane.own)
            self._keeping[job.fragment] = job.number, (own := await run_to_its_end(keep))
            cover = own.tree.cover()
        except StateError as error:
            problem = str(error)[:MAX_TEXT_CHARACTERS] or repr(error)
        self._say(hosts.HostKept(number=job.number, cover=tuple(cover), problem=problem))

    async def _complete(self, job: hosts.KeptBySite) -> None:
        """What this host keeps can be shown to others from now on."""
        number, kept = self._keeping.get(job.fragment, (0, None))
        if kept is not None and number == job.number:
            chunks = kept.tree.chunks
            parts = [own_places(chunks, own) for own in self._present.of_hosts]
            await run_to_its_end(partial(kept.tree.complete, parts, job.knots))

    async def _take_snapshot(self, job: hosts.TakeSnapshot, channel: grpc.aio.Channel, session: int) -> None:
        """What other hosts wrote of this one's tensors, into its own SNAPSHOT."""
        if await self._slices.take(job, self._present, channel, session, self._limits.stall_s):
            self._say(hosts.SnapshotTaken(generation=job.generation, fragment=job.fragment, step=job.step, seq=job.seq))
