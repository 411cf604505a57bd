"""Rules 11 to 14 and 30 at the door of a reducer: whose stream is served, and which contributions are taken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest

from atoll.node.exchange.hub import MAX_EARLY
from atoll.node.exchange.peers.frames import MAX_HAS_PAYLOADS, Encoded, pack_frames
from atoll.node.exchange.service import PeerService
from atoll.node.exchange.sync.exchange import Exchange
from atoll.node.exchange.sync.reduction import MAX_STREAMS
from atoll.node.exchange.sync.spill import Spill, Spilled
from atoll.protocol import wire
from atoll.protocol.codecs import HEADER_BYTES
from atoll.protocol.errors import AtollError, NotYetError, PeerError, RefusedError, StaleError
from atoll.protocol.plans import plan_digest
from atoll.protocol.v1 import peer_pb2
from tests.harness.peer_streams import HEADER, MEMBERS, Aborted, Disk, FakeContext, begin, opening, plan, serving
from tests.harness.sites import until
from tests.simulation.loop import SimLoop

SECOND = plan(attempt=2)
THE_OTHER_REDUCES = replace(SECOND.trees[0], parents=(1, -1))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    made = Disk(tmp_path_factory.mktemp("disk"))
    yield made
    made.log.close()


def found_in_attempt_2(disk: Disk, message: peer_pb2.ExchangeOpen) -> Any:
    """What a reducer in attempt 2 at sync 1, which is through with sync 3, does with the opening of a stream."""

    async def main() -> Any:
        async with serving(disk) as hub:
            begin(hub, SECOND, disk.data)
            hub.drop_sync(3)
            hub._num_early = MAX_EARLY  # what is early is told so at once
            return await hub.find(message)

    return asyncio.run(main())


def test_the_stream_of_a_member_of_this_attempt_is_served(disk: Disk) -> None:
    exchange, member = found_in_attempt_2(disk, opening(attempt=2, plan_digest=plan_digest(SECOND)))
    assert (exchange.plan, member) == (SECOND, MEMBERS[1])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"attempt": 1}, StaleError, "attempt 1 is over"),
        ({"attempt": 3}, NotYetError, "early"),
        ({"sync": 2}, NotYetError, "no plan"),
        ({"sync": 3}, StaleError, "is over here"),
        ({"plan_digest": bytes(32)}, RefusedError, "plan 0000"),
        ({"tokens": 6}, RefusedError, "says 6 tokens"),
        ({"reducer_site_id": 2}, RefusedError, "meant for site 2"),
        ({"reducer_incarnation": 2}, StaleError, "meant for incarnation 2"),
        ({"header": wire.to_proto(replace(HEADER, site_id=2, incarnation=7))}, StaleError, "not 7"),
        ({"header": wire.to_proto(replace(HEADER, site_id=3))}, RefusedError, "not in"),
        ({"header": wire.to_proto(replace(HEADER, site_id=2, run_id="other"))}, RefusedError, "'other'"),
        ({"header": wire.to_proto(replace(HEADER, site_id=2, protocol_version=99))}, RefusedError, "version 99"),
    ],
)
def test_4_other_streams_are_turned_away_with_the_reason(
    disk: Disk, change: dict[str, Any], error: type[AtollError], text: str
) -> None:
    right: dict[str, Any] = {"attempt": 2, "plan_digest": plan_digest(SECOND)}
    with pytest.raises(error, match=text):
        found_in_attempt_2(disk, opening(**right | change))


def test_12_the_weight_of_a_plan_that_came_with_the_commit_is_that_of_the_first_header(disk: Disk) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            exchange = begin(hub, plan(ahead=True), disk.data, weights=())
            with pytest.raises(RefusedError, match="0 tokens"):
                await hub.find(opening(tokens=0))
            await hub.find(opening(tokens=7))
            await hub.find(opening(tokens=7))
            with pytest.raises(RefusedError, match="says 8 tokens, it has 7"):
                await hub.find(opening(tokens=8))
            assert exchange.weights.vector() == (5, 7)

    asyncio.run(main())


def test_12_the_weight_of_a_plan_replaces_what_a_header_said_in_the_attempt_before(disk: Disk) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            begin(hub, plan(ahead=True), disk.data, weights=())
            await hub.find(opening(tokens=7))
            exchange = begin(hub, SECOND, disk.data)
            assert exchange.weights.vector() == (5, 5)

    asyncio.run(main())


def test_no_deadline_runs_and_nobody_is_blamed_before_all_are_ready(disk: Disk) -> None:
    """The other one still trains."""

    async def main() -> None:
        async with serving(disk) as hub:
            exchange = begin(hub, plan(ahead=True), disk.data, weights=())
            watching = asyncio.ensure_future(exchange.watch())
            await asyncio.sleep(10 * plan().deadline_s)
            assert not watching.done()
            exchange.weigh((5, 5))
            with pytest.raises(PeerError, match="site 2"):
                await watching

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())


def sent(disk: Disk, items: list[Encoded], **first: Any) -> tuple[grpc.StatusCode, list[int]]:
    """How a stream with these contributions ends, and the chunks that the reducer then holds."""
    frames = [peer_pb2.ExchangeRequest(open=opening(**first)).SerializeToString(), *pack_frames(items)]

    async def main() -> tuple[grpc.StatusCode, list[int]]:
        async with serving(disk) as hub:
            begin(hub, plan(), disk.data)
            context: Any = FakeContext(frames)
            with pytest.raises(Aborted) as ended:
                await PeerService(hub).exchange(None, context)
            return ended.value.args[0], sorted(chunk for _, _, chunk in hub._exchanges[1].retained._items)

    return asyncio.run(main())


def test_contributions_are_held(disk: Disk) -> None:
    _, held = sent(disk, disk.contributions)
    assert held == [item.chunk for item in disk.contributions]


def test_streams_of_the_attempt_before_take_no_place(disk: Disk) -> None:
    """They may hang in a write for a stall, as the link broke; with other members the ranges are others."""
    frames = [
        peer_pb2.ExchangeRequest(open=opening(attempt=2, plan_digest=plan_digest(SECOND))).SerializeToString(),
        *pack_frames(disk.contributions),
    ]

    class HangingContext(FakeContext):
        async def write(self, frame: bytes) -> None:
            self.sent.append(frame)
            await asyncio.Event().wait()

    async def main() -> None:
        async with serving(disk) as hub:
            service = PeerService(hub)
            begin(hub, plan(), disk.data)
            hanging = [
                HangingContext([peer_pb2.ExchangeRequest(open=opening(first_chunk=i)).SerializeToString()])
                for i in range(1, MAX_STREAMS + 1)
            ]
            before = [asyncio.ensure_future(service.exchange(None, cast(Any, context))) for context in hanging]
            await until(lambda: all(context.sent for context in hanging))
            exchange = begin(hub, SECOND, disk.data)
            context: Any = FakeContext(frames)
            with pytest.raises(Aborted):
                await service.exchange(None, context)
            assert exchange.retained.chunks_of(2, 1) == set(disk.data.chunks)
            for task in before:
                task.cancel()
            await asyncio.gather(*before, return_exceptions=True)

    asyncio.run(main())


def test_several_syncs_are_held_at_once_and_each_ends_by_itself(disk: Disk) -> None:
    frames = [peer_pb2.ExchangeRequest(open=opening()).SerializeToString(), *pack_frames(disk.contributions)]

    async def main() -> None:
        async with serving(disk) as hub:
            first = begin(hub, plan(), disk.data)
            context: Any = FakeContext(frames)
            with suppress(Aborted):
                await PeerService(hub).exchange(None, context)
            num_bytes = first.retained.num_bytes
            second = begin(hub, plan(sync=2), disk.data, in_flight={1, 2})
            assert hub.retained_bytes == num_bytes > 0
            hub.cancel(1, 2)
            assert not first.attempt.finished.done(), "that is another attempt"
            hub.cancel(1, 1)
            assert first.attempt.finished.cancelled()
            assert not second.attempt.finished.done()
            hub.drop_sync(2)
            assert first.retained.num_bytes == num_bytes, "it may serve another attempt"
            begin(hub, plan(sync=3), disk.data, in_flight={3})
            assert hub.retained_bytes == 0

    asyncio.run(main())


def test_the_bound_on_what_is_retained_is_of_all_syncs_in_flight(disk: Disk) -> None:
    frames = [peer_pb2.ExchangeRequest(open=opening()).SerializeToString(), *pack_frames(disk.contributions)]

    async def main() -> None:
        async with serving(disk) as hub:
            need = hub.share(plan(), disk.data)().bytes_to_retain("here", 1 << 30, None)
            hub.max_retained_bytes = need
            begin(hub, plan(), disk.data)
            context: Any = FakeContext(frames)
            with suppress(Aborted):
                await PeerService(hub).exchange(None, context)
            for in_flight, has_room in (({1}, False), (set[int](), True)):
                second = begin(hub, plan(sync=2), disk.data, in_flight=in_flight)
                assert second.reducer._has_room.is_set() == has_room

    asyncio.run(main())


def test_what_is_waited_for_is_of_all_syncs_in_flight(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            waits = {}
            for sync, found in ((1, ([2, 4], [3])), (2, ([4, 5], []))):
                waits[begin(hub, plan(sync=sync), disk.data, in_flight={1, 2})] = found
            monkeypatch.setattr(Exchange, "waits_for", lambda exchange: waits[exchange])
            assert hub.waits_for() == ([2, 4, 5], [3])

    asyncio.run(main())


@pytest.mark.parametrize("limit_bytes", [0, 1 << 20])
def test_a_contribution_that_is_verified_when_its_sync_is_over_is_not_held(
    disk: Disk, tmp_path: Path, limit_bytes: int
) -> None:
    """Nobody would ever forget it: the bound on memory would be lower from then on, and its file stay."""
    frames = [peer_pb2.ExchangeRequest(open=opening()).SerializeToString(), *pack_frames(disk.contributions)]

    async def main() -> None:
        async with serving(disk) as hub:
            spill = hub.spill = Spill(tmp_path, limit_bytes)
            exchange = begin(hub, plan(), disk.data)
            add = exchange.retained.add

            def verified(site_id: int, incarnation: int, item: Encoded | Spilled) -> None:
                hub.drop_sync(1)  # while a thread verified it
                add(site_id, incarnation, item)

            exchange.retained.add = verified  # type: ignore[method-assign]
            context: Any = FakeContext(frames)
            with pytest.raises(Aborted):
                await PeerService(hub).exchange(None, context)
            assert exchange.retained.num_bytes == 0
            await asyncio.get_running_loop().run_in_executor(hub.pool, int)  # after what was handed in before
            assert (spill.memory_bytes, spill.disk_bytes) == (0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("limit_bytes", [0, 1 << 20])
def test_what_a_stream_with_contradictions_brought_takes_no_room_beyond_what_is_held(
    disk: Disk, tmp_path: Path, limit_bytes: int
) -> None:
    """The same chunk twice in one frame, with other bytes: nobody would ever forget what came after it."""
    first, *others = disk.contributions
    zero = bytes(len(first.data) - HEADER_BYTES)
    again = replace(first, data=first.data[:HEADER_BYTES] + zero)
    again = replace(again, hash=disk.data.payload_hash(again.data))
    sent = list(pack_frames([first, again, *others]))
    assert len(sent) == 1
    frames = [peer_pb2.ExchangeRequest(open=opening()).SerializeToString(), *sent]

    async def main() -> None:
        async with serving(disk) as hub:
            spill = hub.spill = Spill(tmp_path, limit_bytes)
            exchange = begin(hub, plan(), disk.data)
            context: Any = FakeContext(frames)
            with pytest.raises(Aborted, match="again with other bytes"):
                await PeerService(hub).exchange(None, context)
            assert exchange.retained.chunks_of(2, 1) == set(disk.data.chunks)
            await asyncio.get_running_loop().run_in_executor(hub.pool, int)  # after what was handed in before
            assert spill.memory_bytes + spill.disk_bytes == exchange.retained.num_bytes
            hub.drop_sync(1)
            await asyncio.get_running_loop().run_in_executor(hub.pool, int)
            assert (spill.memory_bytes, spill.disk_bytes) == (0, 0)

    asyncio.run(main())


def test_a_contribution_without_its_hash_is_not_held(disk: Disk) -> None:
    first, *rest = disk.contributions
    spoiled = Encoded(first.chunk, first.data[:-1] + bytes([first.data[-1] ^ 1]), first.hash)
    code, held = sent(disk, [spoiled, *rest])
    assert code is grpc.StatusCode.DATA_LOSS
    assert first.chunk not in held


@pytest.mark.parametrize("kind", ["infinite", "no zstd frame"])
def test_33_a_contribution_that_cannot_be_averaged_is_not_held(disk: Disk, kind: str) -> None:
    """It has its hash. In the average it would end the reducer instead of its own stream."""
    first, *others = disk.contributions
    body = {"infinite": np.float32(np.inf).tobytes() + first.data[HEADER_BYTES + 4 :], "no zstd frame": b"garbage"}[
        kind
    ]
    head = bytearray(first.data[:HEADER_BYTES])
    head[2] = kind == "no zstd frame"
    data = bytes(head) + body
    bad = Encoded(first.chunk, data, disk.data.payload_hash(data))
    code, held = sent(disk, [bad, *others])
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert first.chunk not in held


def test_a_long_list_of_payloads_is_refused(disk: Disk) -> None:
    code, held = sent(disk, [], has_payloads=range(MAX_HAS_PAYLOADS + 1))
    assert (code, held) == (grpc.StatusCode.INVALID_ARGUMENT, [])


def test_30_a_plan_that_asks_too_much_of_a_reducer_is_refused(disk: Disk) -> None:
    async def main() -> None:
        async with serving(disk, max_retained_bytes=1000) as hub:
            with pytest.raises(RefusedError, match="its bound is 1000"):
                begin(hub, plan(), disk.data)

    asyncio.run(main())


def test_payloads_that_are_stored_together_are_all_counted(disk: Disk) -> None:
    """A stream up stores one batch while it reads the next: it ends when both are stored, and not before."""

    async def main() -> list[bool]:
        async with serving(disk) as hub:
            exchange = begin(hub, plan(trees=(THE_OTHER_REDUCES,)), disk.data)
            are_stored = asyncio.Event()

            class SlowCollection:
                async def store(self, items: list[Encoded]) -> int:
                    await are_stored.wait()
                    return len(items)

            upstream = replace(exchange.upstreams[0], collection=cast(Any, SlowCollection()))
            items = [Encoded(chunk, b"", b"") for chunk in upstream.chunks]
            assert len(items) > 1
            batches = [
                asyncio.create_task(upstream._store(upstream.strands[0], batch)) for batch in (items[:1], items[1:])
            ]
            await asyncio.wait(batches, timeout=0)  # both have begun
            before = upstream.is_done
            are_stored.set()
            await asyncio.gather(*batches)
            return [before, upstream.is_done]

    assert asyncio.run(main()) == [False, True]
