"""The hosts of a site in one process, over loopback: a leader with its disk and its hub, and what a test says in the
place of another host. Followers that run are in `tests.harness.following`, the model in `model_on_hosts`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from atoll.node import host_protocol as hosts
from atoll.node.core import events as e
from atoll.node.core.host_events import HostsChanged
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.home import Home
from atoll.node.daemon.hosts.leader import Leader
from atoll.node.daemon.plane import DataPlane
from atoll.node.daemon.rank_commands import Meeting
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.progress import Pace
from atoll.node.tasks import Tasks, end
from atoll.protocol import messages as m
from atoll.protocol import transport
from atoll.protocol.settings import RunSettings
from atoll.protocol.time_limits import PRESETS, TimeLimits
from atoll.protocol.trust.security import PLAIN, Security
from tests.harness.data_plane import filled
from tests.harness.failures import unexpected
from tests.harness.hand_host import HAND_ADDRESS, HandHost
from tests.harness.model_on_hosts import LAYOUT, MANIFEST, SETTINGS, logged, payloads_of, pieces_of_site
from tests.harness.ranks import Happened, ServedRanks
from tests.harness.sockets import free_address

T = TypeVar("T")

SITE_ID = 1
LIMITS = replace(PRESETS["wan"], lease_s=600.0)
"""Of a leader. No test waits for their end; a host that a test speaks for does not beat."""
PACE = Pace(stall_s=LIMITS.stall_s, slowest_bytes_per_s=LIMITS.slowest_bytes_per_s)
MEETING = Meeting(address="127.0.0.1:4567", group_name="together")


def config_of(host: int, address: str, **more: Any) -> NodeConfig:
    values: dict[str, Any] = {
        "coordinator": "127.0.0.1:1",
        "name": "a",
        "site_hosts": 2,
        "site_rank": host,
        "site_address": address,
        "num_node_threads": 1,
    }
    return NodeConfig(**values | more)


class Led:
    """A leader, its disk, the local socket of its host, and what its core would hear."""

    def __init__(
        self,
        folder: Path,
        limits: TimeLimits = LIMITS,
        settings: RunSettings = SETTINGS,
        security: Security = PLAIN,
        **config: Any,
    ) -> None:
        self.config = config_of(0, free_address(), **config)
        self.security = security
        self.settings, self.limits = settings, limits
        self.events: asyncio.Queue[e.Event | Happened] = asyncio.Queue()
        self.server = ServedRanks(self.events.put_nowait, unexpected)
        self.failures: list[BaseException] = []
        self.tasks = Tasks(self.failures.append)
        self.home = Home(folder / "host0")
        self.hub = Hub(
            run_id=settings.run_id,
            incarnation=self.home.incarnation,
            dialer=Dialer(),
            pool=ThreadPoolExecutor(1),
            site_id=SITE_ID,
        )
        self.hub.max_retained_bytes = 1 << 30
        self.plane = plane = DataPlane(self.home, settings, MANIFEST, 1)
        plane.divide(0, self.config.site_hosts)
        plane.attach_workers(pieces_of_site().dtypes)
        assert plane.snapshot is not None
        assert plane.published.buffer is not None
        self.snapshot, self.publish = plane.snapshot, plane.published.buffer
        self.hub.serve(plane.layout, lambda: plane.outer, plane.log, PACE)
        self.leader = self.a_leader()
        self._made: list[HandHost] = []
        self.ranks: list[Any] = []
        """To be closed at the end."""

    def a_leader(self) -> Leader:
        """Of this site, which knows of no other host yet."""
        leader = Leader(
            self.config,
            self.settings,
            self.limits,
            self.events.put_nowait,
            hub=self.hub,
            home=self.home,
            donor=self._as_donor,
            tasks=self.tasks,
            security=self.security,
        )
        leader.replicas.serve(self.plane, self.plane.held())
        return leader

    def _as_donor(self) -> m.Donor:
        return m.Donor(site_id=SITE_ID, incarnation=self.home.incarnation, address=self.address, commit=0)

    @property
    def address(self) -> str:
        return self.config.site_address

    async def event(self, kind: type[T]) -> T:
        """The next one, which is of that kind."""
        event = await self.events.get()
        assert isinstance(event, kind), event
        return event

    async def hosts_changed(self, *missing: int) -> str:
        """What is said of it."""
        event = await self.event(HostsChanged)
        assert event.missing == missing, event
        return event.text

    async def welcome_host(
        self, number: int = 1, handshake: transport.Handshake | None = None, **hello: Any
    ) -> HandHost:
        """One that a test speaks for, and that is welcome."""
        host = HandHost(self.address, number, handshake)
        self._made.append(host)
        await host.says_hello(**hello)
        host.session = (await host.hears(hosts.HostWelcome)).session
        return host

    async def host(self, number: int = 1, *, ready: hosts.HostReady | None = None, **hello: Any) -> HandHost:
        """The same, and it is here."""
        host = await self.welcome_host(number, **hello)
        await host.says(ready or host.ready())
        return host

    async def host_at_commit_0(self, *, has_state: bool = True) -> tuple[HandHost, bytes]:
        """One that a test speaks for, and the hash of commit 0, which it says that it holds."""
        state_hash = await self.has_state()
        ready = hosts.HostReady(
            address=HAND_ADDRESS,
            has_state=has_state,
            commit=0,
            state_hash=state_hash if has_state else b"",
            branch=0,
            site_address=HAND_ADDRESS,
        )
        host = await self.host(ready=ready)
        await self.hosts_changed()
        return host, state_hash

    async def says_no_more(self, host: HandHost) -> None:
        """What it was told before that has all been heard."""
        self.leader.stop()
        await host.hears(hosts.StopRanks)

    async def has_heard(self, host: HandHost) -> None:
        """All that was said to host 0."""
        await host.says(hosts.RanksExited(generation=self.leader._generation, code=1, text="that word is heard"))
        await self.event(e.WorkersExited)

    # --- what the node does

    def starts(self, generation: int) -> None:
        self.leader.start(generation, MEETING)

    def lays_out(self) -> None:
        """The ranks of the generation that was started last, which have all joined."""
        self.leader.endpoints(MANIFEST)
        self.leader.laid_out(pieces_of_site(), self.plane.layout, self.snapshot)

    async def runs(self, generation: int, *told: HandHost) -> None:
        """Ranks, of which the hosts hear."""
        self.starts(generation)
        self.lays_out()
        for host in told:
            assert (await host.hears(hosts.StartRanks)).generation == generation
            assert (await host.hears(hosts.SiteLaidOut)).generation == generation

    async def has_state(self) -> bytes:
        """It has made commit 0; its hash."""
        self.snapshot.view[:] = filled(LAYOUT)
        state_hash = await self.plane.seed(None)
        self.leader.replicas.moved((0, state_hash))
        return state_hash

    async def commits(self, number: int, *with_payloads: DataPlane) -> bytes:
        """It applies that commit, whose payloads are in these logs, too. The hash of the state then."""
        self.snapshot.view[:] = filled(LAYOUT, seed=number)
        commit, payloads = payloads_of(self.plane, number)
        for plane in (self.plane, *with_payloads):
            record = logged(plane, commit, payloads)
        return await self.leader.replicas.apply(record)

    async def rolls_back(self, commit: int, branch: int) -> None:
        held = await self.plane.roll_back(commit)
        self.home.keep_branch(branch)
        self.leader.replicas.roll_back(commit, branch, held)

    async def follows(self, commit: int, number: int = 1) -> None:
        """When that host does as host 0 does, and was told of that commit."""
        attached = self.leader._hosts

        def is_so() -> bool:
            host = attached.get(number)
            return host is not None and host.follows and host.said.commit == commit

        await attached.until(is_so)

    async def publishes(self, commit: int) -> None:
        """On all hosts, for the ranks that run."""
        await self.plane.publish(e.Values(commit))
        await self.leader.publish(self.leader.ranks, e.Values(commit))

    async def close(self) -> None:
        for host in self._made:  # the leader waits for those that are here
            await host.close()
        await self.leader.close(0, "over")
        await end(self.tasks)
        for rank in self.ranks:
            rank.close()
        await self.server.close()
        self.free()
        await self.hub.close()
        assert not self.failures

    def free(self) -> None:
        """What is no socket."""
        self.plane.close()
        self.home.close()


@asynccontextmanager
async def led(
    folder: Path,
    limits: TimeLimits = LIMITS,
    settings: RunSettings = SETTINGS,
    security: Security = PLAIN,
    **config: Any,
) -> AsyncIterator[Led]:
    """A site whose leader is there."""
    site = Led(folder, limits, settings, security, **config)
    try:
        await site.server.start()
        await site.leader.open(site.server.connected)
        yield site
    finally:
        await site.close()
