"""Several sites' exchange sides in one process, over real loopback gRPC and the real data plane; no daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import grpc.aio
import numpy as np
import numpy.typing as npt

from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.listener import listen
from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.service import PeerService
from atoll.node.exchange.sync.exchange import Exchange, ExchangeResult
from atoll.protocol import transport
from atoll.protocol.history import History
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.machine import Network
from atoll.protocol.messages import Attestation, Commit, Donor, Member, Plan, Sources, Tree
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.plans import weights
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chunks import paste
from tests.harness.data_plane import an_optimizer, fragment_at

RUN_ID = "sites"
DTYPES = dict.fromkeys(("a", "b", "empty", "w"), "F32")
OPTIMIZER = an_optimizer(OuterSettings(learning_rate=0.7, momentum=0.5))
SETTINGS = SyncSettings(codec="int8", chunk_elements=1000)
TRAVELS = spec_of(SETTINGS, 0, 0)
PACE = Pace(stall_s=20.0, slowest_bytes_per_s=1 << 10)


def small_layout(num_fragments: int = 1) -> Layout:
    """15 chunks that travel (one of them a buffer's, one of integers), an empty one, two frozen ones."""
    tensors = [
        TensorSpec(name="a", shape=(110, 110), dtype="F32", role=Role.TRAINABLE),
        TensorSpec(name="b", shape=(7,), dtype="F32", role=Role.TRAINABLE),
        TensorSpec(name="empty", shape=(0, 3), dtype="F32", role=Role.TRAINABLE),
        TensorSpec(name="mean", shape=(20,), dtype="F32", role=Role.BUFFER_MEAN),
        TensorSpec(name="count", shape=(), dtype="I64", role=Role.BUFFER_LOWEST),
        TensorSpec(name="frozen", shape=(1500,), dtype="F16", role=Role.FROZEN),
    ]
    return Layout(Manifest.canonical(tensors), SETTINGS.chunk_elements, num_fragments)


def big_layout() -> Layout:
    """Chunks of 4 MiB: several parts each."""
    manifest = Manifest.canonical([TensorSpec(name="w", shape=(6 << 20,), dtype="F32", role=Role.TRAINABLE)])
    return Layout(manifest, 1 << 20)


def first_values(layout: Layout) -> dict[int, bytes]:
    random = np.random.default_rng(7)
    values: dict[int, bytes] = {}
    for chunk in layout.chunks:
        if chunk.role in (Role.TRAINABLE, Role.BUFFER_MEAN):
            values[chunk.index] = random.standard_normal(chunk.num_elements, np.float32).tobytes()
        else:
            values[chunk.index] = random.bytes(chunk.num_bytes)
    return values


@dataclass
class Site:
    site_id: int
    layout: Layout
    hub: Hub
    log: PayloadLog
    outer: OuterState
    snapshot: memoryview
    server: grpc.aio.Server
    address: str
    incarnation: int = 1
    own: range | None = None
    """Of one of several hosts of a site: the chunks whose exchange is this host's."""

    @classmethod
    async def start(
        cls,
        site_id: int,
        folder: Path,
        layout: Layout,
        *,
        incarnation: int = 1,
        port: int = 0,
        host: str = "127.0.0.1",
        network: Network = transport,
        pool: Executor | None = None,
        home: str = "",
    ) -> Site:
        home_folder = folder / (home or f"site-{site_id}")
        log = PayloadLog(home_folder / "log", layout, RunSettings(run_id=RUN_ID, sync=SyncSettings()))
        if OuterState.exists(home_folder / "state"):
            outer = OuterState.open(home_folder / "state", layout, OPTIMIZER.slots, RUN_ID, history=lambda: log.history)
        else:
            outer = OuterState.create(home_folder / "state", layout, OPTIMIZER.slots, RUN_ID)
            outer.history = lambda: log.history
        dialer = Dialer(network)
        pool = pool or ThreadPoolExecutor(2)
        hub = Hub(run_id=RUN_ID, incarnation=incarnation, dialer=dialer, pool=pool, site_id=site_id)
        hub.max_retained_bytes = 1 << 30
        hub.serve(layout, lambda: outer, log, PACE)
        server, port = await listen(f"{host}:{port}", PeerService(hub).handlers, network)
        snapshot = memoryview(bytearray(layout.buffer_bytes))
        return cls(site_id, layout, hub, log, outer, snapshot, server, f"{host}:{port}", incarnation)

    async def stop(self) -> None:
        await self.hub.close()
        await self.server.stop(0)
        self.log.close()

    def seed(self) -> None:
        for chunk, data in first_values(self.layout).items():
            self.outer.seed(chunk, data)

    def train(self, seed: int) -> None:
        """Local values a little away from the outer ones."""
        random = np.random.default_rng([seed, self.site_id])
        for chunk in self.layout.chunks[: self.layout.num_sync_chunks]:
            if chunk.role is Role.BUFFER_LOWEST:
                paste(self.snapshot, chunk, random.bytes(chunk.num_bytes))
                continue
            base = np.frombuffer(self.outer.read(chunk.index).data[: chunk.num_bytes], np.float32)
            step: npt.NDArray[np.float32] = random.standard_normal(chunk.num_elements, np.float32)
            paste(self.snapshot, chunk, (base + np.float32(0.01) * step).tobytes())

    @property
    def data(self) -> SyncData:
        return self.data_of(0)

    def data_of(self, fragment: int) -> SyncData:
        return SyncData(self.layout, TRAVELS, self.outer, self.snapshot, DTYPES, fragment=fragment, own=self.own)

    def member(self, tokens: int) -> Member:
        return Member(site_id=self.site_id, incarnation=self.incarnation, address=self.address, tokens=tokens)

    def donor(self) -> Donor:
        commit = self.outer.commit
        assert commit is not None
        return Donor(site_id=self.site_id, incarnation=self.incarnation, address=self.address, commit=commit)

    def begin(self, plan: Plan, data: SyncData | None = None, spread_s: float = 0.0) -> Exchange:
        """`plan` has the weights that this site knows: those of all, or its own."""
        data = data or self.data_of(plan.fragment)
        share = self.hub.share(plan, data)()
        tokens = next((c.tokens for c in plan.contributors if c.site_id == self.site_id), 0)
        told = weights(plan) if all(weights(plan)) else ()
        return self.hub.begin(plan, data, share, tokens=tokens, weights=told, spread_s=spread_s)

    def apply(self, record: Commit) -> None:
        self.log.commit(record)
        for chunk in self.layout.fragments[record.fragment]:
            self.outer.apply(chunk, self.log.read(record.commit, chunk), OPTIMIZER.at(record))
        self.hub.drop_sync(record.sync)

    def payloads(self, plan: Plan) -> list[bytes]:
        file = self.log.begin(plan.sync, plan.term, plan.attempt)
        return [file.read(chunk) for chunk in self.data.chunks]


class Party(Protocol):
    """A site as plans know it, of one host or of several."""

    site_id: int

    def member(self, tokens: int) -> Member: ...


def star_plan(
    layout: Layout,
    contributors: Sequence[Party],
    receivers: Sequence[Party] = (),
    *,
    sync: int = 1,
    attempt: int = 1,
    stall_limit_s: float = 20.0,
    deadline_s: float = 600.0,
    slowest_bytes_per_s: int = 1 << 10,
    fragment: int = 0,
) -> Plan:
    """Reducers take turns, chunk by chunk."""
    count = len(contributors)
    trees = []
    for chunk in range(layout.num_sync_chunks):
        top = chunk % count
        parents = tuple(-1 if i == top else top for i in range(count))
        trees.append(Tree(first_chunk=chunk, num_chunks=1, parents=parents))
    return Plan(
        sync=sync,
        attempt=attempt,
        term=1,
        fragment=fragment,
        base_commit=sync - 1,
        contributors=tuple(site.member(100 + site.site_id) for site in contributors),
        receivers=tuple(site.member(0) for site in receivers),
        trees=tuple(trees),
        stall_limit_s=stall_limit_s,
        num_steps=10,
        deadline_s=deadline_s,
        slowest_bytes_per_s=slowest_bytes_per_s,
    )


def commit_of(plan: Plan, digest: bytes) -> Commit:
    return Commit(
        commit=plan.sync,
        sync=plan.sync,
        attempt=plan.attempt,
        term=plan.term,
        fragment=plan.fragment,
        contributors=plan.contributors,
        payload_digest=digest,
        run_step=10 * plan.sync,
        run_tokens=1000 * plan.sync,
    )


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what has no event of its own; the test's time limit bounds it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


class Run:
    """Sites that sync one after the other; what a coordinator would know of them."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder = folder
        self.layout = layout
        self.sites: list[Site] = []
        self.commits: list[Commit] = []
        self.attested: dict[int, bytes] = {}

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *_: object) -> None:
        for site in self.sites:
            await site.stop()

    async def add(self, count: int = 1, *, seeded: bool = True) -> list[Site]:
        new = []
        for _ in range(count):
            site = await Site.start(len(self.sites) + 1, self.folder, self.layout)
            if seeded:
                site.seed()
                self.attested[0] = site.outer.state_hash()
            self.sites.append(site)
            new.append(site)
        return new

    async def sync(self, sites: Sequence[Site] | None = None) -> Commit:
        """One sync of `sites`, applied on all of them."""
        sites = self.sites if sites is None else sites
        number = len(self.commits) + 1
        plan = star_plan(self.layout, sites, sync=number, fragment=fragment_at(self.layout, number))
        for site in sites:
            site.train(plan.sync)
        results = await run_all(plan, sites)
        record = commit_of(plan, results[0].payload_digest)
        for site in sites:
            site.apply(record)
        self.commits.append(record)
        self.attested[record.commit] = sites[0].outer.state_hash()
        return record

    def sources(self, donors: Sequence[Site], *, after: int = 0, attested: Sequence[int] | None = None) -> Sources:
        known = sorted(self.attested) if attested is None else attested
        num = len(self.layout.fragments)
        return Sources(
            attested=tuple(Attestation(commit=c, state_hash=self.attested[c]) for c in known),
            donors=tuple(site.donor() for site in donors),
            commits=tuple(c for c in self.commits if c.commit > after),
            touched=History([0] * num, (c.fragment for c in self.commits)).touched(after) or () if num > 1 else (),
        )


async def run_all(plan: Plan, sites: Sequence[Site]) -> list[ExchangeResult]:
    """All sites' exchanges of one plan; their digests are equal."""
    exchanges = [site.begin(plan) for site in sites]
    results = await asyncio.gather(*(exchange.run() for exchange in exchanges))
    assert len({result.payload_digest for result in results}) == 1
    return list(results)


def expected_payloads(plan: Plan, sites: Sequence[Site]) -> list[bytes]:
    """What the plan's reducers must make, without any transport."""
    by_id = {site.site_id: site for site in sites}
    result = []
    for chunk in sites[0].data.chunks:
        parts = [(m.tokens, by_id[m.site_id].data.contribution(chunk)) for m in plan.contributors]
        result.append(sites[0].data.reduce(chunk, parts))
    return result


def next_attempt(plan: Plan, layout: Layout, contributors: Sequence[Site]) -> Plan:
    return replace(star_plan(layout, contributors, sync=plan.sync), attempt=plan.attempt + 1)
