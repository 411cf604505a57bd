"""Several streams to one peer, over connections of their own: real hubs on a simulated network."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from atoll.node.exchange.peers.dialer import ONE_CHANNEL_S, Purpose
from atoll.node.exchange.sync import reduction
from atoll.node.exchange.sync.reduction import split
from atoll.node.exchange.sync.upstream import Upstream
from atoll.protocol.errors import InvalidMessage, PeerError
from atoll.protocol.messages import Member, Plan, Tree
from tests.harness.sites import Site, expected_payloads, small_layout, star_plan
from tests.simulation.loop import HERE, InlineExecutor, Process, SimLoop
from tests.simulation.network import Network, SimChannel

T = TypeVar("T")
NUM_STREAMS = 3
"""Of each of three sites to each of the others; `MAX_STREAMS` of a site."""


class WatchedNetwork(Network):
    """Notes the connections that are opened, by address; may refuse all but so many of each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop, seed=1)
        self.opened: dict[tuple[str, str], list[SimChannel]] = {}
        self.accepted = NUM_STREAMS

    def open_channel(self, address: str, *, handshake: Any, max_message_bytes: int) -> Any:
        process = HERE.get()
        assert process is not None
        channels = self.opened.setdefault((process.machine, address), [])
        is_refused = len([channel for channel in channels if not channel.closed]) >= self.accepted
        where = address.partition(":")[0] + ":1" if is_refused else address  # nobody listens there
        channels.append(super().open_channel(where, handshake=handshake, max_message_bytes=max_message_bytes))
        return channels[-1]


class Sites:
    """Three sites that know each other."""

    def __init__(self) -> None:
        self.network = WatchedNetwork(asyncio.get_running_loop())
        self.sites: list[Site] = []
        self._contexts: list[contextvars.Context] = []

    async def start(self, folder: Path) -> None:
        for site_id in (1, 2, 3):
            context = contextvars.copy_context()
            context.run(HERE.set, Process(f"10.0.0.{site_id}", 1))
            self._contexts.append(context)
            starting = Site.start(
                site_id, folder, small_layout(), host=f"10.0.0.{site_id}", network=self.network, pool=InlineExecutor()
            )
            self.sites.append(await self._on(site_id, starting))
            self.sites[-1].seed()
            self.sites[-1].train(1)
        self.plan = star_plan(small_layout(), self.sites)
        for site in self.sites:
            for member in self.plan.contributors:
                site.hub.dialer.reached(member)

    def _on(self, site_id: int, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        return asyncio.get_running_loop().create_task(work, context=self._contexts[site_id - 1])

    def exchange_of(self, site: Site) -> Awaitable[bytes]:
        async def one() -> bytes:
            return (await site.begin(self.plan).run()).payload_digest

        return self._on(site.site_id, one())

    async def exchange(self) -> None:
        digests = await asyncio.gather(*map(self.exchange_of, self.sites))
        assert len(set(digests)) == 1

    def payloads_are_right(self, plan: Plan) -> bool:
        expected = expected_payloads(plan, self.sites)
        return all(site.payloads(plan) == expected for site in self.sites)

    async def stop(self) -> None:
        for site in self.sites:
            await self._on(site.site_id, site.stop())


@pytest.fixture(autouse=True)
def _streams_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "MIN_STREAM_BYTES", 1)
    assert reduction.MAX_STREAMS // 2 == NUM_STREAMS


def run(folder: Path, test: Callable[[Sites], Awaitable[None]]) -> None:
    async def main() -> None:
        sites = Sites()
        await sites.start(folder)
        try:
            await test(sites)
        finally:
            await sites.stop()

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())


def test_each_stream_has_a_connection_and_carries_its_chunks_once(tmp_path: Path) -> None:
    async def test(sites: Sites) -> None:
        await sites.exchange()
        assert sites.payloads_are_right(sites.plan)
        assert len(sites.network.opened) == 6
        assert {len(channels) for channels in sites.network.opened.values()} == {NUM_STREAMS}
        expected_bytes = 4 / 3 * sum(map(len, expected_payloads(sites.plan, sites.sites)))
        for site in sites.sites:
            assert site.hub.counters.sent_bytes < 1.5 * expected_bytes
            assert site.hub.counters.reconnects == site.hub.counters.refused.total() == 0

    run(tmp_path, test)


def test_a_stream_that_is_lost_is_opened_again_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks go on where they were, over the first connection; the peer is not taken for one that failed."""
    write = Upstream._write
    lost: list[Upstream] = []

    async def test(sites: Sites) -> None:
        async def lose_one(self: Upstream, call: Any, frame: bytes) -> None:
            await write(self, call, frame)
            is_first_sites = self.attempt.me.site_id == 1 and not lost
            if is_first_sites and call._channel is sites.network.opened["10.0.0.1", self.parent.address][1]:
                lost.append(self)
                call.broken("the cable of one")

        monkeypatch.setattr(Upstream, "_write", lose_one)
        await sites.exchange()
        (upstream,) = lost
        assert sites.payloads_are_right(sites.plan)
        assert [site.hub.counters.reconnects for site in sites.sites] == [1, 0, 0]
        first, second, third = sites.network.opened["10.0.0.1", upstream.parent.address]
        assert second.closed
        assert not first.closed
        assert not third.closed
        again: Any = await sites.sites[0].hub.dialer.channel(upstream.parent, Purpose.EXCHANGE, 1)
        assert again is first
        await asyncio.sleep(ONE_CHANNEL_S)
        dialled = sites._on(1, sites.sites[0].hub.dialer.channel(upstream.parent, Purpose.EXCHANGE, 1))
        fresh: Any = await dialled
        assert fresh not in (first, second, third)

    run(tmp_path, test)


def test_a_peer_that_takes_one_connection_gets_all_streams_over_it(tmp_path: Path) -> None:
    async def test(sites: Sites) -> None:
        sites.network.accepted = 1
        await sites.exchange()
        assert sites.payloads_are_right(sites.plan)
        for channels in sites.network.opened.values():
            assert len(channels) <= NUM_STREAMS, "others are not tried again and again"
            assert [channel.closed for channel in channels] == [False] + [True] * (len(channels) - 1)

    run(tmp_path, test)


def test_a_peer_that_never_answered_was_not_sent_everything(tmp_path: Path) -> None:
    """What is written before its first word may be nowhere: it owes no payloads for that."""

    async def test(sites: Sites) -> None:
        one_reduces = Tree(first_chunk=0, num_chunks=small_layout().num_sync_chunks, parents=(1, -1, 1))
        sites.plan = replace(sites.plan, trees=(one_reduces,))
        with pytest.raises(PeerError, match="site 2") as caught:  # which has not begun
            await sites.exchange_of(sites.sites[0])
        assert caught.value.sending

    run(tmp_path, test)


def test_a_peer_that_is_not_known_yet_gets_one_connection(tmp_path: Path) -> None:
    async def test(sites: Sites) -> None:
        dialer = sites.sites[0].hub.dialer
        stranger = Member(site_id=9, incarnation=1, address="10.0.0.2:9", tokens=0)
        channels = [await sites._on(1, dialer.channel(stranger, Purpose.EXCHANGE, number)) for number in range(3)]
        assert len(set(map(id, channels))) == 1

    run(tmp_path, test)


def test_a_site_has_no_more_streams_at_a_reducer_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More are told to come later, and do: the sync ends well."""
    monkeypatch.setattr("atoll.node.exchange.service.MAX_STREAMS", 2)

    async def test(sites: Sites) -> None:
        await sites.exchange()
        assert sites.payloads_are_right(sites.plan)
        assert sum(site.hub.counters.reconnects for site in sites.sites) > 0

    run(tmp_path, test)


def test_a_payload_of_another_stream_is_refused(tmp_path: Path) -> None:
    async def test(sites: Sites) -> None:
        async def begin() -> Upstream:
            return sites.sites[0].begin(sites.plan).upstreams[0]

        upstream = await sites._on(1, begin())
        first, second = upstream.strands[:2]
        assert upstream._expect_payload(first, first.chunks[0]) > 0
        with pytest.raises(InvalidMessage, match="not for this stream"):
            upstream._expect_payload(first, second.chunks[0])

    run(tmp_path, test)


@pytest.mark.parametrize("num", [1, 2, 3, 5, 9])
def test_streams_have_all_chunks_between_them_and_about_the_same_bytes(num: int) -> None:
    chunks = [3, 4, 7, 20, 21, 22, 30]
    sizes = [100, 1, 1, 90, 10, 100, 2]
    ranges = split(chunks, sizes, num)
    found = [[chunk for chunk in chunks if chunk in ids] for ids in ranges]
    assert [chunk for part in found for chunk in part] == chunks
    assert len(ranges) <= num
    assert all(found)
    size_of = dict(zip(chunks, sizes, strict=True))
    assert max(sum(size_of[chunk] for chunk in part) for part in found) <= sum(sizes) / num + max(sizes)
