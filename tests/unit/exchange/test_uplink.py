"""Those that catch up get a small share of a site's link while an exchange has use for it, and never nothing."""

from __future__ import annotations

import asyncio

import pytest

from atoll.node.exchange.catchup.donor_server import MAX_REQUESTS, TURNS_PER_STALL
from atoll.node.exchange.peers.frames import FRAME_BYTES
from atoll.node.exchange.peers.progress import Pace, Progress
from atoll.node.exchange.peers.uplink import EXCHANGE_BYTES_PER_DONOR_BYTE, MAX_CREDIT_BYTES, Uplink
from atoll.protocol.time_limits import PRESETS

LONG_S = 1000.0
SIZE = 1000


class Joiner:
    """A frame that is written until `finish`."""

    def __init__(self, uplink: Uplink, limit_s: float = LONG_S) -> None:
        self.begun = asyncio.Event()
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._write(uplink, limit_s))

    async def _write(self, uplink: Uplink, limit_s: float) -> None:
        async with uplink.give(SIZE, limit_s):
            self.begun.set()
            await self._end.wait()

    async def finish(self) -> None:
        self._end.set()
        await self.task


async def begun(joiners: list[Joiner]) -> list[bool]:
    """Once everything that can run has run."""
    for _ in range(10):
        await asyncio.sleep(0)
    return [joiner.begun.is_set() for joiner in joiners]


def test_without_an_exchange_all_frames_go_at_once() -> None:
    async def main() -> None:
        uplink = Uplink()
        joiners = [Joiner(uplink) for _ in range(MAX_REQUESTS)]
        assert await begun(joiners) == [True] * MAX_REQUESTS
        for joiner in joiners:
            await joiner.finish()
        assert (uplink.num_given, len(uplink.waiting)) == (0, 0)

    asyncio.run(main())


def test_beside_an_exchange_one_frame_goes_at_a_time_in_the_order_of_asking() -> None:
    async def main() -> None:
        uplink = Uplink()
        with uplink.exchange():
            joiners = [Joiner(uplink) for _ in range(3)]
            assert await begun(joiners) == [True, False, False]
            await joiners[0].finish()
            late = Joiner(uplink)
            assert await begun([*joiners, late]) == [True, True, False, False]
            await joiners[1].finish()
            assert await begun([*joiners, late]) == [True, True, True, False]
        assert await begun([*joiners, late]) == [True] * 4, "the exchange is over"
        for joiner in (joiners[2], late):
            await joiner.finish()

    asyncio.run(main())


def test_an_exchange_that_sends_sends_several_times_as_much() -> None:
    async def main() -> None:
        uplink = Uplink()
        with uplink.exchange():
            with uplink.sending():
                first, second = joiners = [Joiner(uplink) for _ in range(2)]
                await begun(joiners)
                await first.finish()
                for _ in range(EXCHANGE_BYTES_PER_DONOR_BYTE - 1):
                    uplink.sent(SIZE)
                    assert await begun(joiners) == [True, False]
                uplink.sent(SIZE)
                assert await begun(joiners) == [True, True]
                third = Joiner(uplink)
                await second.finish()
                assert await begun([third]) == [False]
            assert await begun([third]) == [True], "it waits for others now, and the link is idle"
            await third.finish()

    asyncio.run(main())


def test_what_was_not_used_makes_no_long_burst() -> None:
    async def main() -> None:
        uplink = Uplink()
        with uplink.exchange(), uplink.sending():
            uplink.sent(1 << 40)
            num_frames = 0
            while (joiner := Joiner(uplink)) and (await begun([joiner])) == [True]:
                await joiner.finish()
                num_frames += 1
            assert num_frames == MAX_CREDIT_BYTES // SIZE + 1
            joiner.task.cancel()

    asyncio.run(main())


def test_no_frame_waits_for_longer_than_its_limit() -> None:
    """The exchange hangs on a peer that does not read; another frame never ends."""

    async def main() -> None:
        uplink = Uplink()
        with uplink.exchange(), uplink.sending():
            stuck = Joiner(uplink)
            await begun([stuck])
            for _ in range(3):
                joiner = Joiner(uplink, limit_s=0.001)
                await joiner.begun.wait()
                await joiner.finish()
            assert (uplink.num_given, len(uplink.waiting)) == (1, 0)
            await stuck.finish()

    asyncio.run(main())


def test_a_slow_receiver_does_not_keep_the_others_waiting() -> None:
    async def main() -> None:
        uplink = Uplink()
        with uplink.exchange():
            slow = Joiner(uplink, limit_s=0.01)
            await slow.begun.wait()
            others = [Joiner(uplink) for _ in range(2)]
            await others[0].begun.wait()
            assert not slow.task.done()
            assert await begun(others) == [True, False], "one at a time, beside the slow one"
            for joiner in (slow, *others):
                await joiner.finish()
            assert (uplink.num_given, len(uplink.waiting)) == (0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("granted", [False, True])
def test_a_request_that_ends_gives_its_turn_to_the_next(granted: bool) -> None:
    async def main() -> None:
        uplink = Uplink()
        with uplink.exchange():
            with uplink.sending():
                first, second, third = joiners = [Joiner(uplink) for _ in range(3)]
                await begun(joiners)
                await first.finish()
                if granted:
                    uplink.sent(EXCHANGE_BYTES_PER_DONOR_BYTE * SIZE)  # and it has not run since
                    assert (uplink.num_given, len(uplink.waiting)) == (1, 1)
                second.task.cancel()
                await begun(joiners)
                assert (uplink.num_given, len(uplink.waiting)) == (0, 1)
            assert await begun(joiners) == [True, False, True]
            await third.finish()
            assert (uplink.num_given, len(uplink.waiting)) == (0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("preset", PRESETS)
def test_whoever_gets_no_more_than_that_does_not_take_it_for_a_trickle(preset: str) -> None:
    """Frames of half the size that they can have, one for each limit: of many donors, and of one whose six requests it
    shares with others."""
    limits = PRESETS[preset]
    pace = Pace(stall_s=limits.stall_s, slowest_bytes_per_s=limits.slowest_bytes_per_s)
    progress = Progress(pace, 0.0, share=2)
    now = 0.0
    for _ in range(100):
        now += limits.stall_s / TURNS_PER_STALL
        assert progress.problem(now) == ""
        progress.moved(FRAME_BYTES // 2, now)
        assert progress.problem(now) == ""
