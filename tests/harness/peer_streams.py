"""A node's side of streams without sockets: a reducer of all chunks with a real data plane, and what its peer sends."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.sync.exchange import Exchange
from atoll.protocol import PROTOCOL_VERSION, wire
from atoll.protocol import messages as m
from atoll.protocol.plans import plan_digest
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.v1 import peer_pb2
from tests.harness import data_plane as dp

LAYOUT = dp.layout()
HEADER = m.Header(protocol_version=PROTOCOL_VERSION, run_id=dp.RUN, site_id=1, incarnation=1)
PACE = Pace(stall_s=5.0, slowest_bytes_per_s=0.0)
MEMBERS = tuple(m.Member(site_id=i, incarnation=1, address=f"127.0.0.1:{i}") for i in (1, 2))


def plan(**changes: Any) -> m.Plan:
    whole = m.Plan(
        sync=1,
        attempt=1,
        term=1,
        base_commit=0,
        contributors=MEMBERS,
        trees=(m.Tree(first_chunk=0, num_chunks=LAYOUT.num_sync_chunks, parents=(-1, 0)),),
        stall_limit_s=5.0,
        num_steps=10,
        deadline_s=60.0,
        slowest_bytes_per_s=1000,
    )
    return replace(whole, **changes)


def begin(
    hub: Hub,
    plan: m.Plan,
    data: SyncData,
    weights: Sequence[int] | None = None,
    *,
    spread_s: float = 0.0,
    in_flight: Collection[int] = (),
) -> Exchange:
    """As a node does, but for the thread. All have the same weight, if no others are given."""
    share = hub.share(plan, data)()
    told = (5,) * len(plan.contributors) if weights is None else weights
    return hub.begin(plan, data, share, tokens=5, weights=told, spread_s=spread_s, in_flight=in_flight)


class Aborted(Exception):
    pass


class FakeContext:
    """A stream: what the peer sends, and what it was sent."""

    def __init__(self, received: list[bytes]) -> None:
        self.received = deque(received)
        self.sent: list[bytes] = []

    async def read(self) -> bytes:
        return self.received.popleft() if self.received else b"\xff"  # ends what would wait for more

    async def write(self, frame: bytes) -> None:
        self.sent.append(frame)

    def peer(self) -> str:
        return "a test"

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(code, details)


class Disk:
    """Outer state and log of a donor at commit 1."""

    def __init__(self, folder: Path) -> None:
        self.outer = dp.seeded(folder / "state", LAYOUT)
        self.log = PayloadLog(folder / "log", LAYOUT, RunSettings(run_id=dp.RUN, sync=SyncSettings(log_commits=4)))
        self.payloads = dp.payloads(self.outer)
        dp.logged(self.log, self.outer, 1, self.payloads)
        self.data = dp.sync_data(self.outer, dp.filled(LAYOUT, 3))
        self.contributions = [
            Encoded(chunk, data, self.data.payload_hash(data))
            for chunk in self.data.chunks
            for data in [self.data.contribution(chunk)]
        ]


@asynccontextmanager
async def serving(disk: Disk, max_retained_bytes: int = 1 << 20, *, dialer: Dialer | None = None) -> AsyncIterator[Hub]:
    """A node that is the reducer of all chunks of sync 1; `dialer`: of what it dials itself."""
    hub = Hub(run_id=dp.RUN, incarnation=1, dialer=dialer or Dialer(), pool=ThreadPoolExecutor(1), site_id=1)
    hub.max_retained_bytes = max_retained_bytes
    hub.serve(LAYOUT, lambda: disk.outer, disk.log, PACE)
    try:
        yield hub
    finally:
        await hub.close()


def opening(**changes: Any) -> peer_pb2.ExchangeOpen:
    header = wire.to_proto(replace(HEADER, site_id=2))
    values: dict[str, Any] = {
        "header": header, "sync": 1, "attempt": 1, "plan_term": 1, "plan_digest": plan_digest(plan()), "tokens": 5,
        "reducer_site_id": 1, "reducer_incarnation": 1, "num_chunks": LAYOUT.num_sync_chunks,
    }  # fmt: skip
    return peer_pb2.ExchangeOpen(**(values | changes))
