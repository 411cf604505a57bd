"""Which donors a site that catches up asks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from atoll.node.exchange.catchup import donors as donor_pool
from atoll.node.exchange.catchup.donor_client import DonorClient
from atoll.node.exchange.catchup.donors import Donors
from atoll.node.exchange.catchup.expected_donors import ExpectedDonors
from atoll.node.exchange.catchup.index import Index
from atoll.node.exchange.peers.counters import Counters
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.frames import MIN_PART_BYTES
from atoll.node.exchange.peers.progress import Pace
from atoll.protocol import PROTOCOL_VERSION
from atoll.protocol.errors import AtollError, NotYetError, PeerError, StateError
from atoll.protocol.layout import Manifest
from atoll.protocol.messages import MAX_DONORS, MAX_LISTED_DONORS, Donor, Header, Sources
from atoll.protocol.v1 import common_pb2, peer_pb2


class Asked:
    """What the coordinator hears."""

    def __init__(self, offered: Sequence[Donor]) -> None:
        self.offered = tuple(offered)
        self.undialled: list[tuple[int, ...]] = []

    async def refresh(self, undialled: tuple[int, ...]) -> Sources:
        self.undialled.append(undialled)
        return Sources(donors=self.offered)


def donors_of(
    own: int,
    offered: Sequence[Donor],
    *,
    undialable: Callable[[], Collection[int]] = tuple,
    expected: ExpectedDonors | None = None,
    asked: Asked | None = None,
) -> Donors:

    known = Index(Manifest(tensors=()), ())
    known.donors = tuple(offered)
    header = Header(protocol_version=PROTOCOL_VERSION, run_id="run", site_id=own, incarnation=1)
    return Donors(
        index=known,
        header=header,
        dialer=Dialer(),
        counters=Counters(),
        refresh=(asked or Asked(offered)).refresh,
        undialable=undialable,
        expected=expected or ExpectedDonors(),
        pace=Pace(stall_s=5, slowest_bytes_per_s=1),
    )


def donor(site_id: int, commit: int = 7) -> Donor:
    return Donor(site_id=site_id, incarnation=1, address=f"127.0.0.1:{9000 + site_id}", commit=commit)


def test_a_few_of_a_thousand_are_asked_and_sites_that_join_one_after_the_other_ask_different_ones() -> None:
    async def main() -> None:
        asked: list[int] = []
        for own in range(1001, 1021):
            donors = donors_of(own, [donor(i) for i in range(1, 1001)])
            asked += [client.donor.site_id for client in donors.usable()]
            donors.close()
        assert len(asked) == 20 * MAX_DONORS
        assert len(set(asked)) == len(asked)

    asyncio.run(main())


@pytest.mark.parametrize("num_batches", [1, 50])
def test_donors_that_are_busy_are_left_for_others_that_are_idle(num_batches: int) -> None:
    async def main() -> None:
        donors = donors_of(104, [donor(i) for i in range(1, 101)])
        busy = {client.donor.site_id for client in donors.usable()}
        tried: list[int] = []
        free = asyncio.Event()

        async def fetch(client: DonorClient, batch: set[int]) -> None:
            tried.append(client.donor.site_id)
            if client.donor.site_id in busy:
                raise NotYetError("6 requests are served here already")
            await free.wait()
            batch.clear()
            donors.moved()

        chunks = list(range(num_batches * donor_pool.BATCH_BYTES >> 20))
        fetched = asyncio.create_task(donors.share_out(chunks, lambda chunk: 1 << 20, fetch, lambda donor: True))
        for _ in range(100):
            await asyncio.sleep(0)
        others = set(tried) - busy
        assert len(others) == min(num_batches, MAX_DONORS), "without waiting for those that are busy"
        free.set()
        await fetched
        donors.close()

    asyncio.run(main())


def test_the_only_donor_is_asked_again_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_pool, "BUSY_S", 0.001)

    async def main() -> None:
        donors = donors_of(1, [donor(2)])
        num_asked = 0

        async def fetch(client: DonorClient, batch: set[int]) -> None:
            nonlocal num_asked
            num_asked += 1
            if num_asked < 4:
                raise NotYetError("6 requests are served here already")
            batch.clear()

        await donors.share_out([1], lambda chunk: 1, fetch, lambda donor: True)
        assert num_asked == 4
        donors.close()

    asyncio.run(main())


def test_donors_that_stay_busy_are_a_stall() -> None:
    async def main() -> None:
        donors = donors_of(1, [donor(2), donor(3)])
        donors.pace = Pace(stall_s=0.2, slowest_bytes_per_s=1)

        async def fetch(client: DonorClient, batch: set[int]) -> None:
            raise NotYetError("6 requests are served here already")

        with pytest.raises(PeerError, match=r"donors are busy.*6 requests"):
            await donors.share_out([1], lambda chunk: 1, fetch, lambda donor: True)
        donors.close()

    asyncio.run(main())


def test_donors_that_are_busy_are_no_stall_while_another_request_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that comes over a thin link is on its way for longer than a stall."""
    monkeypatch.setattr(donor_pool, "BUSY_S", 0.001)

    async def main() -> None:
        donors = donors_of(1, [donor(2), donor(3)])
        donors.pace = Pace(stall_s=0.05, slowest_bytes_per_s=1)
        is_served, num_refused, was_refused_late = False, 0, asyncio.Event()
        began = asyncio.get_running_loop().time()

        async def fetch(client: DonorClient, batch: set[int]) -> None:
            nonlocal is_served, num_refused
            if not is_served:
                is_served, client.moved_at = True, math.inf  # bytes come all the time
                await was_refused_late.wait()
            elif not was_refused_late.is_set():
                num_refused += 1
                if asyncio.get_running_loop().time() > began + 2 * donors.pace.stall_s:
                    was_refused_late.set()
                raise NotYetError("6 requests are served here already")
            batch.clear()

        await donors.share_out([1, 2], lambda chunk: donor_pool.BATCH_BYTES, fetch, lambda donor: True)
        assert num_refused > 1
        donors.close()

    asyncio.run(main())


def test_a_request_that_brings_nothing_does_not_hold_up_a_fetch_whose_donor_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A donor that says late that it is busy has one in flight all the time."""
    monkeypatch.setattr(donor_pool, "BUSY_S", 0.001)

    async def main() -> None:
        donors = donors_of(1, [donor(2)])
        donors.pace = Pace(stall_s=0.05, slowest_bytes_per_s=1)
        num_asked, is_over = 0, asyncio.Event()

        async def fetch(client: DonorClient, batch: set[int]) -> None:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 1:
                await is_over.wait()
            elif num_asked < 20:
                raise NotYetError("6 requests are served here already")
            is_over.set()
            batch.clear()

        with pytest.raises(PeerError, match="nothing moved"):
            await donors.share_out([1, 2], lambda chunk: donor_pool.BATCH_BYTES, fetch, lambda donor: True)
        donors.close()

    asyncio.run(main())


@pytest.mark.parametrize(("num_frames", "error"), [(0, NotYetError), (1, PeerError)])
def test_a_donor_that_is_busy_amid_its_answer_has_failed(num_frames: int, error: type[AtollError]) -> None:
    """It rests. Else it could begin chunks for ever, and end none."""

    async def main() -> None:
        class Begun:
            def __init__(self) -> None:
                part = peer_pb2.ChunkState(total_bytes=2 * MIN_PART_BYTES, data=b"x" * MIN_PART_BYTES)
                self._frames = [peer_pb2.FetchStateResponse(chunks=[part]).SerializeToString()] * num_frames

            async def read(self) -> object:
                if self._frames:
                    return self._frames.pop()
                raise NotYetError("6 requests are served here already")

            def cancel(self) -> None: ...

        async def ask(of: Donor, method: str, request: bytes) -> Begun:
            return Begun()

        header = Header(protocol_version=PROTOCOL_VERSION, run_id="run", site_id=1, incarnation=1)
        pace = Pace(stall_s=5, slowest_bytes_per_s=1)
        client = DonorClient(donor=donor(2), ask=ask, header=header, counters=Counters(), pace=pace)
        with pytest.raises(error, match="served here already"):
            async for _ in client.chunks([0], lambda chunk: 2 * MIN_PART_BYTES):
                pass

    asyncio.run(main())


def test_a_chunk_counts_as_it_comes_and_not_when_it_is_whole() -> None:
    """The coordinator evicts a site that gets no further for some stalls: a chunk may take longer."""

    async def main() -> None:
        counters, half = Counters(), MIN_PART_BYTES
        seen: list[int] = []

        class Halves:
            async def read(self) -> object:
                seen.append(counters.moved_bytes)
                if len(seen) > 2:
                    return None
                at = half * (len(seen) - 1)
                part = peer_pb2.ChunkState(total_bytes=2 * half, offset_bytes=at, data=b"x" * half)
                return peer_pb2.FetchStateResponse(chunks=[part]).SerializeToString()

            def cancel(self) -> None: ...

        async def ask(of: Donor, method: str, request: bytes) -> Halves:
            return Halves()

        header = Header(protocol_version=PROTOCOL_VERSION, run_id="run", site_id=1, incarnation=1)
        pace = Pace(stall_s=5, slowest_bytes_per_s=1)
        client = DonorClient(donor=donor(2), ask=ask, header=header, counters=counters, pace=pace)
        (record,) = [record async for record in client.chunks([0], lambda chunk: 2 * half)]
        assert record.num_bytes == 2 * half
        assert seen == [0, half, 2 * half]

    asyncio.run(main())


def test_the_newest_are_asked_first() -> None:
    async def main() -> None:
        donors = donors_of(1, [donor(i, commit=i % 30) for i in range(2, 60)])
        assert {client.donor.commit for client in donors.usable()} == {26, 27, 28, 29}
        donors.close()

    asyncio.run(main())


def test_who_failed_gives_way_to_others_after_the_coordinator_was_asked_too() -> None:
    async def main() -> None:
        offered = tuple(donor(i) for i in range(2, 2 + 2 * MAX_DONORS))
        donors = donors_of(1, offered)
        first = donors.usable()
        for client in first:
            donors.failed(client, PeerError("gone"))
        second = {client.donor.site_id for client in donors.usable()}
        assert second == {d.site_id for d in offered} - {client.donor.site_id for client in first}
        donors._resting.clear()  # as once the coordinator has answered
        assert {client.donor.site_id for client in donors.usable()} == second
        donors.close()

    asyncio.run(main())


def dials(expected: ExpectedDonors, site_id: int) -> None:
    """A donor opens a stream to site 1."""
    message = peer_pb2.DonateOpen(
        header=common_pb2.Header(site_id=site_id, incarnation=1), to_site_id=1, to_incarnation=1
    )
    nowhere: Any = None
    expected.accept(message, Header(protocol_version=PROTOCOL_VERSION, run_id="run", site_id=1, incarnation=1), nowhere)


def test_those_that_cannot_be_dialled_are_asked_to_dial_and_are_donors_when_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(donor_pool, "ASK_AGAIN_S", 0.0)

    async def main() -> None:
        offered = [donor(2), donor(3), donor(4)]
        expected, asked = ExpectedDonors(), Asked(offered)
        donors = donors_of(1, offered, undialable=lambda: (2, 4), expected=expected, asked=asked)
        assert [c.donor.site_id for c in donors.usable()] == [3]
        await donors.ask_again("a test")
        assert [set(ids) for ids in asked.undialled] == [{2, 4}]
        dials(expected, 2)
        assert {c.donor.site_id for c in donors.usable()} == {2, 3}
        await donors.ask_again("a test")
        assert asked.undialled[1:] == [(4,)]
        donors.close()
        assert expected.num_here == 0

    asyncio.run(main())


def test_who_never_answered_is_asked_to_dial_and_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_pool, "ASK_AGAIN_S", 0.0)

    async def main() -> None:
        offered = [donor(2), donor(3), donor(4)]
        expected, asked = ExpectedDonors(), Asked(offered)
        donors = donors_of(1, offered, expected=expected, asked=asked)
        silent, broken, wrong = sorted(donors.usable(), key=lambda client: client.donor.site_id)
        broken.has_answered = True
        donors.failed(silent, PeerError("no answer"))
        donors.failed(broken, PeerError("reset"))
        donors.failed(wrong, StateError("not here"))
        assert donors.usable() == []
        await donors.ask_again("a test")
        assert asked.undialled == [(2,)], "the others have answered"
        assert set(donors.usable()) == {silent, broken, wrong}
        dials(expected, 2)
        again = next(c for c in donors.usable() if c.donor.site_id == 2)
        assert again is not silent
        donors.failed(again, PeerError("reset"))
        assert {c.donor.site_id for c in donors.usable()} == {3, 4}
        donors.close()

    asyncio.run(main())


def test_no_more_donors_are_asked_to_dial_than_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_pool, "ASK_AGAIN_S", 0.0)

    async def main() -> None:
        offered = [donor(i) for i in range(2, 40)]
        expected, asked = ExpectedDonors(), Asked(offered)
        donors = donors_of(1, offered, undialable=lambda: range(40), expected=expected, asked=asked)
        for _ in range(3):
            await donors.ask_again("a test")
            dials(expected, asked.undialled[-1][0])
        assert [len(site_ids) for site_ids in asked.undialled] == [MAX_DONORS, MAX_DONORS - 1, MAX_DONORS - 2]
        assert len(donors.usable()) == 3
        donors.close()

    asyncio.run(main())


def test_one_that_dialled_is_asked_before_more_are_dialled_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large run most of those whom the prober does not know may be behind firewalls."""
    monkeypatch.setattr(donor_pool, "ASK_AGAIN_S", 0.0)

    async def main() -> None:
        offered = [donor(i) for i in range(2, 2 + 4 * MAX_DONORS)]
        expected = ExpectedDonors()

        class Coordinator(Asked):
            async def refresh(self, undialled: tuple[int, ...]) -> Sources:
                asyncio.get_running_loop().call_later(0.05, dials, expected, undialled[3])
                return await super().refresh(undialled)

        asked = Coordinator(offered)
        donors = donors_of(1, offered, expected=expected, asked=asked)
        for client in donors.usable():
            donors.failed(client, PeerError("no answer"))
        await donors.ask_again("a test")
        assert expected.num_here == 1, "it was waited for"
        assert asked.undialled[0][3] in {client.donor.site_id for client in donors.usable()}
        donors.close()

    asyncio.run(main())


def test_one_that_dialled_is_asked_though_the_coordinator_tells_of_others_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_pool, "ASK_AGAIN_S", 0.0)

    async def main() -> None:
        first, next_ones = ([donor(i) for i in range(n, n + MAX_LISTED_DONORS)] for n in (100, 200))
        expected, asked = ExpectedDonors(), Asked(next_ones)
        donors = donors_of(1, first, undialable=lambda: range(100, 300), expected=expected, asked=asked)
        expected.expect([(100, 1)])
        dials(expected, 100)
        for _ in range(2):
            assert [client.donor.site_id for client in donors.usable()] == [100]
            await donors.ask_again("a test")
        donors.close()

    asyncio.run(main())
