"""Sites of several hosts: each exchanges its own chunks with whoever has them elsewhere, over real gRPC, and passes the
payloads on to the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from atoll.node.exchange.peers.frames import Encoded, pack_frames
from atoll.node.exchange.service import PeerService
from atoll.node.exchange.sync import sharing
from atoll.node.exchange.sync.exchange import Exchange
from atoll.node.tasks import end
from atoll.protocol.errors import HostError, InvalidMessage, NotYetError, StaleError
from atoll.protocol.layout import Layout
from atoll.protocol.messages import Endpoint, Plan, Tree
from atoll.protocol.plans import plan_digest
from atoll.protocol.v1 import peer_pb2
from tests.harness.peer_streams import MEMBERS, Aborted, Disk, FakeContext, begin, opening, serving
from tests.harness.peer_streams import plan as a_plan
from tests.harness.sites import Site, expected_payloads, small_layout, star_plan, until
from tests.harness.sites_of_hosts import SiteOfHosts, has

LAYOUT = small_layout()
CUT, CUT_ELSEWHERE = 9, 4
"""Chunks at which second hosts begin."""


@asynccontextmanager
async def started(folder: Path, *firsts: Sequence[int], layout: Layout = LAYOUT) -> AsyncIterator[list[SiteOfHosts]]:
    """`firsts`: of each site, where its hosts beside the first begin."""
    sites: list[SiteOfHosts] = []
    try:
        for site_id, of_site in enumerate(firsts, 1):
            sites.append(await SiteOfHosts.start(site_id, folder, layout, *of_site))
            sites[-1].train(1)
        yield sites
    finally:
        for site in sites:
            await site.stop()


async def exchange(plan: Plan, sites: Sequence[SiteOfHosts]) -> None:
    """On all hosts of all sites; each has the payloads that the plan's reducers must make."""
    results = [r for found in await asyncio.gather(*(site.exchange(plan) for site in sites)) for r in found]
    assert len({result.payload_digest for result in results}) == 1
    contributing = {member.site_id for member in plan.contributors}
    expected = expected_payloads(plan, [site.hosts[0] for site in sites if site.site_id in contributing])
    for site in sites:
        for host in site.hosts:
            assert host.payloads(plan) == expected


def test_hosts_of_sites_that_are_cut_elsewhere_end_with_the_same_payloads(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, [CUT], [], [CUT_ELSEWHERE]) as sites:
            await exchange(star_plan(LAYOUT, sites), sites)

    asyncio.run(main())


def test_each_chunk_goes_between_the_hosts_that_have_it(tmp_path: Path) -> None:
    """A host sends the contributions and the payloads of its own chunks, whatever it has of the others."""

    async def main() -> None:
        async with started(tmp_path, [CUT], [CUT_ELSEWHERE]) as (one, other):
            plan = star_plan(LAYOUT, [one, other])
            begun = [*one.begin(plan), *other.begin(plan)]
            addresses = {host.address: host for host in (*one.hosts, *other.hosts)}
            for host, here in zip((*one.hosts, *other.hosts), begun, strict=True):
                assert host.own is not None
                own = {chunk for chunk in host.data.chunks if chunk in host.own}
                reduced = set(here.reducer.own.chunks)
                by_others = [set(upstream.chunks) for upstream in here.upstreams]
                assert reduced.union(*by_others) == own
                assert len(reduced) + sum(map(len, by_others)) == len(own)
                for upstream in here.upstreams:
                    peer = addresses[upstream.parent.address]
                    assert peer.site_id == upstream.parent.site_id != host.site_id
                    assert all(has(peer.own)(chunk) for chunk in upstream.chunks)
                here.cancel()
            await asyncio.gather(*(here.run() for here in begun), return_exceptions=True)

    asyncio.run(main())


def test_a_host_without_chunks_that_travel_gets_all_payloads_from_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, [CUT, LAYOUT.num_sync_chunks], []) as sites:
            await exchange(star_plan(LAYOUT, sites), sites)
            assert sites[0].hosts[2].hub.counters.sent_bytes == 0

    asyncio.run(main())


def test_a_site_that_reduces_nothing_and_one_that_reduces_all_may_have_several_hosts(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, [CUT], [CUT_ELSEWHERE]) as sites:
            for sync, top in enumerate((0, 1), 1):
                tree = Tree(first_chunk=0, num_chunks=LAYOUT.num_sync_chunks, top=top)
                await exchange(replace(star_plan(LAYOUT, sites, sync=sync), trees=(tree,)), sites)

    asyncio.run(main())


def test_a_receiver_of_several_hosts_gets_all_payloads_on_each(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, [], [CUT_ELSEWHERE], [CUT]) as sites:
            await exchange(star_plan(LAYOUT, sites[:2], sites[2:]), sites)

    asyncio.run(main())


class OpenStream(FakeContext):
    """Of a peer that has opened it, and says nothing more."""

    async def read(self) -> bytes:
        if not self.received:
            await asyncio.Event().wait()
        return self.received.popleft()


def test_a_site_has_so_many_streams_at_a_reducer_for_each_of_its_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.node.exchange.service.MAX_STREAMS", 1)
    of_two_hosts = replace(MEMBERS[1], endpoints=(Endpoint(address="127.0.0.1:3", first_chunk=2),))
    plan = a_plan(contributors=(MEMBERS[0], of_two_hosts))

    async def main() -> None:
        disk = Disk(tmp_path)
        async with serving(disk) as hub:
            begin(hub, plan, disk.data)
            service, contexts = PeerService(hub), []
            for first in range(3):
                message = opening(first_chunk=first, num_chunks=1, plan_digest=plan_digest(plan))
                contexts.append(OpenStream([peer_pb2.ExchangeRequest(open=message).SerializeToString()]))
            streams = [asyncio.ensure_future(service.exchange(None, cast(Any, context))) for context in contexts]
            with pytest.raises(Aborted, match="site 2 has 2 streams of sync 1 here"):
                await streams[2]
            await until(lambda: all(context.sent for context in contexts[:2]))
            assert not streams[0].done()
            assert not streams[1].done()
            await end(streams)
        disk.log.close()

    asyncio.run(main())


def test_a_second_sync_and_a_second_attempt_go_over_the_same_places(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, [CUT], []) as sites:
            await exchange(star_plan(LAYOUT, sites), sites)
            await exchange(star_plan(LAYOUT, sites, attempt=2), sites)
            await exchange(star_plan(LAYOUT, sites, sync=2), sites)

    asyncio.run(main())


# --- what hosts of one site say to each other


def payload_of(exchanging: Exchange, chunk: int) -> Encoded:
    data = exchanging.attempt.data
    own = data.contribution(chunk)
    payload = data.reduce(chunk, [(1, own)] * exchanging.attempt.num_contributors)
    return Encoded(chunk, payload, data.payload_hash(payload))


async def given(exchanging: Exchange, items: list[Encoded], own: range) -> None:
    """To a host that is told which chunks are the giver's."""
    frames: list[bytes | None] = [*pack_frames(items, wrapped=False), None]

    async def read() -> bytes | None:
        return frames.pop(0)

    await sharing.take(exchanging, has(own), read, "host 1")


async def running_alone(site: SiteOfHosts, plan: Plan) -> tuple[Exchange, asyncio.Task[object]]:
    """The exchange of its first host; nobody else has begun."""
    begun = site.hosts[0].begin(plan)
    task: asyncio.Task[object] = asyncio.ensure_future(begun.run())
    await begun.collection.arrived(0, or_open=True)
    return begun, task


async def some_turns() -> None:
    """Of the event loop: what waits for nothing else has ended then."""
    for _ in range(10):
        await asyncio.sleep(0)


async def ended(begun: Exchange, task: asyncio.Task[object]) -> None:
    begun.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_payloads_of_the_givers_chunks_are_in_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, [CUT], []) as (site, other):
            begun, task = await running_alone(site, star_plan(LAYOUT, [site, other]))
            items = [payload_of(begun, chunk) for chunk in (CUT, CUT + 1)]
            await given(begun, items, range(CUT, LAYOUT.num_sync_chunks))
            assert [begun.collection.file.read(item.chunk) for item in items] == [item.data for item in items]
            assert {item.chunk for item in items} <= set(await begun.collection.arrived(0))
            await ended(begun, task)

    asyncio.run(main())


@pytest.mark.parametrize("chunk", [0, CUT - 1, len(LAYOUT.chunks) - 1, len(LAYOUT.chunks)])
def test_a_chunk_that_is_not_the_givers_or_does_not_travel_is_refused(tmp_path: Path, chunk: int) -> None:
    async def main() -> None:
        async with started(tmp_path, [CUT], []) as (site, other):
            begun, task = await running_alone(site, star_plan(LAYOUT, [site, other]))
            bad = replace(payload_of(begun, CUT), chunk=chunk)
            with pytest.raises(InvalidMessage, match=f"host 1 gives the payload of chunk {chunk}, which is not its"):
                await given(begun, [bad], range(CUT, len(LAYOUT.chunks) + 1))
            assert not begun.collection.has(chunk)
            await ended(begun, task)

    asyncio.run(main())


def test_a_payload_that_is_spoiled_on_its_way_between_hosts_is_not_stored(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, [CUT], []) as (site, other):
            begun, task = await running_alone(site, star_plan(LAYOUT, [site, other]))
            right = payload_of(begun, CUT)
            bad = replace(right, data=right.data[:-1] + bytes([right.data[-1] ^ 1]))
            with pytest.raises(InvalidMessage, match="do not have their hash"):
                await given(begun, [bad], range(CUT, LAYOUT.num_sync_chunks))
            assert not begun.collection.has(CUT)
            await ended(begun, task)

    asyncio.run(main())


def test_what_is_taken_before_the_log_is_open_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, [CUT], []) as (site, other):
            begun = site.hosts[0].begin(star_plan(LAYOUT, [site, other]))
            taking = asyncio.ensure_future(given(begun, [payload_of(begun, CUT)], range(CUT, LAYOUT.num_sync_chunks)))
            for _ in range(10):  # whatever it gives to the threads ends
                await begun.attempt.in_pool(int)
            assert not taking.done()
            task: asyncio.Task[object] = asyncio.ensure_future(begun.run())
            await taking
            assert begun.collection.has(CUT)
            await ended(begun, task)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancelled", "failed", "dropped"])
def test_giving_and_taking_end_when_the_attempt_is_over(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        async with started(tmp_path, [CUT], []) as (site, other):
            plan = star_plan(LAYOUT, [site, other])
            begun, task = await running_alone(site, plan)
            hub = site.hosts[0].hub
            written: list[bytes] = []

            async def write(frame: bytes) -> None:
                written.append(frame)

            giving = asyncio.ensure_future(sharing.give(begun, has(site.hosts[0].own), write))
            await some_turns()
            assert not giving.done()
            if how == "cancelled":
                hub.cancel(plan.sync, plan.attempt)
            elif how == "failed":
                hub.fail(plan, HostError("the other host is gone"))
            else:
                hub.drop_sync(plan.sync)
            with pytest.raises(HostError if how == "failed" else asyncio.CancelledError):
                await task
            await some_turns()
            assert giving.done()
            with pytest.raises(StaleError, match="sync 1, attempt 1 is over here"):
                await giving
            with pytest.raises(StaleError, match="is over here"):
                await sharing.give(begun, has(site.hosts[0].own), write)
            assert not written

    asyncio.run(main())


def test_taking_ends_when_the_attempt_ends_before_its_log_is_open(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, [CUT], []) as (site, other):
            begun = site.hosts[0].begin(star_plan(LAYOUT, [site, other]))
            taking = asyncio.ensure_future(given(begun, [], range(CUT, LAYOUT.num_sync_chunks)))
            await some_turns()
            begun.cancel()
            await some_turns()
            assert taking.done()
            with pytest.raises(StaleError, match="is over here"):
                await taking

    asyncio.run(main())


def test_an_exchange_that_is_complete_goes_on_giving(tmp_path: Path) -> None:
    """A host that had all payloads first may be the one from which another still needs them, and in their order."""

    async def main() -> None:
        async with started(tmp_path, [], []) as sites:
            plan = star_plan(LAYOUT, sites)
            begun = [site.begin(plan)[0] for site in sites]
            await asyncio.gather(*(here.run() for here in begun))
            written: list[bytes] = []

            async def write(frame: bytes) -> None:
                written.append(frame)

            await sharing.give(begun[0], has(range(CUT, 100)), write)
            stored = [Encoded(c, begun[0].collection.file.read(c), b"") for c in LAYOUT.sync_chunks if c >= CUT]
            assert sum(map(len, written)) > sum(item.num_bytes for item in stored)
            arrived = await begun[0].collection.arrived(0)
            assert sorted(arrived) == list(LAYOUT.sync_chunks)
            assert await begun[0].collection.arrived(3) == arrived[3:]

    asyncio.run(main())


def test_a_host_gives_what_an_earlier_run_of_the_attempt_left_in_its_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, [CUT], [CUT_ELSEWHERE]) as sites:
            plan = star_plan(LAYOUT, sites)
            await exchange(plan, sites)
            begun = sites[0].hosts[0].begin(plan)
            await begun.run()
            assert sorted(await begun.collection.arrived(0, or_open=True)) == list(LAYOUT.sync_chunks)

    asyncio.run(main())


# --- a host that fails, and the hub's answers to the others


def test_a_host_that_cannot_do_its_part_ends_the_exchange_of_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, [CUT], []) as (site, other):
            plan = star_plan(LAYOUT, [site, other])
            begun, task = await running_alone(site, plan)
            hub = site.hosts[0].hub
            hub.fail(replace(plan, attempt=2), HostError("of another attempt"))
            hub.fail(replace(plan, sync=2), HostError("of another sync"))
            hub.fail(replace(plan, term=2), HostError("of another term"))
            assert not begun.attempt.finished.done()
            hub.fail(plan, HostError("its disk is full"))
            hub.fail(plan, HostError("once more"))
            with pytest.raises(HostError, match="its disk is full"):
                await task

    asyncio.run(main())


def test_a_host_finds_the_exchange_that_another_one_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.node.exchange.hub.EARLY_HOLD_S", 0.05)

    async def main() -> None:
        async with started(tmp_path, [CUT], []) as (site, other):
            hub = site.hosts[0].hub
            with pytest.raises(NotYetError, match="no plan for it is here yet"):
                await hub.running(1, 1, 2)
            monkeypatch.setattr("atoll.node.exchange.hub.EARLY_HOLD_S", 600.0)
            early = asyncio.ensure_future(hub.running(1, 1, 2))
            done, _ = await asyncio.wait({early}, timeout=0)
            assert not done
            plan = replace(star_plan(LAYOUT, [site, other]), attempt=2)
            begun = site.hosts[0].begin(plan)
            assert await early is begun
            assert await hub.running(1, 1, 2) is begun
            with pytest.raises(StaleError, match="sync 1, term 1, attempt 1 is over"):
                await hub.running(1, 1, 1)
            hub.drop_sync(1)
            with pytest.raises(StaleError, match="that sync is over here"):
                await hub.running(1, 1, 2)

    asyncio.run(main())


def test_a_site_whose_hosts_are_cut_otherwise_is_told_so(tmp_path: Path) -> None:
    """By whoever has a plan that says other endpoints: chunks would be missing."""

    async def main() -> None:
        async with started(tmp_path, [CUT], []) as (site, other):
            plan = star_plan(LAYOUT, [site, other])
            first, second = plan.contributors
            moved = tuple(replace(e, first_chunk=e.first_chunk + 1) for e in first.endpoints)
            unlike = replace(plan, contributors=(replace(first, endpoints=moved), second))
            here: Site = other.hosts[0]
            begun = [here.begin(unlike), site.hosts[0].begin(plan)]
            tasks = [asyncio.ensure_future(one.run()) for one in begun]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            errors = [task.exception() for task in tasks if task.done()]
            assert any("here it is" in str(error) for error in errors)
            for one in begun:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
