"""Nothing that grows with the model is gone through in a callback of an event loop: lines of the program are counted in
each, with many small chunks. The guard of loops sees calls by their names; this sees loops, whatever they are called.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import pytest

import atoll
from atoll.coordinator.core.core import Core
from atoll.node.dataplane import publish
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.exchange.catchup import donor_server, donors
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.peers.rpc import FETCH_PAYLOADS_METHOD, FETCH_STATE_METHOD
from atoll.node.exchange.service import PeerService
from atoll.node.exchange.sync import downstream, reducer, retained, upstream
from atoll.protocol import messages as m
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.messages import Member, Plan, Tree
from atoll.protocol.plans import payload_digest, payload_hash, weights
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness import data_plane as dp
from tests.harness.coordinator_story import Story, some_settings

NUM_CHUNKS = 1 << 12
PART = 1 / 4
"""Of the chunks: a line for each of so many is too much. A step for each chunk of one of two reducers is more; the
parts of a frame are less, and so is what is done at once."""
PAYLOAD_BYTES = 4096
PROGRAM = str(Path(atoll.__file__).parent)
RUN = "steps"


class Lines:
    """Lines of the program that one run of `unit` goes through in this thread, at most."""

    def __init__(self, unit: CodeType) -> None:
        self._unit = unit
        self._is_inside = False
        self._lines: Counter[str] = Counter()
        self.worst: Counter[str] = Counter()
        """By function."""

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _end(self) -> None:
        if self._lines.total() > self.worst.total():
            self.worst = self._lines
        self._lines = Counter()

    def _called(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if frame.f_code is self._unit:
            self._is_inside = True
            return self._in_unit
        return self._line if self._is_inside and frame.f_code.co_filename.startswith(PROGRAM) else None

    def _in_unit(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        if event == "return":
            self._is_inside = False
            self._end()
        return self._in_unit

    def _line(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        if event == "line":
            self._lines[frame.f_code.co_qualname] += 1
        return self._line

    def check(self, num_chunks: int) -> None:
        assert 0 < self.worst.total() < PART * num_chunks, self.worst.most_common(5)


# --- an exchange


class Data:
    """Contributions and payloads without arithmetic."""

    is_audited = False
    kept = None
    travels = spec_of(SyncSettings(), 0, 0)

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.chunks = self.all_chunks = layout.sync_chunks

    def is_own(self, chunk: int) -> bool:
        return True

    def max_bytes(self, chunk: int) -> int:
        return PAYLOAD_BYTES

    def contribution(self, chunk: int) -> bytes:
        return chunk.to_bytes(8, "little") * (PAYLOAD_BYTES // 8)

    def proof(self, chunk: int) -> bytes:
        return b""

    def check(self, chunk: int, data: bytes) -> None:
        assert data == self.contribution(chunk)

    def payload_bytes(self, chunk: int, num_contributors: int) -> int:
        return PAYLOAD_BYTES

    def check_payload(self, chunk: int, data: bytes, num_contributors: int, place: int | None) -> None:
        self.check(chunk, data)

    def keeps_left_over(self, chunk: int) -> bool:
        return False

    def reduce(self, chunk: int, contributions: Sequence[tuple[int, bytes | Callable[[], bytes]]]) -> bytes:
        first = contributions[0][1]
        return first if isinstance(first, bytes) else first()

    def stood_out(self) -> tuple[int, float, float] | None:
        return None

    def averaged(self) -> None:
        return None

    def payload_hash(self, data: bytes) -> bytes:
        return payload_hash(data)


class Writer:
    """Payloads of an attempt, in memory."""

    def __init__(self, chunks: Sequence[int]) -> None:
        self._chunks = chunks
        self._held: dict[int, Encoded] = {}

    def missing(self) -> Sequence[int]:
        return [chunk for chunk in self._chunks if chunk not in self._held]

    def read(self, chunk: int) -> bytes:
        return self._held[chunk].data

    def put(self, chunk: int, data: bytes, hash: bytes) -> None:
        self._held[chunk] = Encoded(chunk, data, hash)

    def digest(self, plan: Plan) -> bytes:
        return payload_digest(RUN, plan, [self._held[chunk].hash for chunk in self._chunks])

    def seal(self) -> None:
        assert not self.missing()


class Log:
    def __init__(self, layout: Layout) -> None:
        self._chunks = layout.sync_chunks
        self._writers: dict[tuple[int, int, int], Writer] = {}

    def begin(self, sync: int, term: int, attempt: int, fragment: int, *, is_over: Callable[[], bool]) -> Writer:
        assert not is_over()
        return self._writers.setdefault((sync, term, attempt), Writer(self._chunks))


class Call:
    """A stream between two nodes of one loop: the caller's end, and the context of the other one."""

    def __init__(self, service: PeerService) -> None:
        self._up: asyncio.Queue[bytes] = asyncio.Queue()
        self._down: asyncio.Queue[bytes] = asyncio.Queue()
        self._serving = asyncio.create_task(service.exchange(None, Context(self._up, self._down)))  # type: ignore[arg-type]
        self._serving.add_done_callback(lambda _: self._down.put_nowait(b""))

    async def write(self, frame: bytes) -> None:
        await asyncio.sleep(0)
        self._up.put_nowait(frame)

    async def read(self) -> bytes | None:
        await asyncio.sleep(0)
        return await self._down.get() or None

    async def done_writing(self) -> None:
        self._up.put_nowait(b"")

    def cancel(self) -> None:
        self._serving.cancel()


class Context:
    def __init__(self, up: asyncio.Queue[bytes], down: asyncio.Queue[bytes]) -> None:
        self._up, self._down = up, down

    async def read(self) -> bytes | None:
        await asyncio.sleep(0)
        return await self._up.get() or None

    async def write(self, frame: bytes) -> None:
        await asyncio.sleep(0)
        self._down.put_nowait(frame)

    def peer(self) -> str:
        return "a test"


class Answer:
    """Of a donor, to one request."""

    def __init__(self, serve: Callable[[bytes, Any], Coroutine[Any, Any, None]], request: bytes) -> None:
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._serving = asyncio.create_task(serve(request, Context(asyncio.Queue(), self._frames)))
        self._serving.add_done_callback(lambda _: self._frames.put_nowait(b""))

    async def read(self) -> bytes | None:
        await asyncio.sleep(0)
        return await self._frames.get() or None

    def cancel(self) -> None:
        self._serving.cancel()


class Channel:
    def __init__(self, service: PeerService) -> None:
        self._service = service

    def unary_stream(self, method: str, **_: object) -> Callable[[bytes], Answer]:
        served = {FETCH_STATE_METHOD: self._service.fetch_state, FETCH_PAYLOADS_METHOD: self._service.fetch_payloads}
        return partial(Answer, served[method])

    def stream_stream(self, method: str, **_: object) -> Callable[..., Call]:
        return lambda **_: Call(self._service)

    async def close(self) -> None:
        pass


class Peers(Dialer):
    def __init__(self) -> None:
        super().__init__()
        self.services: dict[int, PeerService] = {}

    async def channel(self, callee: Any, purpose: Any, number: int = 0) -> Any:
        return Channel(self.services[callee.site_id])


class Node:
    def __init__(self, site_id: int, layout: Layout, peers: Peers) -> None:
        self.data: Any = Data(layout)
        self.hub = Hub(run_id=RUN, incarnation=1, dialer=peers, pool=ThreadPoolExecutor(2), site_id=site_id)
        self.hub.max_retained_bytes = 1 << 30
        self.hub.serve(layout, lambda: None, Log(layout), Pace(stall_s=60.0, slowest_bytes_per_s=1.0))  # type: ignore[arg-type]
        peers.services[site_id] = PeerService(self.hub)

    async def exchange(self, plan: Plan) -> bytes:
        share = await asyncio.to_thread(self.hub.share(plan, self.data))
        told = weights(plan)
        begun = self.hub.begin(plan, self.data, share, tokens=told[0], weights=told)
        return (await begun.run()).payload_digest


def member(site_id: int) -> Member:
    return Member(site_id=site_id, incarnation=1, address=f"site-{site_id}:1", tokens=1)


def plan(attempt: int, *of_reducers: int, num_sites: int = 2) -> Plan:
    """`of_reducers`: how many chunks each reduces, in the order of sites."""
    trees, first = [], 0
    for top, count in enumerate(of_reducers):
        trees.append(Tree(first_chunk=first, num_chunks=count, top=top))
        first += count
    return Plan(
        sync=1,
        attempt=attempt,
        term=1,
        base_commit=0,
        contributors=tuple(member(i + 1) for i in range(num_sites)),
        trees=tuple(tree for tree in trees if tree.num_chunks),
        stall_limit_s=60.0,
        num_steps=10,
        deadline_s=600.0,
        slowest_bytes_per_s=1,
    )


def test_no_callback_of_an_exchange_goes_through_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "AT_ONCE", 32)  # as few for so few chunks as there are for a million
    monkeypatch.setattr(reducer, "AT_ONCE", 32)
    monkeypatch.setattr(downstream, "AT_ONCE", 32)
    monkeypatch.setattr(upstream, "MAX_BATCH_CHUNKS", 16)
    spec = TensorSpec(name="w", shape=(NUM_CHUNKS,), dtype="F32", role=Role.TRAINABLE)
    layout = Layout(Manifest.canonical([spec]), 1)
    half = NUM_CHUNKS // 2

    async def main() -> None:
        peers = Peers()
        nodes = [Node(1, layout, peers), Node(2, layout, peers)]
        try:
            for told in (
                plan(1, half, half),
                plan(1, half, half),  # begun again: all payloads are here
                plan(2, half, half),  # all contributions are held
                plan(3, 0, NUM_CHUNKS),  # half of them
            ):
                assert len(set(await asyncio.gather(*(node.exchange(told) for node in nodes)))) == 1
            first = nodes[0].hub
            assert first.retained_bytes == half * PAYLOAD_BYTES, "nothing was in the way"
            first.max_retained_bytes = half
            await asyncio.gather(*(node.exchange(plan(4, 0, NUM_CHUNKS)) for node in nodes))
            assert first.retained_bytes == 0, "contributions that nobody asks for were in the way"
            first.max_retained_bytes = 1 << 30
            await nodes[0].exchange(plan(5, NUM_CHUNKS, num_sites=1))
            for node in nodes:
                node.hub.drop_sync(1)
        finally:
            for node in nodes:
                await node.hub.close()

    with Lines(asyncio.events.Handle._run.__code__) as lines:
        asyncio.run(main())
    lines.check(NUM_CHUNKS)


# --- catching up


@pytest.mark.parametrize("starts_from", ["nothing", "the commit before", "a state that is not the run's"])
def test_no_callback_of_a_site_that_catches_up_goes_through_all_chunks(
    starts_from: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_chunks = NUM_CHUNKS // 2
    monkeypatch.setattr(donor_server, "FRAME_BYTES", 1 << 12)  # as few chunks in a frame as there are of a large model
    monkeypatch.setattr(donors, "MAX_BATCH_CHUNKS", 8)
    spec = TensorSpec(name="weight.scale", shape=(num_chunks,), dtype="F32", role=Role.TRAINABLE)
    layout = Layout(Manifest.canonical([spec]), 1)
    pace = Pace(stall_s=60.0, slowest_bytes_per_s=1.0)
    there = dp.seeded(tmp_path / "there", layout)
    here = OuterState.create(tmp_path / "here", layout, there.slots, dp.RUN)
    log_there, log_here = (
        PayloadLog(tmp_path / name, layout, RunSettings(run_id=dp.RUN, sync=SyncSettings(log_commits=4)))
        for name in ("log-there", "log-here")
    )
    payloads = dp.payloads(there, codec="fp32")
    seed = {"the commit before": 0, "a state that is not the run's": 5}.get(starts_from)
    if seed is not None:
        publish.seed_from_snapshot(here, dp.filled(layout, seed))
    attested = [m.Attestation(commit=0, state_hash=there.state_hash())]
    record = dp.logged(log_there, there, 1, payloads)
    dp.apply_all(there, payloads, 1)
    attested.append(m.Attestation(commit=1, state_hash=there.state_hash()))

    async def main() -> None:
        peers = Peers()
        hubs = [Hub(run_id=dp.RUN, incarnation=1, dialer=peers, pool=ThreadPoolExecutor(2), site_id=i) for i in (1, 2)]
        hubs[0].serve(layout, lambda: there, log_there, pace)
        peers.services[1] = PeerService(hubs[0])
        of_one = m.Donor(site_id=1, incarnation=1, address="site-1:1", commit=1)
        sources = m.Sources(attested=tuple(attested), donors=(of_one,), commits=(record,))

        async def again(_: tuple[int, ...]) -> m.Sources:
            return sources

        try:
            fetched = await hubs[1].fetch_state(
                sources=sources,
                refresh=again,
                undialable=tuple,
                outer=here,
                log=log_here,
                optimizer=dp.OPTIMIZER,
                pace=pace,
            )
            assert (fetched.commit, fetched.state_hash) == (1, attested[1].state_hash)
        finally:
            for hub in hubs:
                await hub.close()

    with Lines(asyncio.events.Handle._run.__code__) as lines:
        asyncio.run(main())
    lines.check(num_chunks)
    for disk in (log_there, log_here):
        disk.close()


# --- a dispute


def test_no_event_of_a_dispute_goes_through_all_chunks() -> None:
    num_chunks = 2 * NUM_CHUNKS
    spec = TensorSpec(name="w", shape=(num_chunks,), dtype="F32", role=Role.TRAINABLE)
    settings = some_settings(min_sites=2)
    settings = replace(settings, sync=replace(settings.sync, chunk_elements=1))
    story = Story(settings, real=True, manifest=Manifest.canonical([spec]))
    assert story.model is not None
    story.model.damaged = num_chunks - 2
    story.start(*"ab")
    for name in "ab":
        story.ready(name)
    for name in "ab":
        story.done(name, "s0")
    story.applied("a", 1, "s1")
    with Lines(Core.handle.__code__) as lines:
        story.applied("b", 1, "wrong")
    assert story.num("b", m.Evicted) == 1
    assert f"chunk {num_chunks - 2} of commit 1" in story.last("b", m.Evicted).reason
    lines.check(num_chunks)
