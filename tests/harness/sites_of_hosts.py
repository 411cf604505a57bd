"""Sites of several hosts in one process: hubs of one site, each with its own chunks, that pass payloads on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.node.exchange.sync import sharing
from atoll.node.exchange.sync.exchange import Exchange, ExchangeResult
from atoll.protocol import transport
from atoll.protocol.endpoints import Places
from atoll.protocol.layout import Layout
from atoll.protocol.machine import Network
from atoll.protocol.messages import Endpoint, Member, Plan
from tests.harness.sites import Site


def has(part: range | None) -> Callable[[int], bool]:
    """Whether a chunk is that host's."""
    return lambda chunk: part is None or chunk in part


@dataclass(eq=False)
class SiteOfHosts:
    """All hosts have the same snapshot, the same outer state and a log of their own."""

    site_id: int
    hosts: list[Site]

    @classmethod
    async def start(
        cls,
        site_id: int,
        folder: Path,
        layout: Layout,
        *firsts: int,
        addresses: tuple[str, ...] = (),
        network: Network = transport,
        pool: Callable[[], Executor | None] = lambda: None,
    ) -> SiteOfHosts:
        """`firsts`: the first chunks of the hosts beside the first one. `addresses`: without ports, of all."""
        hosts = []
        for place in range(len(firsts) + 1):
            host = await Site.start(
                site_id,
                folder,
                layout,
                home=f"site-{site_id}-host-{place}",
                host=addresses[place] if addresses else "127.0.0.1",
                network=network,
                pool=pool(),
            )
            host.own = Places((0, *firsts), 1, len(layout.chunks)).of_host(place)
            host.seed()
            hosts.append(host)
        return cls(site_id, hosts)

    def member(self, tokens: int) -> Member:
        endpoints = [Endpoint(address=host.address, first_chunk=host.own.start) for host in self.hosts[1:] if host.own]
        return replace(self.hosts[0].member(tokens), endpoints=tuple(endpoints))

    def train(self, seed: int) -> None:
        for host in self.hosts:
            host.train(seed)

    def begin(self, plan: Plan) -> list[Exchange]:
        return [host.begin(plan) for host in self.hosts]

    async def exchange(self, plan: Plan) -> list[ExchangeResult]:
        """On all hosts, until each has all payloads and the others have those of its chunks."""
        exchanges = self.begin(plan)
        async with asyncio.TaskGroup() as tasks:
            for giver, of_giver in zip(self.hosts, exchanges, strict=True):
                for of_taker in exchanges:
                    if of_taker is not of_giver:
                        tasks.create_task(pass_on(of_giver, of_taker, giver.own))
            results = [tasks.create_task(exchange.run()) for exchange in exchanges]
        return [result.result() for result in results]

    async def stop(self) -> None:
        for host in self.hosts:
            await host.stop()


async def pass_on(giver: Exchange, taker: Exchange, own: range | None) -> None:
    """What `giver` collects of its own chunks, to `taker`, through a narrow pipe."""
    pipe: asyncio.Queue[bytes | None] = asyncio.Queue(1)

    async def give() -> None:
        await sharing.give(giver, has(own), pipe.put)
        await pipe.put(None)

    await asyncio.gather(give(), sharing.take(taker, has(own), pipe.get, "the other host"))
