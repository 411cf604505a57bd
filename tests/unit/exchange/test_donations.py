"""A donor that dials the site which asks it: real hubs on a simulated network."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from atoll.node.exchange.catchup import donations
from atoll.node.exchange.catchup.donations import IDLE_S
from atoll.node.exchange.peers.rpc import FETCH_STATE_METHOD
from atoll.protocol import wire
from atoll.protocol.messages import Donor
from atoll.protocol.v1 import peer_pb2
from tests.harness.sites import Site, small_layout
from tests.simulation.loop import HERE, InlineExecutor, Process, SimLoop
from tests.simulation.network import Network

T = TypeVar("T")


class World:
    """A site that asks (1) and one that gives (2)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._network = Network(asyncio.get_running_loop(), seed=1)

    def on(self, site_id: int, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        context = contextvars.copy_context()
        context.run(HERE.set, Process(f"10.0.0.{site_id}", 1))
        return asyncio.get_running_loop().create_task(work, context=context)

    async def _started(self, site_id: int) -> Site:
        host = f"10.0.0.{site_id}"
        starting = Site.start(
            site_id, self._folder, small_layout(), host=host, home=host, network=self._network, pool=InlineExecutor()
        )
        return await self.on(site_id, starting)

    async def begin(self) -> None:
        """The second dials the first, which expects it."""
        self.asking, self.giving = await self._started(1), await self._started(2)
        self.giving.seed()
        self.start = (2, self.giving.member(0).incarnation)
        self.asking.hub.expected_donors.expect_too([self.start])

        async def dial() -> None:
            self.giving.hub.donations.dial(self.asking.member(0))

        await self.on(2, dial())

    async def ask(self) -> None:
        """A whole answer, or an error."""
        header = wire.to_proto(self.asking.hub.identity())
        request = peer_pb2.FetchStateRequest(header=header, chunks=[0]).SerializeToString()
        donor = Donor(site_id=2, incarnation=self.start[1], address="", commit=0)
        answer = await self.asking.hub.expected_donors.ask(donor, FETCH_STATE_METHOD, request)
        assert isinstance(await answer.read(), bytes)
        assert await answer.read() is None
        answer.cancel()

    async def end(self) -> None:
        await self.on(1, self.asking.stop())
        await self.on(2, self.giving.stop())


def run(folder: Path, test: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World(folder)
        await world.begin()
        await test(world)
        await world.end()

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())


def test_a_donor_stays_with_a_site_that_asks_late_and_leaves_one_that_wants_nothing_more(tmp_path: Path) -> None:
    """It asks late where an audit waits for its turn."""

    async def test(world: World) -> None:
        for _ in range(3):
            await asyncio.sleep(1.1 * IDLE_S)
            await world.ask()
        await asyncio.sleep(1.1 * IDLE_S)
        assert world.giving.hub.donations._dialled
        world.asking.hub.expected_donors.forget([world.start])
        await asyncio.sleep(1.0)
        assert not world.giving.hub.donations._dialled

    run(tmp_path, test)


def test_a_site_that_asks_for_nothing_keeps_nobody_else_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donations, "MAX_SITES", 1)

    async def test(world: World) -> None:
        await asyncio.sleep(1.1 * IDLE_S)
        assert not world.giving.hub.donations._dialled

    run(tmp_path, test)
