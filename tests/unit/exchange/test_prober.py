"""Probes of sites at each of their places: real hubs and a prober on a simulated network."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from atoll.node.exchange.peers.prober import Prober
from atoll.protocol.messages import Endpoint, Member
from atoll.protocol.time_limits import PRESETS
from tests.harness.failures import unexpected
from tests.harness.sites import Site, small_layout
from tests.simulation.loop import HERE, InlineExecutor, Process, SimLoop
from tests.simulation.network import Network

T = TypeVar("T")
LIMITS = PRESETS["local"]
PORT = 7700


class World:
    """A node that probes, and hosts that come and go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.network = Network(asyncio.get_running_loop(), seed=1)
        self.found: asyncio.Queue[tuple[int, ...]] = asyncio.Queue()
        self._sites: list[tuple[Site, contextvars.Context]] = []

    async def start(self, site_id: int, address: str) -> Site:
        context = contextvars.copy_context()
        context.run(HERE.set, Process(address, 1))
        starting = Site.start(
            site_id,
            self._folder,
            small_layout(),
            host=address,
            port=PORT,
            home=address,
            network=self.network,
            pool=InlineExecutor(),
        )
        site = await self._on(context, starting)
        self._sites.append((site, context))
        return site

    def _on(self, context: contextvars.Context, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        return asyncio.get_running_loop().create_task(work, context=context)

    async def watch(self, prober: Prober, *members: Member) -> None:
        async def watching() -> None:
            prober.watch(members)

        await self._on(self._sites[0][1], watching())

    async def news(self) -> tuple[int, ...]:
        async with asyncio.timeout(50 * LIMITS.lease_s):
            return await self.found.get()

    async def stop(self) -> None:
        for site, context in self._sites:
            await self._on(context, site.stop())


def run(folder: Path, test: Callable[[World, Prober], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World(folder)
        me = await world.start(1, "10.0.0.1")
        prober = Prober(
            header=me.hub.identity,
            dialer=me.hub.dialer,
            limits=lambda: LIMITS,
            found=world.found.put_nowait,
            failed=unexpected,
        )
        try:
            await test(world, prober)
        finally:
            await prober.close()
            await world.stop()

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())


def site_at(site_id: int, *addresses: str) -> Member:
    first, *others = (f"{address}:{PORT}" for address in addresses)
    endpoints = tuple(Endpoint(address=address, first_chunk=place) for place, address in enumerate(others, 1))
    return Member(site_id=site_id, incarnation=1, address=first, endpoints=endpoints)


THERE, ALSO_THERE, GONE, ALSO_GONE = "10.0.0.2", "10.0.0.3", "10.0.0.8", "10.0.0.9"


def test_a_site_of_which_one_place_cannot_be_dialled_is_reported_until_it_can(tmp_path: Path) -> None:
    async def test(world: World, prober: Prober) -> None:
        for address in (THERE, ALSO_THERE):
            await world.start(2, address)
        await world.start(3, "10.0.0.4")
        whole = site_at(3, "10.0.0.4")
        await world.watch(prober, site_at(2, THERE, GONE, ALSO_THERE), whole)
        assert await world.news() == (2,)
        await world.start(2, GONE)
        assert await world.news() == ()
        assert world.found.empty()

    run(tmp_path, test)


def test_one_of_two_places_that_comes_back_is_not_enough(tmp_path: Path) -> None:
    async def test(world: World, prober: Prober) -> None:
        await world.start(2, THERE)
        await world.watch(prober, site_at(2, THERE, GONE, ALSO_GONE))
        assert await world.news() == (2,)
        await world.start(2, GONE)
        await asyncio.sleep(20 * LIMITS.lease_s)
        assert world.found.empty(), "it is reported once, and not taken back"
        await world.start(2, ALSO_GONE)
        assert await world.news() == ()

    run(tmp_path, test)


def test_a_place_at_which_another_site_answers_cannot_be_dialled(tmp_path: Path) -> None:
    async def test(world: World, prober: Prober) -> None:
        await world.start(2, THERE)
        await world.start(3, ALSO_THERE)
        await world.watch(prober, site_at(2, THERE, ALSO_THERE))
        assert await world.news() == (2,)

    run(tmp_path, test)


def test_a_place_that_a_site_has_no_more_is_forgotten(tmp_path: Path) -> None:
    async def test(world: World, prober: Prober) -> None:
        await world.start(2, THERE)
        member = site_at(2, THERE, GONE)
        await world.watch(prober, member)
        assert await world.news() == (2,)
        await world.watch(prober, replace(member, endpoints=()))
        assert await world.news() == ()
        await asyncio.sleep(20 * LIMITS.lease_s)
        assert world.found.empty(), "nobody looks there any more"

    run(tmp_path, test)


def test_places_that_stay_are_not_looked_at_anew(tmp_path: Path) -> None:
    async def test(world: World, prober: Prober) -> None:
        await world.start(2, THERE)
        await world.watch(prober, site_at(2, THERE, GONE))
        assert await world.news() == (2,)
        await world.watch(prober, site_at(2, THERE, GONE, ALSO_GONE))
        await asyncio.sleep(20 * LIMITS.lease_s)
        assert world.found.empty(), "it cannot be dialled before and after"

    run(tmp_path, test)
