"""What a site's owner gives of the uplink, on simulated time."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from atoll.node.exchange.catchup.donor_server import MAX_REQUESTS
from atoll.node.exchange.peers.frames import FRAME_BYTES
from atoll.node.exchange.peers.uplink import Uplink
from atoll.node.exchange.peers.upload_cap import DEPTH_S, UploadCap
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
