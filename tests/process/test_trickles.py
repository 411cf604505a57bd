"""Peers that are connected and all but still: each is found and named, honest ones are not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from atoll.node.exchange.catchup import donor_server
from atoll.node.exchange.catchup import donors as donor_pool
from atoll.node.exchange.catchup.donor_client import DonorClient, dialled
from atoll.node.exchange.peers.frames import Encoded, pack_frames
from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.peers.rpc import EXCHANGE_METHOD, FETCH_STATE_METHOD, SERVICE, NotRead
from atoll.protocol import transport, wire
from atoll.protocol.errors import NotYetError, PeerError
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.plans import plan_digest
from atoll.protocol.v1 import peer_pb2
from tests.harness.calls import ENDED, write
from tests.harness.relay import Relay
from tests.harness.sites import (
    PACE,
    Run,
    Site,
    big_layout,
    expected_payloads,
    run_all,
    small_layout,
    star_plan,
    until,
)
from tests.process.test_catchup import fetch, records

HANG_S = 60.0
Context = grpc.aio.ServicerContext[bytes, bytes]
Say = Callable[[peer_pb2.ExchangeResponse], Awaitable[None]]


async def ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def read_to_the_end(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
    while isinstance(await call.read(), bytes):
        pass


# --- as a contributor


@asynccontextmanager
async def stream_to(site: Site, plan: Any, member: Site) -> AsyncIterator[grpc.aio.StreamStreamCall[bytes, bytes]]:
    """An Exchange stream that `member` has opened; the test says what goes over it."""
    me = next(m for m in plan.contributors if m.site_id == member.site_id)
    opening = peer_pb2.ExchangeOpen(
        header=wire.to_proto(replace(member.hub.identity(plan.term), site_id=member.site_id)),
        sync=plan.sync,
        attempt=plan.attempt,
        plan_term=plan.term,
        plan_digest=plan_digest(plan),
        tokens=me.tokens,
        reducer_site_id=site.site_id,
        reducer_incarnation=site.incarnation,
        num_chunks=site.layout.num_sync_chunks,
    )
    channel = transport.open_channel(site.address, handshake=None, max_message_bytes=transport.MAX_FRAME_BYTES)
    method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(EXCHANGE_METHOD)
    call = method()
    try:
        await write(call, peer_pb2.ExchangeRequest(open=opening).SerializeToString())
        await call.read()  # what is held
        yield call
    finally:
        call.cancel()
        await channel.close()


def contribution(site: Site, chunk: int) -> bytes:
    data = site.data.contribution(chunk)
    (frame,) = pack_frames([Encoded(chunk, data, site.data.payload_hash(data))])
    return frame


def test_a_contributor_that_trickles_is_named_by_the_reducer(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second = await run.add(2)
            for site in run.sites:
                site.train(1)
            # Between two chunks a busy machine may take far longer than 0.25 s.
            plan = star_plan(run.layout, run.sites, stall_limit_s=2.0, slowest_bytes_per_s=1 << 20)
            plan = replace(plan, trees=tuple(replace(tree, parents=(-1, 0)) for tree in plan.trees))
            exchange = first.begin(plan)
            async with stream_to(first, plan, second) as call:
                await write(call, contribution(second, second.data.chunks[0]))
                running = asyncio.create_task(exchange.run())
                for chunk in second.data.chunks[1:-1]:
                    with suppress(*ENDED):  # the attempt may end while it is written
                        await write(call, contribution(second, chunk))
                    await asyncio.wait({running}, timeout=0.25)
            with pytest.raises(PeerError, match=r"site 2.*only \d+ bytes in \d\.\d s") as caught:
                await running
            assert caught.value.peer_site_id == 2
            assert caught.value.phase == "waiting for contributions"

    asyncio.run(main())


def test_what_was_sent_before_and_empty_messages_are_no_progress(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second = await run.add(2)
            for site in run.sites:
                site.train(1)
            plan = star_plan(run.layout, run.sites, stall_limit_s=1)
            running = asyncio.create_task(first.begin(plan).run())
            own = [c for c in first.data.chunks if c % 2 == 0]
            with suppress(*ENDED):  # the attempt may end while it is written
                async with stream_to(first, plan, second) as call:
                    while not running.done():
                        await write(call, contribution(second, own[0]))
                        await asyncio.wait({running}, timeout=0.1)
            with pytest.raises(PeerError, match=r"site 2.*no byte for 1\.0 s"):
                await running
            again = asyncio.create_task(first.begin(replace(plan, attempt=2)).run())
            async with stream_to(first, replace(plan, attempt=2), second) as call:
                with suppress(*ENDED):
                    await write(call, peer_pb2.ExchangeRequest(contribution=peer_pb2.Parts()).SerializeToString())
                with pytest.raises(grpc.aio.AioRpcError, match="without contributions"):
                    await read_to_the_end(call)
            await ended(again)

    asyncio.run(main())


def test_a_contribution_that_is_begun_again_and_again_is_no_progress_for_ever(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            first, second = await run.add(2)
            for site in run.sites:
                site.train(1)
            plan = star_plan(run.layout, run.sites, stall_limit_s=0.6)
            plan = replace(plan, trees=tuple(replace(tree, parents=(-1, 0)) for tree in plan.trees))
            running = asyncio.create_task(first.begin(plan).run())
            data = second.data.contribution(0)
            *parts, _ = pack_frames([Encoded(0, data, second.data.payload_hash(data))])
            for _ in range(200):
                if running.done():
                    break
                with suppress(*ENDED):  # the attempt may end before a stream is opened, or while it is written
                    async with stream_to(first, plan, second) as call:
                        for part in parts:
                            await write(call, part)
                        await asyncio.wait({running}, timeout=0.05)
            assert running.done()
            with pytest.raises(PeerError, match=r"site 2.*no byte for 0\.6 s"):
                await running

    asyncio.run(main())


def test_who_takes_its_payloads_again_and_again_gets_nobody_any_further(tmp_path: Path) -> None:
    """The coordinator waits for a site as long as others say that they get or give chunk data."""

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            first, second = await run.add(2)
            for site in run.sites:
                site.train(1)
            plan = star_plan(run.layout, run.sites)
            plan = replace(plan, trees=tuple(replace(tree, parents=(-1, 0)) for tree in plan.trees))
            running = asyncio.create_task(first.begin(plan).run())
            async with stream_to(first, plan, second) as call:
                for chunk in second.data.chunks:
                    await write(call, contribution(second, chunk))
                await running
            moved = [first.hub.counters.moved_bytes]
            for _ in range(8):
                async with stream_to(first, plan, second) as call:
                    await read_to_the_end(call)
                moved.append(first.hub.counters.moved_bytes)
            assert moved[1] > moved[0]
            assert moved[-1] == moved[-2]

    asyncio.run(main())


def test_a_peer_that_never_reads_its_payloads_is_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else its stream would stay for ever, with what is to be sent on it."""

    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            first, second = await run.add(2)
            for site in run.sites:
                site.train(1)
            plan = star_plan(run.layout, run.sites, stall_limit_s=1)
            plan = replace(plan, trees=tuple(replace(tree, parents=(-1, 0)) for tree in plan.trees))
            running = asyncio.create_task(first.begin(plan).run())
            async with stream_to(first, plan, second) as call:
                for chunk in second.data.chunks:
                    data = second.data.contribution(chunk)
                    for frame in pack_frames([Encoded(chunk, data, second.data.payload_hash(data))]):
                        await write(call, frame)
                await running
                await until(lambda: "site 2 (run sites, sync 1, attempt 1) has taken no byte for 1.0 s" in caplog.text)

    asyncio.run(main())


def test_a_peer_that_is_cut_off_and_still_reads_hears_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that has had its turn with a donor: of a call that ends without a status it would wait a stall."""

    async def gives_a_frame(_: object, request: Any, write: Callable[[bytes], Awaitable[None]], who: str) -> None:
        await write(b"frame")
        raise NotRead(f"{who} has had its turn")

    monkeypatch.setattr(donor_server.DonorServer, "give", gives_a_frame)

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            (donor,) = await run.add()
            channel = transport.open_channel(donor.address, handshake=None, max_message_bytes=transport.MAX_FRAME_BYTES)
            method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(FETCH_STATE_METHOD)
            request = peer_pb2.FetchStateRequest(header=wire.to_proto(donor.hub.identity()))
            call = method(request.SerializeToString())
            async with asyncio.timeout(HANG_S):
                assert await call.read() == b"frame"
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "has had its turn" in (caught.value.details() or "")
            await channel.close()

    asyncio.run(main())


# --- as a reducer


@asynccontextmanager
async def fake_reducer(answer: Callable[[Say], Awaitable[None]]) -> AsyncIterator[str]:
    """The address of a peer that reads what it is sent and answers as it likes."""

    async def exchange(_: object, context: Context) -> None:
        async def say(response: peer_pb2.ExchangeResponse) -> None:
            await context.write(response.SerializeToString())

        async def read_all() -> None:
            while isinstance(await context.read(), bytes):
                pass

        reader = asyncio.create_task(read_all())
        try:
            await answer(say)
        finally:
            await ended(reader)

    server = transport.create_server(max_message_bytes=transport.MAX_FRAME_BYTES)
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(exchange)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Exchange": handler}),))
    address = f"127.0.0.1:{transport.bind(server, '127.0.0.1:0', None)}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


async def waits_and_nothing_moves(say: Say) -> None:
    await say(peer_pb2.ExchangeResponse(held=peer_pb2.Held()))
    while True:
        await say(peer_pb2.ExchangeResponse(waiting=peer_pb2.Waiting(moved_bytes=7, site_ids=[3])))
        await asyncio.sleep(0.05)


def waits_and_says_that_something_moves(*site_ids: int) -> Callable[[Say], Awaitable[None]]:
    """`site_ids`: for whom it says that it waits."""

    async def answer(say: Say) -> None:
        await say(peer_pb2.ExchangeResponse(held=peer_pb2.Held()))
        moved_bytes = 0
        while True:
            moved_bytes += 1
            waiting = peer_pb2.Waiting(moved_bytes=moved_bytes, site_ids=site_ids)
            await say(peer_pb2.ExchangeResponse(waiting=waiting))
            await asyncio.sleep(0.05)

    return answer


async def waits_for_what_it_was_sent(say: Say) -> None:
    """It says that more and more of it arrives, at last more than there is."""
    await say(peer_pb2.ExchangeResponse(held=peer_pb2.Held()))
    received_bytes = 0
    while True:
        received_bytes += 1 << 10
        waiting = peer_pb2.Waiting(moved_bytes=received_bytes, site_ids=[1], received_bytes=received_bytes)
        await say(peer_pb2.ExchangeResponse(waiting=waiting))
        await asyncio.sleep(0.02)


async def takes_and_hangs_up(say: Say) -> None:
    """And holds nothing of it when it is called again."""
    await say(peer_pb2.ExchangeResponse(held=peer_pb2.Held()))
    await asyncio.sleep(0.05)


async def waits_for_a_crowd(say: Say) -> None:
    await say(peer_pb2.ExchangeResponse(held=peer_pb2.Held()))
    while True:
        await say(peer_pb2.ExchangeResponse(waiting=peer_pb2.Waiting(site_ids=[3] * 100_000)))
        await asyncio.sleep(0.05)


async def holds_nothing_new_for_ever(say: Say) -> None:
    while True:
        await say(peer_pb2.ExchangeResponse(held=peer_pb2.Held(more=True)))
        await asyncio.sleep(0.01)


async def sends_empty_payloads(say: Say) -> None:
    await say(peer_pb2.ExchangeResponse(held=peer_pb2.Held()))
    while True:
        await say(peer_pb2.ExchangeResponse(payload=peer_pb2.Parts()))
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (waits_and_nothing_moves, r"no byte for 1\.0 s; it says that it waits for sites 3"),
        (waits_and_says_that_something_moves(), r"no byte for 1\.0 s"),
        (waits_and_says_that_something_moves(1), r"no byte for 1\.0 s; it says that it waits for sites 1"),
        (waits_and_says_that_something_moves(2), r"no byte for 1\.0 s; it says that it waits for sites 2"),
        (waits_and_says_that_something_moves(3), r"no byte for 1\.0 s; it says that it waits for sites 3"),
        (waits_for_what_it_was_sent, r"no byte for 1\.0 s; it says that it waits for sites 1"),
        (takes_and_hangs_up, r"no byte for 1\.0 s; the last error: the stream ended early"),
        (waits_for_a_crowd, "refused bytes.*waits for 100000 sites, and 2 contribute"),
        (holds_nothing_new_for_ever, "refused bytes.*says nothing new"),
        (sends_empty_payloads, "refused bytes.*does not belong here"),
    ],
)
def test_a_reducer_that_only_gives_signs_of_life_is_named(
    tmp_path: Path, answer: Callable[[Say], Awaitable[None]], text: str
) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run, fake_reducer(answer) as address:
            first, second = await run.add(2)
            first.train(1)
            second.address = address
            plan = star_plan(run.layout, run.sites, stall_limit_s=1, deadline_s=60)
            plan = replace(plan, trees=tuple(replace(tree, parents=(1, -1)) for tree in plan.trees))
            with pytest.raises(PeerError, match=text) as caught:
                await first.begin(plan).run()
            assert caught.value.peer_site_id == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("deadline_s", "stall_s", "text"),
    [
        (600.0, 1.0, r"no byte for 1\.0 s; it says that it waits for sites 3"),
        # Each sign excuses it for another stall: one that comes after 0.2 s is enough, on however busy a machine.
        (0.2, 2.0, "it says that it waits for sites 3, and names none of them"),
    ],
    ids=["longer than anything is on its way", "beyond the deadline"],
)
def test_a_reducer_that_blames_another_for_ever_is_named_itself(
    tmp_path: Path, deadline_s: float, stall_s: float, text: str
) -> None:
    """If site 3 gave it nothing, or too little, it would say so to the coordinator, which ends the attempt."""

    async def main() -> None:
        async with (
            Run(tmp_path, small_layout()) as run,
            fake_reducer(waits_and_says_that_something_moves(3)) as address,
        ):
            first, second, _ = await run.add(3)
            first.train(1)
            second.address = address
            plan = star_plan(run.layout, run.sites, stall_limit_s=stall_s, deadline_s=deadline_s)
            trees = tuple(replace(tree, parents=(1, -1, 1)) for tree in plan.trees)
            plan = replace(plan, trees=trees, slowest_bytes_per_s=1 << 30)
            with pytest.raises(PeerError, match=text) as caught:
                await first.begin(plan).run()
            assert caught.value.peer_site_id == 2

    asyncio.run(main())


def test_what_is_on_its_way_to_a_reducer_is_waited_for(tmp_path: Path) -> None:
    """A link may hold for long what was written to it. The reducer says how much of it arrives."""
    num_said = 0

    async def says_what_arrives(say: Say) -> None:
        nonlocal num_said
        await say(peer_pb2.ExchangeResponse(held=peer_pb2.Held()))
        while True:
            received_bytes = 16 * min(num_said, 30)
            waiting = peer_pb2.Waiting(moved_bytes=received_bytes, site_ids=[1], received_bytes=received_bytes)
            await say(peer_pb2.ExchangeResponse(waiting=waiting))
            num_said += 1
            await asyncio.sleep(0.1)

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run, fake_reducer(says_what_arrives) as address:
            first, second = await run.add(2)
            first.train(1)
            second.address = address
            plan = star_plan(run.layout, run.sites, stall_limit_s=1, slowest_bytes_per_s=16)
            plan = replace(plan, trees=tuple(replace(tree, parents=(1, -1)) for tree in plan.trees))
            with pytest.raises(PeerError, match=r"no byte for 1\.0 s; it says that it waits for sites 1"):
                await first.begin(plan).run()
            assert num_said > 30

    asyncio.run(main())


def test_a_site_says_for_whom_it_waits_once_nothing_moves(tmp_path: Path) -> None:
    """Of chunks that the first site reduces, the third's contributions; of the second's chunks, payloads."""

    async def main() -> None:
        async with (
            Run(tmp_path, small_layout()) as run,
            fake_reducer(waits_and_says_that_something_moves(3)) as address,
        ):
            first, second, _ = await run.add(3)
            first.train(1)
            second.address = address
            plan = star_plan(run.layout, run.sites, stall_limit_s=5)
            trees = tuple(replace(t, parents=(1, -1, 1) if i % 2 else (-1, 0, 0)) for i, t in enumerate(plan.trees))
            exchange = first.begin(replace(plan, trees=trees))
            running = asyncio.create_task(exchange.run())
            assert first.hub.waits_for() == ([], [])
            await until(lambda: first.hub.waits_for() != ([], []))
            assert first.hub.waits_for() == ([2, 3], [2])
            exchange.cancel()
            assert first.hub.waits_for() == ([], [])
            await ended(running)

    asyncio.run(main())


@pytest.mark.parametrize("site_ids", [(1, 3), (4,)], ids=["this site too, which has sent all", "a receiver"])
def test_whom_a_reducer_cannot_wait_for_is_no_excuse(tmp_path: Path, site_ids: tuple[int, ...]) -> None:
    answer = waits_and_says_that_something_moves(*site_ids)

    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run, fake_reducer(answer) as address:
            first, second, third, fourth = await run.add(4)
            first.train(1)
            second.address = address
            plan = star_plan(run.layout, [first, second, third], [fourth], stall_limit_s=1, deadline_s=60)
            plan = replace(plan, trees=tuple(replace(tree, parents=(1, -1, 1)) for tree in plan.trees))
            with pytest.raises(PeerError, match=r"no byte for 1\.0 s; it says that it waits for sites") as caught:
                await first.begin(plan).run()
            assert caught.value.peer_site_id == 2

    asyncio.run(main())


# --- links


def dial_through(relay: Relay, site: Site, peer: Site) -> None:
    """Where `site` dials that peer."""
    dialer = site.hub.dialer
    channel = dialer.channel

    async def relayed(callee: Any, purpose: Any, number: int = 0) -> grpc.aio.Channel:
        there = replace(callee, address=relay.address) if callee.address == peer.address else callee
        return await channel(there, purpose, number)

    dialer.channel = relayed  # type: ignore[method-assign]


def test_a_link_that_lets_a_byte_through_now_and_then_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            sites = await run.add(2)
            for site in sites:
                site.train(1)
            relay = await Relay(sites[1].address).start()
            relay.on_bytes = lambda total: relay.trickle(1, 0.2) if total > 1 << 20 else None
            sites[1].address = relay.address
            plan = star_plan(run.layout, sites, stall_limit_s=1)
            other = asyncio.create_task(sites[1].begin(plan).run())
            with pytest.raises(PeerError, match=r"site 2.*no byte for 1\.0 s") as caught:
                await sites[0].begin(plan).run()
            assert caught.value.peer_site_id == 2
            assert relay.num_trickled > 0
            await ended(other)
            await relay.stop()

    asyncio.run(main())


def test_only_the_site_behind_the_bad_link_is_named(tmp_path: Path) -> None:
    """The third site's contributions hardly reach the first; the second waits for the first and says nothing."""

    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            first, second, third = await run.add(3)
            for site in run.sites:
                site.train(1)
            relay = await Relay(first.address).start()
            relay.on_bytes = lambda total: relay.trickle(1, 0.2) if total > 1 << 19 else None
            plan = star_plan(run.layout, run.sites, stall_limit_s=1)
            plan = replace(plan, trees=tuple(replace(tree, parents=(-1, 0, 0)) for tree in plan.trees))
            dial_through(relay, third, first)
            seen_by_third = third.begin(plan)
            waits = asyncio.create_task(second.begin(plan).run())
            cut_off = asyncio.create_task(seen_by_third.run())
            with pytest.raises(PeerError, match="site 3") as caught:
                await first.begin(plan).run()
            assert caught.value.peer_site_id == 3
            assert not waits.done()
            await ended(waits, cut_off)
            await relay.stop()

    asyncio.run(main())


def test_a_slow_link_is_waited_for_longer_than_a_stall_and_nobody_is_blamed(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            first, second, third = await run.add(3)
            for site in run.sites:
                site.train(1)
            relay = await Relay(first.address).start()
            relay.trickle(32 << 10, 1 / 32)  # 1 MiB a second each way: 6 MiB of contributions take 6 s
            plan = star_plan(run.layout, run.sites, stall_limit_s=2.5, slowest_bytes_per_s=100 << 10)
            plan = replace(plan, trees=tuple(replace(tree, parents=(-1, 0, 0)) for tree in plan.trees))
            dial_through(relay, third, first)
            seen_by_third = third.begin(plan)
            loop = asyncio.get_running_loop()
            began = loop.time()
            results = await asyncio.gather(first.begin(plan).run(), second.begin(plan).run(), seen_by_third.run())
            assert loop.time() - began > 2 * plan.stall_limit_s
            assert len({result.payload_digest for result in results}) == 1
            assert second.payloads(plan) == expected_payloads(plan, run.sites)
            await relay.stop()

    asyncio.run(main())


def test_a_site_that_stood_still_itself_blames_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, small_layout()) as run:
            sites = await run.add(2)
            for site in sites:
                site.train(1)
            plan = star_plan(run.layout, sites, stall_limit_s=1, deadline_s=2)
            running = asyncio.create_task(sites[0].begin(plan).run())
            loop = asyncio.get_running_loop()
            began = loop.time()
            await until(lambda: loop.time() > began + 0.3)
            clock = loop.time
            loop.time = lambda: clock() + 60  # type: ignore[method-assign]  # as after SIGSTOP and SIGCONT
            results = await asyncio.gather(running, sites[1].begin(plan).run())
            assert results[0].payload_digest == results[1].payload_digest

    asyncio.run(main())


# --- donors


def test_a_client_that_stops_reading_loses_its_place(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            (site,) = await run.add(1)
            site.hub.serve(site.layout, lambda: site.outer, site.log, Pace(stall_s=0.5, slowest_bytes_per_s=1 << 10))
            request = peer_pb2.FetchStateRequest(
                header=wire.to_proto(replace(site.hub.identity(), site_id=7)), chunks=range(len(site.layout.chunks))
            ).SerializeToString()
            channel = transport.open_channel(site.address, handshake=None, max_message_bytes=transport.MAX_FRAME_BYTES)
            method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(FETCH_STATE_METHOD)
            calls = [method(request) for _ in range(donor_server.MAX_REQUESTS_OF_SITE)]
            for call in calls:
                await call.read()
            served = site.hub.donor
            assert served is not None
            assert len(served.places) == donor_server.MAX_REQUESTS_OF_SITE
            client = DonorClient(
                donor=site.donor(),
                ask=dialled(site.hub.dialer),
                header=replace(site.hub.identity(), site_id=7),
                counters=site.hub.counters,
                pace=PACE,
            )
            with pytest.raises(NotYetError, match="3 of them of site 7"):
                await client.hash_lists([0], len(site.layout.chunks))
            await until(lambda: not served.places)  # nobody read on
            assert await client.hash_lists([0], len(site.layout.chunks))
            await channel.close()

    asyncio.run(main())


def test_slow_readers_with_many_names_do_not_keep_the_places_of_a_donor(tmp_path: Path) -> None:
    """They read just enough; who comes when they have had their turn is served."""

    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            (site,) = await run.add(1)
            site.hub.serve(site.layout, lambda: site.outer, site.log, Pace(stall_s=0.5, slowest_bytes_per_s=1 << 10))
            channel = transport.open_channel(site.address, handshake=None, max_message_bytes=transport.MAX_FRAME_BYTES)
            method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(FETCH_STATE_METHOD)
            served = site.hub.donor
            assert served is not None
            slow = asyncio.Event()

            async def trickle(site_id: int) -> None:
                request = peer_pb2.FetchStateRequest(
                    header=wire.to_proto(replace(site.hub.identity(), site_id=site_id)),
                    chunks=range(len(site.layout.chunks)),
                )
                while True:
                    # The attempt may end before a stream is opened, or while it is written.
                    with suppress(grpc.RpcError, asyncio.InvalidStateError):
                        call = method(request.SerializeToString())
                        async for _ in call:
                            await slow.wait()  # for a while: slower than others, and never silent
                            slow.clear()

            strangers = [asyncio.create_task(trickle(site_id)) for site_id in range(20, 36)]

            async def let_them_read() -> None:
                while True:
                    slow.set()
                    await asyncio.sleep(0.2)

            strangers.append(asyncio.create_task(let_them_read()))
            await until(lambda: len(served.places) == donor_server.MAX_REQUESTS)
            client = DonorClient(
                donor=site.donor(),
                ask=dialled(site.hub.dialer),
                header=replace(site.hub.identity(), site_id=7),
                counters=site.hub.counters,
                pace=PACE,
            )
            hashes: dict[int, list[bytes]] = {}
            while not hashes:
                with suppress(NotYetError):
                    hashes = await client.hash_lists([0], len(site.layout.chunks))
            assert len(hashes[0]) == len(site.layout.chunks)
            assert len(served.places) <= donor_server.MAX_REQUESTS + 1, "who gives way is gone soon"
            await ended(*strangers)
            await channel.close()

    asyncio.run(main())


def test_a_client_has_a_place_for_a_list_beside_its_batches() -> None:
    """Its batches hold theirs until the list is there."""
    assert donor_pool.REQUESTS_PER_DONOR + 1 <= donor_server.MAX_REQUESTS_OF_SITE < donor_server.MAX_REQUESTS


def test_a_donor_that_trickles_is_named_and_another_gives_the_rest(tmp_path: Path) -> None:
    async def main() -> None:
        async with Run(tmp_path, big_layout()) as run:
            good, bad = await run.add(2)
            await run.sync()
            relay = await Relay(bad.address).start()
            relay.trickle(1, 0.1)
            bad.address = relay.address
            (joiner,) = await run.add(seeded=False)
            got = await fetch(run, joiner, [good, bad], stall_limit_s=1)
            assert got.commit == 1
            assert records(joiner) == records(good)
            with pytest.raises(PeerError, match="site 2"):
                await fetch(run, (await run.add(seeded=False))[0], [bad], stall_limit_s=1)
            await relay.stop()

    asyncio.run(main())


def test_a_link_on_which_a_full_frame_takes_longer_than_a_stall_gets_smaller_ones(tmp_path: Path) -> None:
    """Progress is whole messages. The link has fifteen times the slowest rate: it is no trickle."""

    async def main() -> None:
        manifest = Manifest.canonical([TensorSpec(name="w", shape=(1_200_000,), dtype="F32", role=Role.TRAINABLE)])
        async with Run(tmp_path, Layout(manifest, 600_000)) as run:
            first, second = await run.add(2)
            relay = await Relay(second.address).start()
            relay.trickle(7500, 0.05)
            second.address = relay.address
            plan = star_plan(run.layout, run.sites, stall_limit_s=3.0, slowest_bytes_per_s=10_000)
            for site in run.sites:
                site.train(1)
            await run_all(plan, run.sites)
            assert first.payloads(plan) == second.payloads(plan)
            await relay.stop()

    asyncio.run(main())
