"""At which pace a site sends, on simulated time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from atoll.node.exchange.sync.pacing import FRAME_S, Pacing
from atoll.protocol.errors import RefusedError
from atoll.protocol.messages import Member
from atoll.protocol.plans import plan_digest
from tests.harness.peer_streams import Disk, begin, opening, plan, serving

SPREAD_S = 10.0
FRAME_BYTES = 1000
NUM_FRAMES = 100


class Sending:
    """Of a hundred frames by a site that has ten seconds; each is sent when it may be."""

    def __init__(
        self, num_bytes: int = NUM_FRAMES * FRAME_BYTES, spread_s: float = SPREAD_S, least: float = 1.0
    ) -> None:
        self.now = 50.0
        self.began_s = self.now
        self.pacing = Pacing(num_bytes=num_bytes, spread_s=spread_s, least_bytes_per_s=least, now=self.now)
        self.times: list[float] = []

    def send(self, num_frames: int) -> None:
        for _ in range(num_frames):
            while (delay_s := self.pacing.delay_s(self.now)) > 0:
                self.now += delay_s
            self.pacing.sent(FRAME_BYTES, self.now)
            self.times.append(self.now - self.began_s)

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


def test_frames_are_spread_evenly_over_the_time() -> None:
    sending = Sending()
    sending.send(NUM_FRAMES)
    assert sending.times[0] == 0
    assert sending.times[-1] == pytest.approx(SPREAD_S, rel=0.02)
    assert sending.gaps_s == pytest.approx([SPREAD_S / NUM_FRAMES] * (NUM_FRAMES - 1))


def test_what_was_held_up_is_made_up_for_without_a_burst() -> None:
    sending = Sending()
    sending.send(50)
    sending.now += 2.5  # half of what is left
    sending.send(50)
    assert sending.times[-1] == pytest.approx(SPREAD_S, rel=0.02)
    assert sending.gaps_s[50:] == pytest.approx([SPREAD_S / NUM_FRAMES / 2] * 49, rel=0.05)


def test_more_than_there_was_to_send_is_sent_as_the_time_is_over() -> None:
    sending = Sending(num_bytes=50 * FRAME_BYTES)
    sending.send(NUM_FRAMES)
    assert sending.times[-1] == pytest.approx(SPREAD_S)


def test_without_time_nothing_waits() -> None:
    sending = Sending(spread_s=0.0)
    sending.send(NUM_FRAMES)
    assert set(sending.times) == {0.0}
    assert sending.pacing.spare_s(sending.now) == 0


def test_no_site_sends_more_slowly_than_peers_ask_of_a_link() -> None:
    sending = Sending(spread_s=1000.0, least=FRAME_BYTES * 20.0)
    sending.send(NUM_FRAMES)
    assert sending.gaps_s == pytest.approx([1 / 20] * (NUM_FRAMES - 1))


def test_a_peer_that_waits_ends_the_spreading_at_once() -> None:
    sending = Sending()
    sending.send(50)
    sending.pacing.hurry(0.0, sending.now)
    sending.send(50)
    assert set(sending.gaps_s[49:]) == {0.0}


def test_a_peer_with_less_time_has_it_end_in_its_time_and_one_with_more_changes_nothing() -> None:
    sending = Sending()
    sending.send(50)
    sending.pacing.hurry(1.0, sending.now)
    sending.pacing.hurry(100.0, sending.now)
    at_s = sending.times[-1]
    assert sending.pacing.spare_s(sending.now) == pytest.approx(1.0)
    sending.send(50)
    assert sending.times[-1] == pytest.approx(at_s + 1.0, rel=0.02)


def test_a_frame_is_what_is_sent_in_a_moment() -> None:
    sending = Sending()
    assert sending.pacing.frame_bytes(sending.now) == pytest.approx(NUM_FRAMES * FRAME_BYTES / SPREAD_S * FRAME_S)
    assert sending.pacing.frame_bytes(sending.now + SPREAD_S) == float("inf")


# --- in an attempt


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Disk:
    return Disk(Path(tmp_path_factory.mktemp("pacing")))


def test_frames_that_wait_go_as_soon_as_a_contributor_waits_and_in_their_order(disk: Disk) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            attempt = begin(hub, plan(), disk.data, spread_s=1e6).attempt
            await attempt.turn(1 << 30)
            went: list[int] = []

            async def go(number: int) -> None:
                await attempt.turn(1 << 30)
                went.append(number)

            waiting = [asyncio.create_task(go(number)) for number in range(3)]
            await asyncio.sleep(0)
            found, _ = await hub.find(opening(spare_ms=5000))
            assert found.attempt is attempt
            assert 4 < attempt.pacing.spare_s(attempt.loop.time()) <= 5
            assert not went
            await hub.find(opening(spare_ms=0))
            await asyncio.gather(*waiting)
            assert went == [0, 1, 2]

    asyncio.run(main())


def test_a_receiver_hurries_nobody(disk: Disk) -> None:
    async def main() -> None:
        receiver = Member(site_id=3, incarnation=1, address="127.0.0.1:3")
        with_receiver = plan(receivers=(receiver,))
        async with serving(disk) as hub:
            attempt = begin(hub, with_receiver, disk.data, spread_s=1000.0).attempt
            asked = opening(plan_digest=plan_digest(with_receiver), tokens=0)
            asked.header.site_id = 3
            await hub.find(asked)
            assert attempt.pacing.spare_s(attempt.loop.time()) > 900
            with pytest.raises(RefusedError):
                await hub.find(opening(plan_digest=plan_digest(replace(with_receiver, sync=2))))
            assert attempt.pacing.spare_s(attempt.loop.time()) > 900

    asyncio.run(main())


def test_frames_are_smaller_where_they_are_spread(disk: Disk) -> None:
    async def main() -> None:
        fast = plan(slowest_bytes_per_s=1 << 30)
        async with serving(disk) as hub:
            at_once = begin(hub, fast, disk.data).attempt.frame_bytes
        async with serving(disk) as hub:
            assert (
                begin(hub, replace(fast, slowest_bytes_per_s=1000), disk.data, spread_s=10).attempt.frame_bytes
                < at_once
            )

    asyncio.run(main())
