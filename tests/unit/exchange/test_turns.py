"""Who is woken: a thousand sites that all reduce must not wake each other a million times in a sync."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from atoll.node.exchange.sync.turns import ServedPeer, Turns

NUM_SITES = 1000


def taken(peers: list[ServedPeer]) -> set[int]:
    """Sites that were woken, which go back to waiting."""
    woken = {peer.site_id for peer in peers if peer.changed.is_set()}
    for peer in peers:
        peer.changed.clear()
    return woken


class Bell(asyncio.Event):
    """Counts how often it is rung."""

    num_rung = 0

    def set(self) -> None:
        self.num_rung += 1
        super().set()


def num_wakes(peers: list[ServedPeer]) -> int:
    return sum(peer.changed.num_rung for peer in peers if isinstance(peer.changed, Bell))


@contextmanager
def served(turns: Turns, site_ids: range) -> Iterator[list[ServedPeer]]:
    with ExitStack() as stack:
        peers = [stack.enter_context(turns.served(site_id)) for site_id in site_ids]
        for peer in peers:
            peer.takes_early, peer.changed = False, Bell()
        yield peers


def test_a_sync_of_a_thousand_reducers_wakes_each_stream_a_few_times() -> None:
    turns = Turns(range(2, NUM_SITES + 1))
    with served(turns, range(2, NUM_SITES + 1)) as peers:
        turns.new_payload()  # its own chunk, before anybody's turn
        assert taken(peers) == set()
        for site_id in range(2, NUM_SITES):
            turns.sent(site_id)
            assert peers[site_id - 2].changed.is_set()
        assert taken(peers) == set(range(2, NUM_SITES))
        assert num_wakes(peers) == NUM_SITES - 2
        turns.sent(NUM_SITES)
        assert taken(peers) == set(range(2, NUM_SITES + 1))
        turns.wake_all()
        assert num_wakes(peers) <= 3 * NUM_SITES


def test_a_payload_wakes_whoever_may_have_it() -> None:
    turns = Turns([2, 3, 4])
    with served(turns, range(2, 5)) as peers:
        turns.sent(2)
        taken(peers)
        peers[1].takes_early = True
        turns.new_payload()
        assert taken(peers) == {2, 3}
        turns.all_sent()
        assert taken(peers) == {2, 3, 4}
        turns.new_payload()
        assert taken(peers) == {2, 3, 4}


def test_a_peer_may_have_payloads_once_it_has_this_sites_contributions() -> None:
    turns = Turns([2, 3])
    assert [turns.may_have(site_id) for site_id in (2, 3, 9)] == [False, False, False]
    turns.sent(2)
    assert [turns.may_have(site_id) for site_id in (2, 3, 9)] == [True, False, False]  # a receiver comes last
    turns.sent(3)
    assert [turns.may_have(site_id) for site_id in (2, 3, 9)] == [True, True, True]


def test_a_site_that_sends_nothing_lets_nobody_wait() -> None:
    assert Turns([]).may_have(2)


def test_a_change_before_the_wait_is_not_lost() -> None:
    async def main() -> None:
        turns = Turns([2, 3])
        with turns.served(2) as peer:
            peer.changed.clear()
            turns.sent(2)
            await peer.wait(3600.0)
        peer.changed.clear()
        turns.wake_all()
        assert not peer.changed.is_set(), "a stream that has ended is not woken"

    asyncio.run(main())
