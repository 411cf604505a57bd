"""What a reducer says to a site that sends it contributions: any bytes, and what is true of it in any order.

The exchange runs on simulated time, without sockets: it ends with payloads that have their hashes, or names that
reducer, whatever the reducer says, and in the time that the plan gives.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.frames import Encoded, pack_frames
from atoll.node.exchange.peers.progress import WORTH_TIMES
from atoll.node.exchange.sync import reduction
from atoll.node.exchange.sync.exchange import Exchange
from atoll.node.exchange.sync.pacing import MAX_SPARE_MS
from atoll.protocol import messages as m
from atoll.protocol.errors import PeerError
from atoll.protocol.v1 import peer_pb2
from tests.harness.fuzzing import UINT32, UINT64, damaged, fuzz, protos
from tests.harness.peer_streams import LAYOUT, MEMBERS, Disk, begin, plan, serving
from tests.simulation.loop import START_S, SimLoop
from tests.simulation.network import error

NUM_CHUNKS = LAYOUT.num_sync_chunks
LIAR = MEMBERS[1]
OF_ALL = m.Tree(first_chunk=0, num_chunks=NUM_CHUNKS, parents=(1, -1))
OF_THE_LATER = (
    m.Tree(first_chunk=0, num_chunks=1, parents=(-1, 0)),
    m.Tree(first_chunk=1, num_chunks=NUM_CHUNKS - 1, parents=(1, -1)),
)
"""The site itself reduces the first one, to which the reducer of the others contributes nothing."""
ALL_PAYLOADS = "the payloads of this stream"
CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OUT_OF_RANGE, *grpc.StatusCode)


@dataclass(frozen=True)
class Script:
    """Of one stream: what the reducer says, and how it ends."""

    says: tuple[bytes | str, ...]
    end: grpc.StatusCode | str
    reads_first: bool
    """It says nothing before it has all that comes up."""


def response(**body: Any) -> bytes:
    return peer_pb2.ExchangeResponse(**body).SerializeToString()


WAITING = st.builds(
    lambda moved, ids, received, spare: response(
        waiting=peer_pb2.Waiting(moved_bytes=moved, site_ids=ids, received_bytes=received, spare_ms=spare)
    ),
    UINT64,
    st.sampled_from([(), (1,), (1,), (2,), (3,), (1, 2)]),
    UINT64,
    UINT32,
)
HELD = st.builds(
    lambda chunks, more: response(held=peer_pb2.Held(chunks=chunks, more=more)),
    st.lists(st.integers(0, NUM_CHUNKS) | UINT32, max_size=4),
    st.booleans(),
)
NOTHING_HELD = st.just(response(held=peer_pb2.Held()))
ANYTHING = protos(peer_pb2.ExchangeResponse).map(lambda message: bytes(message.SerializeToString()))


@st.composite
def scripts(draw: st.DrawFn, payloads: list[bytes]) -> Script:
    one = st.sampled_from(payloads)
    follows = one.map(lambda frame: frame + b"\x20\x01")
    later = st.one_of(st.just(ALL_PAYLOADS), one, follows, WAITING, WAITING)
    first = NOTHING_HELD
    if draw(st.booleans()):  # else all of it may be true
        later, first = later | HELD | ANYTHING, NOTHING_HELD | HELD | ANYTHING
    said = [draw(first), *draw(st.lists(later, max_size=6))]
    says = tuple(draw(damaged(s)) if isinstance(s, bytes) and draw(st.integers(0, 9)) == 0 else s for s in said)
    return Script(says, draw(st.sampled_from(["eof", "hangs", *CODES])), draw(st.booleans()))


class LyingCall:
    """One stream to the reducer."""

    def __init__(self, reducer: LyingReducer, script: Script) -> None:
        self.reducer, self.script = reducer, script
        self.said = deque(script.says)
        self.heard: list[bytes] = []
        self.has_all, self.is_over = asyncio.Event(), False

    async def write(self, frame: bytes) -> None:
        if self.is_over:
            raise asyncio.InvalidStateError("the call has ended")
        self.heard.append(frame)
        await asyncio.sleep(0.01)

    async def done_writing(self) -> None:
        self.has_all.set()

    async def read(self) -> Any:
        await asyncio.sleep(0.01)
        if self.script.reads_first and len(self.said) < len(self.script.says):  # what is first, it says at once
            await self.has_all.wait()
        if not self.said:
            return await self._end()
        said = self.said.popleft()
        if said != ALL_PAYLOADS:
            self.reducer.said_bytes += len(said)
            return said
        opened = peer_pb2.ExchangeRequest.FromString(self.heard[0]).open
        ids = range(opened.first_chunk, opened.first_chunk + opened.num_chunks)
        mine = [item for item in self.reducer.payloads if item.chunk in ids]
        self.said.extendleft(reversed(list(pack_frames(mine))))
        return await self.read() if mine else await self._end()

    async def _end(self) -> Any:
        if self.script.end == "hangs":
            await asyncio.Event().wait()
        self.is_over = True
        if isinstance(self.script.end, grpc.StatusCode):
            raise error(self.script.end, "as the reducer likes")
        return grpc.aio.EOF

    def cancel(self) -> None:
        self.is_over = True


class LyingReducer:
    """In place of a network: every stream that is opened goes to it, and follows the next script."""

    def __init__(self, scripts: list[Script], payloads: list[Encoded]) -> None:
        self.scripts, self.payloads = deque(scripts), payloads
        self.calls: list[LyingCall] = []
        self.said_bytes = 0

    def open_channel(self, address: str, **_: Any) -> LyingReducer:
        return self

    def stream_stream(self, method: str, **_: Any) -> Any:
        def opened(**_: Any) -> LyingCall:
            self.calls.append(LyingCall(self, self.scripts[0]))
            self.scripts.rotate(-1)
            return self.calls[-1]

        return opened

    async def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    made = Disk(tmp_path_factory.mktemp("disk"))
    yield made
    made.log.close()


@pytest.fixture(scope="module", autouse=True)
def _streams_of_any_size() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "MIN_STREAM_BYTES", 1)
        yield


def payloads_of(disk: Disk) -> list[Encoded]:
    found = [
        (item.chunk, disk.data.reduce(item.chunk, [(5, item.data), (5, item.data)])) for item in disk.contributions
    ]
    return [Encoded(chunk, data, disk.data.payload_hash(data)) for chunk, data in found]


async def run(exchange: Exchange) -> bool:
    """Whether it has all payloads. No other error may come of what a peer says than one that names it."""
    began_at, attempt = exchange.attempt.loop.time(), exchange.attempt
    failed: PeerError | None = None
    try:
        await exchange.run()
    except PeerError as error:
        failed = error
    most_s = attempt.plan.deadline_s + 2 * attempt.plan.stall_limit_s
    assert attempt.loop.time() - began_at < most_s, "no word of a reducer makes an attempt longer"
    assert failed is None or (failed.peer_site_id == LIAR.site_id and len(str(failed)) < 2000)
    return failed is None


@fuzz(150)
@given(data=st.data())
def test_an_exchange_with_any_reducer_ends_with_its_payloads_or_names_it(disk: Disk, data: st.DataObject) -> None:
    payloads = payloads_of(disk)
    frames = [frame for item in payloads for frame in pack_frames([item])]
    trees = data.draw(st.sampled_from([(OF_ALL,), (OF_ALL,), OF_THE_LATER]))
    receives = trees == (OF_ALL,) and data.draw(st.integers(0, 3)) == 0
    found = plan(trees=trees, contributors=MEMBERS)
    if receives:
        tree = replace(OF_ALL, parents=(-1,))
        found = replace(found, contributors=(LIAR,), receivers=MEMBERS[:1], trees=(tree,))
    spread_s = data.draw(st.sampled_from([0.0, 0.5, 20.0]))
    liar: Any = LyingReducer(data.draw(st.lists(scripts(frames), min_size=1, max_size=3)), payloads)

    async def main() -> None:
        async with serving(disk, dialer=Dialer(liar)) as hub:
            exchange = begin(hub, found, disk.data, spread_s=spread_s)
            spare_ms = exchange.attempt.spare_ms
            is_whole = await run(exchange)
            assert exchange.attempt.spare_ms <= spare_ms <= MAX_SPARE_MS, "a reducer can hurry this site, and no more"
            judge(exchange, liar, is_whole=is_whole)
            true = {item.chunk: item.data for item in disk.contributions} if not receives else {}
            for call in liar.calls:
                assert contributions_in(call.heard).items() <= true.items()

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())
    disk.log.drop(found.sync)


@pytest.mark.parametrize("code", grpc.StatusCode, ids=lambda code: str(code.name))
def test_no_status_with_which_a_reducer_ends_its_streams_is_taken_for_this_sites_failure(
    disk: Disk, code: grpc.StatusCode
) -> None:
    liar: Any = LyingReducer([Script((response(held=peer_pb2.Held()),), code, reads_first=False)], [])

    async def main() -> None:
        async with serving(disk, dialer=Dialer(liar)) as hub:
            assert not await run(begin(hub, plan(trees=(OF_ALL,)), disk.data))

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())
    disk.log.drop(1)


def judge(exchange: Exchange, liar: LyingReducer, *, is_whole: bool) -> None:
    """What this site keeps, and what it takes for progress of a link or of the exchange."""
    attempt, collection = exchange.attempt, exchange.collection
    kept = [chunk for chunk in attempt.data.chunks if collection.has(chunk)]
    assert not is_whole or kept == list(attempt.data.chunks)
    for chunk in kept:
        payload = collection.file.read(chunk)
        attempt.data.check_payload(chunk, payload, attempt.num_contributors)
        assert collection.file.hash_of(chunk) == attempt.data.payload_hash(payload)
    (upstream,) = exchange.upstreams
    written_bytes = sum(len(frame) for call in liar.calls for frame in call.heard)
    assert attempt.moved_bytes <= 2 * WORTH_TIMES * upstream.reduction.num_bytes
    assert attempt.counters.moved_bytes <= attempt.moved_bytes + written_bytes
    assert attempt.counters.received_bytes <= liar.said_bytes
    for use in attempt.links.longest():
        assert use.site_id == LIAR.site_id
        assert 0 < use.received_bytes <= attempt.counters.received_bytes
        assert use.seconds <= attempt.loop.time() - START_S
    assert len(upstream.waits_for) < len(attempt.plan.contributors) or not attempt.contributes


def contributions_in(heard: list[bytes]) -> dict[int, bytes]:
    """By chunk; all of them in the range that the stream was opened for."""
    if not heard:
        return {}  # the exchange was over
    opened, *requests = [peer_pb2.ExchangeRequest.FromString(frame) for frame in heard]
    ids = range(opened.open.first_chunk, opened.open.first_chunk + opened.open.num_chunks)
    parts = [part for request in requests for part in request.contribution.parts]
    assert all(part.chunk in ids for part in parts)
    found: dict[int, bytes] = {}
    for part in parts:
        found[part.chunk] = found.get(part.chunk, b"") + part.data
    return {part.chunk: found[part.chunk] for part in parts if part.hash}
