"""All who connect to peers do so in turn: a real hub, prober and donations on simulated time, where many members name
one address, or a peer is gone that answered before."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest

from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.dialer import DIALS_AT_ONCE, LONGEST_QUEUE_S, Dialer, Purpose
from atoll.node.exchange.peers.prober import Prober
from atoll.node.exchange.peers.progress import Pace
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Attestation, Donor, Member, Plan, Sources, Tree
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.time_limits import PRESETS
from tests.harness import data_plane as dp
from tests.harness.failures import unexpected
from tests.harness.peer_streams import begin
from tests.simulation.loop import SimLoop

VICTIM = "198.51.100.7:22"
LAYOUT = dp.layout(chunk_elements=40)
NUM_STRANGERS = 30
LASTS_S = 20.0
ASKED_EVERY_S = 0.1


class Connections:
    """In place of grpc's channels: each breaks soon after its first call, no two at the same moment."""

    def __init__(self) -> None:
        self.num_made = 0
        self._delays = itertools.cycle([0.003 * i for i in range(1, 17)])

    def make(self, address: str, **_: Any) -> Any:
        assert address == VICTIM
        self.num_made += 1
        return Channel(self._delays)


class Channel:
    def __init__(self, delays: itertools.cycle[float]) -> None:
        self._delays = delays

    def unary_unary(self, method: str, **_: Any) -> Callable[[bytes], Awaitable[NoReturn]]:
        return lambda _: self._break()

    def stream_stream(self, method: str, **_: Any) -> Callable[..., Any]:
        return lambda **_: Stream(self._break)

    def unary_stream(self, method: str, **_: Any) -> Callable[[bytes], Any]:
        return lambda _: Stream(self._break)

    async def close(self) -> None:
        pass

    async def _break(self) -> NoReturn:
        await asyncio.sleep(next(self._delays))
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "connection reset by peer")


class Stream:
    def __init__(self, breaks: Callable[[], Awaitable[NoReturn]]) -> None:
        self._breaks = breaks

    async def write(self, frame: bytes) -> None:
        await self._breaks()

    async def read(self) -> bytes:
        return await self._breaks()

    def cancel(self) -> None:
        pass


@pytest.fixture(name="made", autouse=True)
def _made(monkeypatch: pytest.MonkeyPatch) -> Connections:
    connections = Connections()
    monkeypatch.setattr(grpc.aio, "insecure_channel", connections.make)
    return connections


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(work)


def member(site_id: int) -> Member:
    return Member(site_id=site_id, incarnation=1, address=VICTIM, tokens=5)


STRANGERS = tuple(member(site_id) for site_id in range(2, 2 + NUM_STRANGERS))


class Node:
    """Whatever of a node dials peers."""

    def __init__(self, folder: Path) -> None:
        self.hub = Hub(run_id=dp.RUN, incarnation=1, dialer=Dialer(), pool=ThreadPoolExecutor(1), site_id=1)
        self.hub.max_retained_bytes = 1 << 20
        self._outer = dp.seeded(folder / "state", LAYOUT)
        self._log = PayloadLog(folder / "log", LAYOUT, RunSettings(run_id=dp.RUN, sync=SyncSettings(log_commits=4)))
        self.hub.serve(LAYOUT, lambda: self._outer, self._log, Pace(stall_s=LASTS_S, slowest_bytes_per_s=0.0))
        self._found: asyncio.Queue[tuple[int, ...]] = asyncio.Queue()
        self._prober = Prober(
            header=self.hub.identity,
            dialer=self.hub.dialer,
            limits=lambda: PRESETS["local"],
            found=self._found.put_nowait,
            failed=unexpected,
        )

    async def close(self) -> None:
        await self._prober.close()
        await self.hub.close()
        self._log.close()

    async def probe(self, members: tuple[Member, ...]) -> None:
        self._prober.watch(members)
        while len(await self._found.get()) < len(members):
            pass
        if len(members) > 1:
            await asyncio.sleep(LASTS_S)

    async def exchange(self, members: tuple[Member, ...]) -> None:
        """Each reduces some chunks; ends when they were of no use for a stall."""
        me = replace(member(1), address="127.0.0.1:1")
        share = LAYOUT.num_sync_chunks // len(members)
        trees = [Tree(first_chunk=i * share, num_chunks=share, top=1 + i) for i in range(len(members))]
        trees[-1] = replace(trees[-1], num_chunks=LAYOUT.num_sync_chunks - trees[-1].first_chunk)
        plan = Plan(
            sync=1,
            attempt=1,
            term=1,
            base_commit=0,
            contributors=(me, *members),
            trees=tuple(trees),
            stall_limit_s=LASTS_S,
            num_steps=10,
            deadline_s=600.0,
            slowest_bytes_per_s=1,
        )
        exchange = begin(self.hub, plan, dp.sync_data(self._outer, dp.filled(LAYOUT, 3)))
        with pytest.raises(PeerError, match="no byte for"):
            await exchange.run()

    async def catch_up(self, members: tuple[Member, ...]) -> None:
        """They are named as donors; ends when nothing moved for a stall."""
        donors = tuple(
            Donor(site_id=one.site_id, incarnation=one.incarnation, address=one.address, commit=0) for one in members
        )
        sources = Sources(attested=(Attestation(commit=0, state_hash=bytes(32)),), donors=donors)

        async def again(_: tuple[int, ...]) -> Sources:
            return sources

        assert self.hub.donor is not None
        with pytest.raises(PeerError, match="nothing moved"):
            await self.hub.fetch_state(
                sources=sources,
                refresh=again,
                undialable=tuple,
                outer=self._outer,
                log=self._log,
                optimizer=dp.OPTIMIZER,
                pace=self.hub.donor.pace,
            )

    async def donate(self, members: tuple[Member, ...]) -> None:
        """They ask for it again and again, as the coordinator passes it on."""
        for _ in range(int(LASTS_S / ASKED_EVERY_S) if len(members) > 1 else 1):
            for one in members:
                self.hub.donations.dial(one)
            await asyncio.sleep(ASKED_EVERY_S)


@asynccontextmanager
async def node(folder: Path) -> AsyncIterator[Node]:
    made = Node(folder)
    try:
        yield made
    finally:
        await made.close()


USES = [Node.probe, Node.exchange, Node.catch_up, Node.donate]
Use = Callable[[Node, tuple[Member, ...]], Awaitable[None]]


@pytest.mark.parametrize("use", USES)
def test_an_address_that_many_members_name_is_dialled_at_a_bounded_pace(
    use: Use, tmp_path: Path, made: Connections
) -> None:
    async def main() -> None:
        async with node(tmp_path) as here:
            began = asyncio.get_running_loop().time()
            await use(here, STRANGERS)
            lasted_s = asyncio.get_running_loop().time() - began
            assert DIALS_AT_ONCE < made.num_made <= DIALS_AT_ONCE + lasted_s + LONGEST_QUEUE_S + 1

    run(main())


@pytest.mark.parametrize("use", USES)
def test_a_peer_that_was_dialled_in_vain_is_dialled_later_whoever_wants_it(
    use: Use, tmp_path: Path, made: Connections
) -> None:
    async def main() -> None:
        async with node(tmp_path) as here:
            peer, dialer = STRANGERS[0], here.hub.dialer
            dialer.reached(peer)
            loop = asyncio.get_running_loop()
            began = loop.time()
            await dialer.channel(peer, Purpose.PROBE)
            dialer.disconnect(peer, Purpose.PROBE)
            assert loop.time() == began, "it answered as itself"
            await use(here, (peer,))
            began = loop.time()
            await dialer.channel(peer, Purpose.PROBE)
            dialer.disconnect(peer, Purpose.PROBE)
            assert loop.time() > began
            assert made.num_made > 2

    run(main())
