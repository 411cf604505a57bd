"""Who is woken: a thousand sites that all reduce must not wake each other a million times in a sync."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from atoll.node.exchange.sync.turns import ServedPeer, Turns
from atoll.protocol.messages import Member

NUM_SITES = 1000


def site(site_id: int, address: str = "10.0.0.1:1") -> Member:
    """At one of its places."""
    return Member(site_id=site_id, incarnation=1, address=address)


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
    turns = Turns(map(site, range(2, NUM_SITES + 1)))
    with served(turns, range(2, NUM_SITES + 1)) as peers:
        turns.new_payload()  # its own chunk, before anybody's turn
        assert taken(peers) == set()
        for site_id in range(2, NUM_SITES):
            turns.sent(site(site_id))
            assert peers[site_id - 2].changed.is_set()
        assert taken(peers) == set(range(2, NUM_SITES))
        assert num_wakes(peers) == NUM_SITES - 2
        turns.sent(site(NUM_SITES))
        assert taken(peers) == set(range(2, NUM_SITES + 1))
        turns.wake_all()
        assert num_wakes(peers) <= 3 * NUM_SITES


def test_a_payload_wakes_whoever_may_have_it() -> None:
    turns = Turns(map(site, (2, 3, 4)))
    with served(turns, range(2, 5)) as peers:
        turns.sent(site(2))
        taken(peers)
        peers[1].takes_early = True
        turns.new_payload()
        assert taken(peers) == {2, 3}
        turns.all_sent()
        assert taken(peers) == {2, 3, 4}
        turns.new_payload()
        assert taken(peers) == {2, 3, 4}


def test_a_peer_may_have_payloads_once_it_has_this_sites_contributions() -> None:
    turns = Turns(map(site, (2, 3)))
    assert [turns.may_have(site_id) for site_id in (2, 3, 9)] == [False, False, False]
    turns.sent(site(2))
    assert [turns.may_have(site_id) for site_id in (2, 3, 9)] == [True, False, False]  # a receiver comes last
    turns.sent(site(3))
    assert [turns.may_have(site_id) for site_id in (2, 3, 9)] == [True, True, True]


def test_a_site_of_several_hosts_may_have_payloads_once_all_of_them_have_their_contributions() -> None:
    turns = Turns([site(2), site(2, "10.0.0.2:1"), site(3)])
    assert turns.unsent_site_ids == [2, 3]
    turns.sent(site(2, "10.0.0.2:1"))
    turns.sent(site(2, "10.0.0.2:1"))
    assert not turns.may_have(2)
    turns.sent(site(2))
    assert [turns.may_have(site_id) for site_id in (2, 3)] == [True, False]


def test_a_site_that_sends_nothing_lets_nobody_wait() -> None:
    assert Turns([]).may_have(2)


def test_a_change_before_the_wait_is_not_lost() -> None:
    async def main() -> None:
        turns = Turns(map(site, (2, 3)))
        with turns.served(2) as peer:
            peer.changed.clear()
            turns.sent(site(2))
            await peer.wait(3600.0)
        peer.changed.clear()
        turns.wake_all()
        assert not peer.changed.is_set(), "a stream that has ended is not woken"

    asyncio.run(main())
