"""At which pace a site sends, on simulated time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from atoll.node.exchange.peers.frames import FRAME_BYTES as MOST_FRAME_BYTES
from atoll.node.exchange.sync.attempt import MIN_PACED_FRAME_BYTES
from atoll.node.exchange.sync.pacing import MAX_SPARE_MS, Pacing
from atoll.node.exchange.sync.reduction import MAX_STREAMS
from atoll.protocol.errors import RefusedError
from atoll.protocol.messages import Member
from atoll.protocol.plans import plan_digest
from atoll.protocol.v1 import peer_pb2
from tests.harness.peer_streams import MEMBERS, Disk, begin, opening, plan, serving

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
    assert sending.pacing.spare_ms(sending.now) == 0


def test_no_site_sends_more_slowly_than_peers_ask_of_a_link() -> None:
    sending = Sending(spread_s=1000.0, least=FRAME_BYTES * 20.0)
    sending.send(NUM_FRAMES)
    assert sending.gaps_s == pytest.approx([1 / 20] * (NUM_FRAMES - 1))


def test_a_peer_that_waits_ends_the_spreading_at_once() -> None:
    sending = Sending()
    sending.send(50)
    sending.pacing.hurry(0, sending.now)
    sending.send(50)
    assert set(sending.gaps_s[49:]) == {0.0}


def test_a_peer_with_less_time_has_it_end_in_its_time_and_one_with_more_changes_nothing() -> None:
    sending = Sending()
    sending.send(50)
    sending.pacing.hurry(1000, sending.now)
    sending.pacing.hurry(100_000, sending.now)
    at_s = sending.times[-1]
    assert sending.pacing.spare_ms(sending.now) == 1000
    sending.send(50)
    assert sending.times[-1] == pytest.approx(at_s + 1.0, rel=0.02)


def test_more_time_than_a_message_can_say_is_said_as_the_most() -> None:
    assert Sending(spread_s=1e300).pacing.spare_ms(50.0) == MAX_SPARE_MS


# --- in an attempt


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Disk:
    return Disk(Path(tmp_path_factory.mktemp("pacing")))


def test_frames_that_wait_go_as_soon_as_a_contributor_waits_and_in_their_order(disk: Disk) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            attempt = begin(hub, plan(), disk.data, spread_s=1e6).attempt
            frame = peer_pb2.ExchangeRequest(follows=True).SerializeToString()
            assert await attempt.turn(frame) == frame
            attempt.pacing.sent(1 << 30, attempt.loop.time())
            went: list[int] = []

            async def go(number: int) -> None:
                sent = peer_pb2.ExchangeRequest.FromString(await attempt.turn(frame))
                assert not sent.follows, "its time would be taken for the link's"
                went.append(number)

            waiting = [asyncio.create_task(go(number)) for number in range(3)]
            await asyncio.sleep(0)
            found, _ = await hub.find(opening(spare_ms=5000))
            assert found.attempt is attempt
            assert 4000 < attempt.spare_ms <= 5000
            assert not went
            await hub.find(opening(spare_ms=0))
            await asyncio.gather(*waiting)
            assert went == [0, 1, 2]

    asyncio.run(main())


def test_frames_that_are_paced_are_small(disk: Disk) -> None:
    async def main() -> None:
        async with serving(disk) as hub:
            fast = plan(slowest_bytes_per_s=1 << 30)
            assert begin(hub, fast, disk.data).attempt.frame_bytes == MOST_FRAME_BYTES
            paced = begin(hub, replace(fast, sync=2), disk.data, spread_s=9.0).attempt
            assert paced.frame_bytes == MIN_PACED_FRAME_BYTES

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
            assert attempt.spare_ms > 900_000
            with pytest.raises(RefusedError):
                await hub.find(opening(plan_digest=plan_digest(replace(with_receiver, sync=2))))
            assert attempt.spare_ms > 900_000

    asyncio.run(main())


def test_what_a_reducer_says_of_others_that_wait_is_heard_and_passed_on(disk: Disk) -> None:
    """A site that reduces nothing hears no openings."""

    async def main() -> None:
        of_two = replace(plan().trees[0], num_chunks=1), replace(plan().trees[0], first_chunk=1, parents=(1, -1))
        rest = replace(of_two[1], num_chunks=plan().trees[0].num_chunks - 1)
        async with serving(disk) as hub:
            exchange = begin(hub, plan(trees=(of_two[0], rest)), disk.data, spread_s=1000.0)
            attempt = exchange.attempt
            (upstream,) = exchange.upstreams
            upstream._peer_waits(peer_pb2.Waiting(site_ids=[2], spare_ms=5000))
            said = exchange.reducer.waiting(MEMBERS[1].site_id)
            assert said is not None
            assert 4000 < said.spare_ms <= 5000
            upstream._peer_waits(peer_pb2.Waiting(site_ids=[2]))
            assert attempt.spare_ms == 0

    asyncio.run(main())


@pytest.mark.parametrize("slowest_bytes_per_s", [1, 1 << 20])
@pytest.mark.parametrize("num_receivers", [0, 20])
def test_in_half_a_stall_each_stream_has_a_frame_and_peers_what_they_ask_for(
    disk: Disk, slowest_bytes_per_s: int, num_receivers: int
) -> None:
    async def main() -> None:
        receivers = tuple(
            Member(site_id=10 + i, incarnation=1, address=f"127.0.0.1:{10 + i}") for i in range(num_receivers)
        )
        asked = plan(slowest_bytes_per_s=slowest_bytes_per_s, receivers=receivers)
        async with serving(disk) as hub:
            attempt = begin(hub, asked, disk.data, spread_s=1e6).attempt
            now = attempt.loop.time()
            sent_bytes = 0
            while (now := now + attempt.pacing.delay_s(now)) <= attempt.loop.time() + asked.stall_limit_s / 2:
                attempt.pacing.sent(attempt.frame_bytes, now)
                sent_bytes += attempt.frame_bytes
            assert sent_bytes >= 2 * MAX_STREAMS * attempt.frame_bytes
            num_others = len(asked.contributors) - 1
            of_each = 4 * slowest_bytes_per_s / num_others * asked.stall_limit_s / 2
            assert sent_bytes >= (num_others + num_receivers) * of_each

    asyncio.run(main())
