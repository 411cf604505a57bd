"""A place at a donor is for those who take what they ask for: on simulated time, with a real state."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.node.exchange.catchup import donor_server as donor_module
from atoll.node.exchange.catchup.donor_server import MAX_REQUESTS, DonorServer
from atoll.node.exchange.peers import frames
from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.peers.rpc import NotRead
from atoll.protocol import wire
from atoll.protocol.errors import NotYetError
from atoll.protocol.v1 import peer_pb2
from tests.harness.peer_streams import HEADER, LAYOUT, Disk, serving
from tests.simulation.loop import SimLoop

FRAME_BYTES = 256
PACE = Pace(stall_s=5.0, slowest_bytes_per_s=6 << 10)
"""Of each of six readers: 512 bytes a second, over a window of 10 s."""


async def read(donor: DonorServer, site_id: int, frame_s: float) -> int:
    """Takes each frame after `frame_s`, to the end; how many there were."""
    header = wire.to_proto(replace(HEADER, site_id=site_id))
    num_frames = 0

    async def write(frame: bytes) -> None:
        nonlocal num_frames
        await asyncio.sleep(frame_s)
        num_frames += 1

    request = peer_pb2.FetchStateRequest(header=header, chunks=range(len(LAYOUT.chunks)))
    await donor.give(request, write, f"site {site_id}")
    return num_frames


def test_readers_below_the_slowest_rate_that_never_stop_are_cut_off_and_their_places_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donor_module, "FRAME_BYTES", FRAME_BYTES)
    monkeypatch.setattr(frames, "MIN_PART_BYTES", 1)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        disk = Disk(tmp_path)
        async with serving(disk) as hub:
            hub.serve(LAYOUT, lambda: disk.outer, disk.log, PACE)
            donor = hub.served_donor()
            fast_s, slow_s = 0.3, 0.9 * PACE.stall_s
            num_frames = await read(donor, 20, fast_s)
            assert num_frames * fast_s > PACE.window_s, "as fast as it has to be, and longer than a window"
            began = loop.time()
            slow = [asyncio.create_task(read(donor, site_id, slow_s)) for site_id in range(20, 20 + MAX_REQUESTS)]
            await asyncio.sleep(slow_s)
            with pytest.raises(NotYetError):
                await read(donor, 7, fast_s)
            for problem in await asyncio.gather(*slow, return_exceptions=True):
                assert isinstance(problem, NotRead), problem
                assert "is too slow in taking what it asked for: only" in str(problem)
            assert PACE.window_s <= loop.time() - began < PACE.window_s + PACE.stall_s
            assert not donor.places
            assert await read(donor, 7, fast_s) == num_frames

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())


def test_the_reader_that_has_had_its_place_for_longest_gives_way_after_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly readers may read here, a site that comes is served after a turn; the others read on."""
    monkeypatch.setattr(donor_module, "FRAME_BYTES", FRAME_BYTES)
    monkeypatch.setattr(frames, "MIN_PART_BYTES", 1)
    pace = Pace(stall_s=5.0, slowest_bytes_per_s=0.0)
    slow_s, turn_s = 0.8 * pace.stall_s, donor_module.TURN_STALLS * pace.stall_s

    async def main() -> None:
        disk = Disk(tmp_path)
        async with serving(disk) as hub:
            hub.serve(LAYOUT, lambda: disk.outer, disk.log, pace)
            donor = hub.served_donor()
            slow = [asyncio.create_task(read(donor, site_id, slow_s)) for site_id in range(20, 20 + MAX_REQUESTS)]
            await asyncio.sleep(turn_s - slow_s)
            with pytest.raises(NotYetError):
                await read(donor, 7, 0.1)
            await asyncio.sleep(2 * slow_s)
            num_frames = await read(donor, 7, 0.1)
            first, *others = await asyncio.gather(*slow, return_exceptions=True)
            assert isinstance(first, NotRead), first
            assert "has had its turn" in str(first)
            assert others == [num_frames] * (MAX_REQUESTS - 1)

    with asyncio.Runner(loop_factory=lambda: SimLoop(0)) as runner:
        runner.run(main())
