"""What peers send to a node: frames of exchanges, openings of streams, requests to a donor, and a donor's answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.dataplane.outer_update import record_bytes
from atoll.node.exchange.catchup.donor_client import DonorClient, dialled
from atoll.node.exchange.catchup.expected_donors import ExpectedDonors
from atoll.node.exchange.hub import MAX_EARLY, Hub
from atoll.node.exchange.peers.counters import Counters
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.frames import Encoded, PartAssembler, pack_frames, parse
from atoll.node.exchange.peers.prober import Prober
from atoll.node.exchange.service import PeerService
from atoll.node.exchange.sync.pacing import MAX_SPARE_MS
from atoll.node.exchange.sync.retained import Retained
from atoll.node.exchange.sync.spill import Spill
from atoll.protocol import messages as m
from atoll.protocol import transport, wire
from atoll.protocol.codecs import HEADER_BYTES
from atoll.protocol.errors import InvalidMessage, NotYetError, PeerError, RefusedError, StateError
from atoll.protocol.plans import payload_digest, payload_hash, plan_digest, reducers
from atoll.protocol.time_limits import PRESETS
from atoll.protocol.v1 import peer_pb2
from tests.harness.failures import unexpected
from tests.harness.fuzzing import SMALL, damaged, fuzz, instances, peak_bytes, protos
from tests.harness.peer_streams import (
    HEADER,
    LAYOUT,
    MEMBERS,
    PACE,
    Aborted,
    Disk,
    FakeContext,
    begin,
    opening,
    plan,
    serving,
)
from tests.harness.sites import until
from tests.harness.snapshots import snapshot
from tests.simulation.loop import SimLoop

NUM_CHUNKS = len(LAYOUT.chunks)
MAX_CHUNK_BYTES = 20 << 10
REFUSALS = (RefusedError, NotYetError, StateError)


# --- frames


@st.composite
def frames(draw: st.DrawFn) -> list[bytes]:
    """Frames as a sender makes them, then damaged."""
    sizes = draw(st.lists(st.sampled_from([1, 100, 5000, MAX_CHUNK_BYTES]), min_size=1, max_size=4))
    items = [Encoded(chunk, bytes([chunk]) * size, bytes(32)) for chunk, size in enumerate(sizes)]
    frame_bytes = draw(st.sampled_from([6000, 512 << 10]))
    sent = list(pack_frames(items, frame_bytes))
    return [draw(damaged(frame)) if draw(st.booleans()) else frame for frame in sent]


@fuzz(200)
@given(frames())
def test_damaged_frames_give_bounded_chunks_or_are_refused(received: list[bytes]) -> None:
    def expect(chunk: int) -> int:
        if chunk > 3:
            raise InvalidMessage("no such chunk here")
        return MAX_CHUNK_BYTES

    assembler = PartAssembler(expect)
    for frame in received:
        try:
            request = parse(peer_pb2.ExchangeRequest, frame)
            for part in request.contribution.parts:
                item = assembler.add(part)
                assert item is None or (0 < len(item.data) <= MAX_CHUNK_BYTES and len(item.hash) == 32)
        except InvalidMessage:
            return


@fuzz(200)
@given(st.lists(protos(peer_pb2.Part), max_size=8))
def test_any_parts_hold_no_more_than_one_chunk(parts: list[peer_pb2.Part]) -> None:
    assembler = PartAssembler(lambda _: 64)
    for part in parts:
        try:
            assembler.add(part)
        except InvalidMessage:
            return
        assert sum(map(len, assembler._pieces)) < 64


@fuzz(100)
@given(st.lists(st.tuples(SMALL, SMALL, st.integers(0, 3), st.binary(min_size=32, max_size=32)), max_size=8))
def test_what_is_held_never_changes(additions: list[tuple[int, int, int, bytes]]) -> None:
    held = Retained(ThreadPoolExecutor(1))
    first: dict[tuple[int, int, int], bytes] = {}
    for site_id, incarnation, chunk, value in additions:
        held.add(site_id, incarnation, Encoded(chunk, b"x", value))
        found = held.get(site_id, incarnation, chunk)
        assert found is not None
        assert found.hash == first.setdefault((site_id, incarnation, chunk), value)
        assert held.num_bytes == len(first)


# --- plans


PLANS = st.builds(
    plan,
    contributors=st.sampled_from([MEMBERS, MEMBERS[:1], MEMBERS[::-1], ()]) | st.lists(instances(m.Member)).map(tuple),
    trees=st.lists(
        instances(m.Tree, first_chunk=SMALL, parents=st.sampled_from([(-1, 0), (1, -1), (-1,), (0, 0)]))
        | instances(m.Tree),
        max_size=3,
    ).map(tuple),
)  # fmt: skip


@fuzz(100)
@given(PLANS | instances(m.Plan))
def test_any_plan_is_understood_or_refused(found: m.Plan) -> None:
    assert len(payload_digest("run", found, [])) == 32
    try:
        assert len(plan_digest(found)) == 32
        tops = reducers(found, 5)
    except InvalidMessage:
        return
    assert len(tops) == 5
    assert set(tops) <= set(found.contributors)


def test_a_tree_of_many_chunks_takes_no_memory_before_it_is_refused() -> None:
    huge = plan(trees=(m.Tree(first_chunk=0, num_chunks=(1 << 32) - 1, parents=(-1, 0)),))

    def judge() -> None:
        with pytest.raises(InvalidMessage):
            reducers(huge, 5)

    assert peak_bytes(judge) < 1 << 16


# --- streams that open, and what comes after


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    made = Disk(tmp_path_factory.mktemp("disk"))
    yield made
    made.log.close()


@pytest.fixture(scope="module")
def spill_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spill")


@st.composite
def openings(draw: st.DrawFn) -> peer_pb2.ExchangeOpen:
    """The right one with up to two fields that are not, or any."""
    other = draw(protos(peer_pb2.ExchangeOpen))
    if draw(st.booleans()):
        return cast(peer_pb2.ExchangeOpen, other)
    message = opening()
    for name in draw(st.lists(st.sampled_from([f.name for f in message.DESCRIPTOR.fields]), max_size=2)):
        message.ClearField(name)  # type: ignore[arg-type]
        lone = peer_pb2.ExchangeOpen.FromString(other.SerializeToString())
        for field in message.DESCRIPTOR.fields:
            if field.name != name:
                lone.ClearField(field.name)  # type: ignore[arg-type]
        message.MergeFrom(lone)
    return message


def held_by(hub: Hub) -> Any:
    return (
        sorted(hub._dropped),
        {sync: snapshot(e.retained._items) for sync, e in hub._exchanges.items()},
        {
            sync: (e.plan, e.attempt.closed, len(e.reducer.payloads), snapshot(e.reducer._missing))
            for sync, e in hub._exchanges.items()
        },
    )


@fuzz(150)
@given(message=openings(), begun=st.booleans(), over=st.booleans())
def test_a_stream_finds_its_exchange_or_is_refused(
    disk: Disk, message: peer_pb2.ExchangeOpen, begun: bool, over: bool
) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            if begun:
                begun_spread = begin(hub, plan(), disk.data, spread_s=1e9).attempt
            if over:
                hub.drop_sync(2)
            hub._num_early = MAX_EARLY  # nothing is held until it is not early any more
            before = held_by(hub)
            try:
                exchange, member = await hub.find(message)
            except REFUSALS:
                if begun:
                    assert begun_spread.spare_ms == MAX_SPARE_MS, "who is refused hurries nobody"
            else:
                assert exchange.attempt.spare_ms <= message.spare_ms
                assert exchange.plan == plan()
                assert member == MEMBERS[1]
                assert message.plan_digest == exchange.attempt.digest
            assert held_by(hub) == before

    asyncio.run(main())


@st.composite
def some_twice(draw: st.DrawFn, items: Sequence[Encoded]) -> list[Encoded]:
    """Contributions as they are, or with a second one of a chunk that says something else, which has its hash."""
    found = list(items)
    for place in draw(st.lists(st.integers(0, len(items) - 1), max_size=2)):
        data = items[place].data
        other = data[:HEADER_BYTES] + bytes(len(data) - HEADER_BYTES)
        found.insert(draw(st.integers(0, len(found))), Encoded(items[place].chunk, other, payload_hash(other)))
    return found


@fuzz(100)
@given(first=openings(), limit_bytes=st.sampled_from([0, 2000, 1 << 20]), data=st.data())
def test_what_a_stream_brings_is_held_whole_or_refused(
    disk: Disk, spill_folder: Path, first: peer_pb2.ExchangeOpen, limit_bytes: int, data: st.DataObject
) -> None:
    """Whatever the frames are: only whole contributions are held, they are those that were sent, and nothing else takes
    room."""
    if data.draw(st.booleans()):
        first = opening(has_payloads=first.has_payloads)
    frames = list(pack_frames(data.draw(some_twice(disk.contributions)), 6000))
    received = [peer_pb2.ExchangeRequest(open=first).SerializeToString()]
    received += [data.draw(damaged(f)) if data.draw(st.booleans()) else f for f in frames]
    whole = {item.chunk: item.hash for item in disk.contributions}

    async def main() -> None:
        async with serving(disk) as hub:
            spill = hub.spill = Spill(spill_folder, limit_bytes)
            begin(hub, plan(), disk.data)
            hub._num_early = MAX_EARLY
            context: Any = FakeContext(received)
            with pytest.raises(Aborted) as ended:
                await PeerService(hub).exchange(None, context)
            assert isinstance(ended.value.args[0], grpc.StatusCode)
            for held in [e.retained for e in hub._exchanges.values()]:
                for (site_id, incarnation, chunk), item in held._items.items():
                    encoded = item.data if isinstance(item, Encoded) else item.read()
                    assert (site_id, incarnation) == (2, 1)
                    assert disk.data.payload_hash(encoded) == item.hash
                    disk.data.check(chunk, encoded)
                    assert len(encoded) <= disk.data.max_bytes(chunk)
                assert held.num_bytes <= sum(disk.data.max_bytes(chunk) for chunk in whole)
            await asyncio.get_running_loop().run_in_executor(hub.pool, int)  # after what was handed in before
            num_held = sum(held.num_bytes for held in [e.retained for e in hub._exchanges.values()])
            assert spill.memory_bytes + spill.disk_bytes == num_held

    asyncio.run(main())


@pytest.mark.parametrize(("first_chunk", "num_chunks"), [(2**31 - 1, 10), (0, 0), (2**32 - 1, 2**32 - 1)])
def test_a_range_of_which_the_site_reduces_nothing_is_refused(disk: Disk, first_chunk: int, num_chunks: int) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            begin(hub, plan(), disk.data)
            first = opening()
            first.first_chunk, first.num_chunks = first_chunk, num_chunks
            request = peer_pb2.ExchangeRequest(open=first).SerializeToString()
            with pytest.raises(Aborted) as ended:
                await PeerService(hub).exchange(None, cast(Any, FakeContext([request])))
            assert ended.value.args[0] is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())


@fuzz(100)
@given(found=PLANS | instances(m.Plan))
def test_a_plan_that_cannot_be_run_leaves_nothing_behind(disk: Disk, found: m.Plan) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            begin(hub, plan(sync=3), disk.data)
            before = held_by(hub)
            try:
                begin(hub, found, disk.data)
            except RefusedError:
                assert held_by(hub) == before

    asyncio.run(main())


# --- requests to a donor


@st.composite
def requests(draw: st.DrawFn, cls: Any) -> Any:
    """Any request; mostly from this run, mostly for chunks that there are."""
    request = draw(protos(cls))
    if draw(st.integers(0, 3)):
        request.header.CopyFrom(wire.to_proto(HEADER))
    if draw(st.booleans()):
        del request.chunks[:]
        request.chunks.extend(draw(st.lists(st.integers(0, NUM_CHUNKS), max_size=4)))
    return request


@pytest.mark.parametrize("method", ["fetch_state", "fetch_payloads"])
@fuzz(100)
@given(data=st.data())
def test_a_donor_answers_in_bounded_frames_or_refuses(disk: Disk, method: str, data: st.DataObject) -> None:
    cls: Any = peer_pb2.FetchStateRequest if method == "fetch_state" else peer_pb2.FetchPayloadsRequest
    request = data.draw(requests(cls)).SerializeToString()
    if data.draw(st.booleans()):
        request = data.draw(damaged(request))

    async def main() -> None:
        async with serving(disk) as hub:
            context: Any = FakeContext([])
            with suppress(Aborted):
                await getattr(PeerService(hub), method)(request, context)
            assert all(len(frame) <= transport.MAX_FRAME_BYTES for frame in context.sent)
            assert hub.donor is not None
            assert not hub.donor.places, "its place is free again"

    asyncio.run(main())


# --- who is at an address


@fuzz(100)
@given(protos(peer_pb2.ProbeRequest), st.data())
def test_whoever_probes_hears_who_is_here_or_is_refused(
    disk: Disk, message: peer_pb2.ProbeRequest, data: st.DataObject
) -> None:
    if data.draw(st.booleans()):
        message.header.CopyFrom(wire.to_proto(HEADER))
    request = data.draw(st.just(message.SerializeToString()) | damaged(message.SerializeToString()))

    async def main() -> None:
        async with serving(disk) as hub:
            context: Any = FakeContext([])
            try:
                answer = await PeerService(hub).probe(request, context)
            except Aborted:
                return
            header = peer_pb2.ProbeRequest.FromString(request).header
            assert (header.run_id, header.protocol_version) == (HEADER.run_id, HEADER.protocol_version)
            assert peer_pb2.ProbeResponse.FromString(answer).header == wire.to_proto(hub.identity())

    asyncio.run(main())


@dataclass
class Answering:
    """In place of a network: whoever is dialled answers this."""

    answer: bytes

    def open_channel(self, address: str, **_: Any) -> Answering:
        return self

    def unary_unary(self, method: str, **_: Any) -> Any:
        async def call(request: bytes) -> bytes:
            return self.answer

        return call

    async def close(self) -> None:
        pass


@fuzz(100)
@given(protos(peer_pb2.ProbeResponse), st.data())
def test_only_the_site_itself_answers_a_probe(message: peer_pb2.ProbeResponse, data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        message.header.CopyFrom(wire.to_proto(replace(HEADER, site_id=data.draw(st.integers(1, 3)))))
    answer = data.draw(st.just(message.SerializeToString()) | damaged(message.SerializeToString()))
    found: list[tuple[int, ...]] = []

    async def main() -> None:
        network: Any = Answering(answer)
        dialer = Dialer(network)
        prober = Prober(
            header=lambda: HEADER, dialer=dialer, limits=lambda: PRESETS["local"], found=found.append, failed=unexpected
        )
        prober.watch((MEMBERS[1],))
        await asyncio.sleep(1.0)
        await prober.close()
        await dialer.close()

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())
    if not found:
        header = peer_pb2.ProbeResponse.FromString(answer).header
        assert (header.run_id, header.site_id, header.incarnation) == (HEADER.run_id, 2, 1)
    else:
        assert found == [(2,)]


# --- a donor's answers


LIAR = m.Donor(site_id=2, incarnation=1, address="127.0.0.1:1", commit=1)


class LyingDonor(DonorClient):
    """Whatever is asked, the answer is `frames`."""

    frames: Sequence[bytes] = ()

    async def _call(self, method: str, request: Message) -> AsyncGenerator[bytes]:
        for frame in self.frames:
            yield frame


@asynccontextmanager
async def lying(frames: Sequence[bytes]) -> AsyncIterator[LyingDonor]:
    client = LyingDonor(
        donor=LIAR,
        ask=dialled(Dialer()),
        header=HEADER,
        counters=Counters(),
        pace=PACE,
    )
    client.frames = frames
    yield client


async def true_answers(disk: Disk, chunks: list[int]) -> dict[str, list[bytes]]:
    async with serving(disk) as hub:
        donor = hub.served_donor()
        header = wire.to_proto(HEADER)
        state = peer_pb2.FetchStateRequest(header=header, chunks=chunks)
        lists = peer_pb2.FetchStateRequest(header=header, hashes_of=[0])
        payloads = peer_pb2.FetchPayloadsRequest(header=header, commit=1, chunks=chunks)
        return {
            "chunks": [f async for f in donor.state(state)],
            "lists": [f async for f in donor.state(lists)],
            "payloads": [f async for f in donor.payloads(payloads)],
        }


@pytest.mark.parametrize("kind", ["chunks", "lists", "payloads"])
@fuzz(60)
@given(data=st.data())
def test_a_donors_answer_is_what_was_asked_for_or_an_error(disk: Disk, kind: str, data: st.DataObject) -> None:
    wanted = [0, 1, 2]
    frames = asyncio.run(true_answers(disk, wanted))[kind]
    cls: Any = peer_pb2.FetchPayloadsResponse if kind == "payloads" else peer_pb2.FetchStateResponse
    match data.draw(st.sampled_from(["damaged", "any", "both"])):
        case "damaged":
            frames = [data.draw(damaged(f)) for f in frames]
        case "any":
            frames = [f.SerializeToString() for f in data.draw(st.lists(protos(cls), max_size=3))]
        case _:
            frames = [*frames, data.draw(protos(cls)).SerializeToString()]

    async def main() -> None:
        async with lying(frames) as client:
            try:
                if kind == "lists":
                    for hashes in (await client.hash_lists([0, 1], NUM_CHUNKS)).values():
                        assert [len(h) for h in hashes] == [32] * NUM_CHUNKS
                elif kind == "chunks":
                    got = [r async for r in client.chunks(wanted, lambda c: record_bytes(LAYOUT, ("momentum",), c))]
                    assert [r.chunk for r in got] == wanted
                    assert all(len(r.data) == record_bytes(LAYOUT, ("momentum",), r.chunk) for r in got)
                else:
                    items = [i async for some in client.payloads(1, wanted, disk.data.max_bytes) for i in some]
                    assert sorted(i.chunk for i in items) == wanted
            except (InvalidMessage, PeerError):
                pass

    asyncio.run(main())


# --- a donor that dials


@st.composite
def donate_openings(draw: st.DrawFn) -> bytes:
    """Any first message; mostly one that is nearly right."""
    message = draw(protos(peer_pb2.DonateRequest))
    if draw(st.integers(0, 3)):
        who = replace(HEADER, site_id=draw(st.sampled_from([2, 2, 3])), incarnation=draw(st.sampled_from([1, 1, 2])))
        header = wire.to_proto(who)
        to = {"to_site_id": draw(st.sampled_from([1, 1, 2])), "to_incarnation": draw(st.sampled_from([1, 1, 2]))}
        message = peer_pb2.DonateRequest(open=peer_pb2.DonateOpen(header=header, **to))
    data: bytes = message.SerializeToString()
    return draw(damaged(data)) if draw(st.booleans()) else data


@fuzz(100)
@given(first=donate_openings(), expects=st.booleans())
def test_only_an_expected_donor_gets_a_stream(disk: Disk, first: bytes, expects: bool) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            hub.site_id = 1
            if expects:
                hub.expected_donors.expect([(2, 1)])
            context: Any = FakeContext([first])
            call = asyncio.ensure_future(PeerService(hub).donate(None, context))
            await until(lambda: call.done() or hub.expected_donors.num_here > 0)
            if hub.expected_donors.num_here:
                opened = peer_pb2.DonateRequest.FromString(first).open
                assert expects
                assert (opened.header.run_id, opened.header.site_id, opened.header.incarnation) == (HEADER.run_id, 2, 1)
                assert (opened.to_site_id, opened.to_incarnation) == (1, 1)
                hub.expected_donors.dismiss()
                await call
            else:
                assert isinstance(call.exception(), Aborted)
            assert hub.expected_donors.num_here == 0

    asyncio.run(main())


@fuzz(60)
@given(data=st.data())
def test_what_a_donor_that_dialled_sends_is_what_was_asked_for_or_an_error(disk: Disk, data: st.DataObject) -> None:
    wanted = [0, 1, 2]
    true = [
        peer_pb2.DonateRequest(frame=frame).SerializeToString()
        for frame in asyncio.run(true_answers(disk, wanted))["chunks"]
    ]
    sent = [*true, peer_pb2.DonateRequest(end=peer_pb2.DonateEnd()).SerializeToString()]
    match data.draw(st.sampled_from(["damaged", "any", "both", "true"])):
        case "damaged":
            sent = [data.draw(damaged(frame)) for frame in sent]
        case "any":
            sent = [f.SerializeToString() for f in data.draw(st.lists(protos(peer_pb2.DonateRequest), max_size=3))]
        case "both":
            sent.insert(
                data.draw(st.integers(0, len(true))), data.draw(protos(peer_pb2.DonateRequest)).SerializeToString()
            )

    async def main() -> None:
        expected = ExpectedDonors()
        expected.expect([(2, 1)])
        context: Any = FakeContext(list(sent))
        opened = peer_pb2.DonateOpen(header=wire.to_proto(replace(HEADER, site_id=2)), to_site_id=1, to_incarnation=1)
        stream = expected.accept(opened, HEADER, context)
        donor = m.Donor(site_id=2, incarnation=1, address="127.0.0.1:1", commit=1)
        client = DonorClient(donor=donor, ask=expected.ask, header=HEADER, counters=Counters(), pace=PACE)
        got = []
        with suppress(InvalidMessage, *REFUSALS, PeerError):
            async for received in client.chunks(wanted, lambda c: record_bytes(LAYOUT, ("momentum",), c)):
                got.append(received)
            assert [r.chunk for r in got] == wanted
        assert [r.chunk for r in got] == wanted[: len(got)]
        assert all(len(r.data) == record_bytes(LAYOUT, ("momentum",), r.chunk) for r in got)
        await stream.over  # it is ended, whatever it brought

    asyncio.run(main())


class FakeCall:
    """To a site that was dialled: takes everything."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def write(self, frame: bytes) -> None:
        self.sent.append(frame)


@fuzz(100)
@given(data=st.data())
def test_a_donor_that_dialled_answers_any_request_and_says_how_it_ended(disk: Disk, data: st.DataObject) -> None:
    message = peer_pb2.DonateResponse()
    match data.draw(st.sampled_from(["state", "payloads", "any"])):
        case "state":
            message.state.CopyFrom(data.draw(requests(peer_pb2.FetchStateRequest)))
        case "payloads":
            message.payloads.CopyFrom(data.draw(requests(peer_pb2.FetchPayloadsRequest)))
        case _:
            message = data.draw(protos(peer_pb2.DonateResponse))
    request = message.SerializeToString()
    if data.draw(st.booleans()):
        request = data.draw(damaged(request))

    async def main() -> None:
        async with serving(disk) as hub:
            call: Any = FakeCall()
            await hub.donations._answer(call, request, "site 2")
            assert all(len(frame) <= transport.MAX_FRAME_BYTES for frame in call.sent)
            *frames, last = [peer_pb2.DonateRequest.FromString(frame).WhichOneof("body") for frame in call.sent]
            assert (set(frames) <= {"frame"}, last) == (True, "end")
            assert hub.donor is not None
            assert not hub.donor.places, "its place is free again"

    asyncio.run(main())


def test_a_chunk_of_state_in_tiny_parts_is_refused() -> None:
    """Each object costs more than the byte it brings."""
    tiny = peer_pb2.FetchStateResponse(
        chunks=[peer_pb2.ChunkState(chunk=0, offset_bytes=i, total_bytes=9000, data=b"x") for i in range(9000)]
    )

    async def main() -> None:
        async with lying([tiny.SerializeToString()]) as client:
            with pytest.raises(InvalidMessage, match="part of 1 bytes"):
                [r async for r in client.chunks([0], lambda _: 9000)]

    asyncio.run(main())
