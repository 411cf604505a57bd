"""A host of a site that is slower than the others: real hubs on a simulated network."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from atoll.node.exchange.sync.exchange import Exchange
from atoll.node.exchange.sync.upstream import Upstream
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.messages import Plan, Tree
from tests.harness.sites import Site, star_plan
from tests.harness.sites_of_hosts import SiteOfHosts, pass_on
from tests.simulation.loop import HERE, InlineExecutor, Process, SimLoop
from tests.simulation.network import Network

T = TypeVar("T")
STALL_S = 20.0
HOSTS = {"10.0.0.1": 1, "10.0.0.2": 1, "10.0.0.3": 2, "10.0.0.4": 3}
"""Their sites, of which the second reduces all."""
NUM_CHUNKS, CHUNK_ELEMENTS = 8, 1 << 18


def layout() -> Layout:
    """A tensor a host, of chunks that have frames of their own."""
    shape = (NUM_CHUNKS // 2 * CHUNK_ELEMENTS,)
    tensors = [TensorSpec(name=name, shape=shape, dtype="F32", role=Role.TRAINABLE) for name in ("a", "b")]
    return Layout(Manifest.canonical(tensors), CHUNK_ELEMENTS)


@pytest.mark.parametrize("slow", [{"10.0.0.2"}, {"10.0.0.4"}, {"10.0.0.2", "10.0.0.4"}])
def test_nobody_is_blamed_for_a_site_one_host_of_which_is_slow(
    slow: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reducer waits for contributions of slow hosts, which come: it is not at fault for the fast host of the first
    site, which has sent its own, and waits for payloads beyond a stall."""
    write = Upstream._write

    async def slowly(self: Upstream, call: Any, frame: bytes) -> None:
        process = HERE.get()
        if process is not None and process.machine in slow:
            await asyncio.sleep(0.6 * STALL_S)
        await write(self, call, frame)

    monkeypatch.setattr(Upstream, "_write", slowly)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = Network(loop, seed=1)
        contexts: dict[str, contextvars.Context] = {}

        def on(address: str, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
            if address not in contexts:
                contexts[address] = contextvars.copy_context()
                contexts[address].run(HERE.set, Process(address, 1))
            return loop.create_task(work, context=contexts[address])

        hosts: list[Site] = []
        for address, site_id in HOSTS.items():
            starting = Site.start(
                site_id, tmp_path, layout(), host=address, home=address, network=network, pool=InlineExecutor()
            )
            hosts.append(await on(address, starting))
            hosts[-1].seed()
            hosts[-1].train(1)
        hosts[0].own, hosts[1].own = range(NUM_CHUNKS // 2), range(NUM_CHUNKS // 2, NUM_CHUNKS)
        site = SiteOfHosts(1, hosts[:2])
        tree = Tree(first_chunk=0, num_chunks=NUM_CHUNKS, top=1)
        plan = star_plan(layout(), [site, *hosts[2:]], stall_limit_s=STALL_S, slowest_bytes_per_s=1)
        plan = replace(plan, trees=(tree,))
        began: list[Exchange] = [await on(host.address.partition(":")[0], begin(host, plan)) for host in hosts]

        async def exchange(place: int) -> bytes:
            return (await began[place].run()).payload_digest

        passing = [
            loop.create_task(pass_on(began[giver], began[taker], hosts[giver].own)) for giver, taker in ((0, 1), (1, 0))
        ]
        running = [on(host.address.partition(":")[0], exchange(place)) for place, host in enumerate(hosts)]
        digests = await asyncio.gather(*running)
        await asyncio.gather(*passing)
        assert len(set(digests)) == 1
        for host in hosts:
            await on(host.address.partition(":")[0], host.stop())

    async def begin(host: Site, plan: Plan) -> Exchange:
        return host.begin(plan)

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())
