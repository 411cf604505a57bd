"""What a site's owner gives of the uplink, on simulated time."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.exchange.catchup.donor_server import MAX_REQUESTS, MAX_REQUESTS_OF_SITE
from atoll.node.exchange.catchup.donors import REQUESTS_PER_DONOR
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.frames import FRAME_BYTES, MIN_FRAME_BYTES, PartAssembler, parse
from atoll.node.exchange.peers.progress import Pace, Progress
from atoll.node.exchange.peers.uplink import Uplink
from atoll.node.exchange.peers.upload_cap import DEPTH_S, UploadCap
from atoll.node.exchange.sync.attempt import FRAME_RATES
from atoll.node.tasks import end
from atoll.protocol import wire
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.time_limits import PRESETS
from atoll.protocol.v1 import peer_pb2
from tests.harness import data_plane as dp
from tests.harness.peer_streams import HEADER
from tests.simulation.loop import SimLoop

RATE = 1000.0
SIZE = 50


def times_of(num_frames: int, write_s: float) -> list[float]:
    """When frames go that each take so long to write, from 10 s of silence on."""
    cap, now, times = UploadCap(RATE, 0.0), 10.0, []
    for _ in range(num_frames):
        now += cap.delay_s(now)
        cap.send(SIZE, now)
        times.append(now)
        now += write_s
    assert cap.num_bytes == num_frames * SIZE
    return times


@pytest.mark.parametrize("write_s", [0.0, 0.01, SIZE / RATE, DEPTH_S / 2, 1.0])
def test_no_time_has_more_than_its_bytes_and_a_burst_that_is_bounded(write_s: float) -> None:
    times = times_of(200, write_s)
    for first in range(0, 200, 7):
        for last in range(first, 200, 11):
            assert (last - first) * SIZE <= RATE * (times[last] - times[first] + DEPTH_S) + 1e-6


@pytest.mark.parametrize("write_s", [0.0, 0.01, SIZE / RATE * 0.99])
def test_all_that_is_given_is_used_where_frames_are_written_faster(write_s: float) -> None:
    times = times_of(200, write_s)
    assert (times[-1] - times[0]) * RATE <= 200 * SIZE


def test_a_write_that_took_long_now_and_then_is_made_up_for() -> None:
    cap, now = UploadCap(RATE, 0.0), 0.0
    for number in range(200):
        now += cap.delay_s(now)
        cap.send(SIZE, now)
        now += 0.8 * DEPTH_S if number % 20 == 0 else 0.0
    assert now * RATE <= 200 * SIZE + DEPTH_S * RATE


def test_frames_go_in_the_order_of_asking_and_each_is_counted() -> None:
    async def main() -> None:
        uplink, went = Uplink(), []
        await uplink.within_cap(1 << 40)  # there is none
        uplink.cap = UploadCap(1e6, asyncio.get_running_loop().time())

        async def send(number: int) -> None:
            await uplink.within_cap(1000)
            went.append(number)

        await asyncio.gather(*(send(number) for number in range(20)))
        assert went == list(range(20))
        assert uplink.cap.num_bytes == 20_000
        assert uplink.cap.waited_s > 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("frames_per_limit", "share"), [(15 / 16, 1 / 2), (150.0, 1 / 9)], ids=["the least cap of a wan", "a large one"]
)
def test_an_exchange_has_half_of_the_least_cap_and_most_of_a_large_one_beside_donors(
    frames_per_limit: float, share: float
) -> None:
    """And a frame of the exchange waits for one of theirs at most."""
    limit_s = 7.5
    rate = FRAME_BYTES * frames_per_limit / limit_s
    frame_s, write_s = FRAME_BYTES / rate, 0.001

    async def main() -> None:
        uplink, loop, given = Uplink(), asyncio.get_running_loop(), 0
        uplink.cap = UploadCap(rate, loop.time())
        began = loop.time()
        until, sent_at = began + 1000 * frame_s, [began]

        async def catch_up() -> None:
            nonlocal given
            while loop.time() < until:
                async with uplink.give(FRAME_BYTES, limit_s):
                    await asyncio.sleep(write_s)
                given += 1

        async def exchange() -> None:
            with uplink.exchange(), uplink.sending():
                while loop.time() < until:
                    await uplink.within_cap(FRAME_BYTES)
                    await asyncio.sleep(write_s)
                    uplink.sent(FRAME_BYTES)
                    sent_at.append(loop.time())

        await asyncio.gather(exchange(), *(catch_up() for _ in range(MAX_REQUESTS)))
        frames = given + len(sent_at) - 1
        assert uplink.cap.num_bytes == frames * FRAME_BYTES
        assert frames == pytest.approx(1000, rel=0.02), "all of it is used"
        assert given / frames == pytest.approx(share, abs=0.01)
        gaps = [later - earlier for earlier, later in itertools.pairwise(sent_at)]
        assert max(gaps) <= 2 * frame_s + 2 * write_s

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("num_requests", [REQUESTS_PER_DONOR, MAX_REQUESTS])
@pytest.mark.parametrize(
    ("num_streams", "exchange_frame_bytes"),
    [(1, FRAME_BYTES), (6, FRAME_BYTES), (4, 240 << 10), (15, MIN_FRAME_BYTES)],
    ids=["one stream", "six streams", "four sites", "fifteen sites"],
)
def test_each_site_that_catches_up_sees_bytes_in_time_at_the_least_cap_beside_an_exchange(
    preset: str, num_requests: int, num_streams: int, exchange_frame_bytes: int, tmp_path: Path
) -> None:
    limits = PRESETS[preset]
    pace = Pace(stall_s=limits.stall_s, slowest_bytes_per_s=limits.slowest_bytes_per_s)
    spec = TensorSpec(name="weight", shape=(300_000,), dtype="F32", role=Role.TRAINABLE)
    layout = Layout(Manifest.canonical([spec]), 50_000)
    outer = dp.seeded(tmp_path / "state", layout)
    log = PayloadLog(tmp_path / "log", layout, RunSettings(run_id=dp.RUN, sync=SyncSettings(log_commits=4)))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        hub = Hub(run_id=dp.RUN, incarnation=1, dialer=Dialer(), pool=ThreadPoolExecutor(1), site_id=1)
        hub.serve(layout, lambda: outer, log, pace)
        hub.uplink.cap = UploadCap(FRAME_RATES * pace.slowest_bytes_per_s, loop.time())
        num_exchanged = 0

        async def catch_up(number: int) -> int:
            """As a joiner with another donor; the bytes of the records."""
            moved_at = loop.time()
            progress = Progress(pace, moved_at, share=2 * REQUESTS_PER_DONOR)
            asked, num_bytes = PartAssembler(lambda chunk: 1 << 20), 0

            async def write(frame: bytes) -> None:
                nonlocal moved_at, num_bytes
                await asyncio.sleep(0.001)
                assert loop.time() - moved_at < pace.stall_s
                moved_at = loop.time()
                progress.moved(len(frame), moved_at)
                assert progress.problem(moved_at) == ""
                for part in parse(peer_pb2.FetchStateResponse, frame).chunks:
                    if (record := asked.add(part)) is not None:
                        assert record.data == outer.read(record.chunk).data
                        num_bytes += record.num_bytes

            header = wire.to_proto(replace(HEADER, site_id=20 + number // MAX_REQUESTS_OF_SITE))
            request = peer_pb2.FetchStateRequest(header=header, chunks=range(len(layout.chunks)))
            await hub.served_donor().give(request, write, "a site that catches up")
            return num_bytes

        async def send() -> None:
            nonlocal num_exchanged
            with hub.uplink.sending():
                while True:
                    await hub.uplink.within_cap(exchange_frame_bytes)
                    await asyncio.sleep(0.001)
                    hub.uplink.sent(exchange_frame_bytes)
                    num_exchanged += exchange_frame_bytes

        with hub.uplink.exchange():
            streams = [asyncio.create_task(send()) for _ in range(num_streams)]
            given = await asyncio.gather(*map(catch_up, range(num_requests)))
            assert given == [sum(len(outer.read(c.index).data) for c in layout.chunks)] * num_requests
            assert num_exchanged > sum(given), "it has half of the cap"
            await end(streams)
        await hub.close()

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())
