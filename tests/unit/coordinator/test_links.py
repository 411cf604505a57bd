"""Links as sites say that they carry: pairs, what most say of a site, and which sites stand out."""

from __future__ import annotations

import pytest

from atoll.coordinator.core.sync.links import Link, Links
from atoll.protocol.messages import MAX_LINKS, LinkUse

FAST = 12_500_000.0
PLENTY_S = 1000.0


def use(sender: int, rate: float, num_bytes: int = 30_000) -> LinkUse:
    return LinkUse(site_id=sender, received_bytes=num_bytes, seconds=num_bytes / rate)


def exchange(links: Links, rates: dict[int, float]) -> None:
    """Each site sends to all others at the pace of the slower of the two."""
    for receiver, down in rates.items():
        links.note(receiver, [use(sender, min(up, down)) for sender, up in rates.items() if sender != receiver])


def settled(rates: dict[int, float], links: Links | None = None) -> Links:
    links = links or Links()
    exchange(links, rates)
    links.settle(rates.keys(), 10**12, PLENTY_S)
    return links


def test_an_average_is_geometric_and_half_of_it_is_new() -> None:
    links = Links()
    links.note(2, [use(1, 100.0)])
    links.note(2, [use(1, 10_000.0)])
    (link,) = links.slowest(5)
    assert link == Link(1, 2, link.bytes_per_s)
    assert link.bytes_per_s == pytest.approx(1000.0)


@pytest.mark.parametrize("thin", [1, 3, 5])
def test_a_thin_site_is_found_and_the_others_are_alike(thin: int) -> None:
    rates = dict.fromkeys(range(1, 6), FAST) | {thin: FAST / 100}
    links = settled(rates)
    assert links.share(thin) == pytest.approx(0.01)
    assert [links.share(i) for i in rates if i != thin] == [1.0] * 4


def test_of_three_sites_the_thin_one_makes_no_other_thin() -> None:
    links = settled({1: FAST, 2: FAST, 3: FAST / 50})
    assert [links.share(i) for i in (1, 2, 3)] == [1.0, 1.0, pytest.approx(0.02)]


def test_where_all_exchange_with_one_only_that_one_is_thin() -> None:
    """A model of one chunk has one reducer, and nobody knows what the others' links carry."""
    links = Links()
    links.note(3, [use(i, FAST / 100) for i in (1, 2, 4, 5)])
    for receiver in (1, 2, 4, 5):
        links.note(receiver, [use(3, FAST / 100)])
    links.settle(range(1, 6), 10**9, 100.0)
    assert [links.share(i) < 1 for i in range(1, 6)] == [False, False, True, False, False]
    # Another one reduces now, and it turns out that all are like that.
    for _ in range(2):
        for receiver in range(1, 6):
            links.note(receiver, [use(i, FAST / 100) for i in range(1, 6) if i != receiver])
        links.settle(range(1, 6), 10**9, 100.0)
    assert [links.share(i) for i in range(1, 6)] == [1.0] * 5


def test_who_exchanges_with_one_only_is_thin_if_that_one_is_fast_with_the_others() -> None:
    links = Links()
    links.note(3, [use(i, FAST / 100 if i == 5 else FAST) for i in (1, 2, 4, 5)])
    for receiver in (1, 2, 4, 5):
        links.note(receiver, [use(3, FAST / 100 if receiver == 5 else FAST)])
    links.settle(range(1, 6), 10**7, 100.0)
    assert [links.share(i) < 1 for i in range(1, 6)] == [False, False, False, False, True]


def test_either_direction_makes_a_site_thin() -> None:
    links = Links()
    for receiver in range(1, 5):
        others = [i for i in range(1, 5) if i != receiver]
        # Site 1 sends slowly, and site 2 receives slowly.
        links.note(receiver, [use(i, FAST / 20 if i == 1 or receiver == 2 else FAST) for i in others])
    links.settle(range(1, 5), 10**12, PLENTY_S)
    assert [links.share(i) for i in range(1, 5)] == [pytest.approx(0.05), pytest.approx(0.05), 1.0, 1.0]


def test_what_one_site_says_of_another_makes_it_neither_thin_nor_fast() -> None:
    for lie in (FAST / 1000, FAST * 1000):
        links = Links()
        exchange(links, dict.fromkeys(range(1, 6), FAST))
        links.note(5, [use(1, lie)])
        links.settle(range(1, 6), 10**12, PLENTY_S)
        assert links.share(1) == 1.0


def test_a_site_is_not_fast_by_its_own_word() -> None:
    links = Links()
    exchange(links, dict.fromkeys(range(1, 6), FAST) | {5: FAST / 100})
    links.note(5, [use(i, 1e12) for i in range(1, 5)])
    links.settle(range(1, 6), 10**12, PLENTY_S)
    assert links.share(5) < 0.02


def test_shares_do_not_flap() -> None:
    links = settled(dict.fromkeys(range(1, 6), FAST))
    for factor in (0.6, 1.6, 0.7):
        settled(dict.fromkeys(range(1, 6), FAST) | {2: factor * FAST}, links)
        assert links.share(2) == 1.0
    for _ in range(8):
        settled(dict.fromkeys(range(1, 6), FAST) | {2: FAST / 16}, links)
    thin = links.share(2)
    assert 1 / 32 < thin < 1 / 8
    for factor in (0.8, 1.2, 1.0):
        settled(dict.fromkeys(range(1, 6), FAST) | {2: factor * thin * FAST}, links)
        assert links.share(2) == thin


def test_where_errors_of_averages_are_kept_a_share_changes_after_so_many_commits_in_a_row() -> None:
    """What a reducer has lost of its averages is lost for chunks that change hands."""
    alike = dict.fromkeys(range(1, 6), FAST)
    thin, links = alike | {3: FAST / 100}, Links(patience=3)
    for rates, share in ((thin, 1.0), (thin, 1.0), (thin, 0.01)):
        assert settled(rates, links).share(3) == pytest.approx(share)
    links = Links(patience=3)
    for _ in range(5):  # a machine that is busy now and then
        for _ in range(2):
            assert settled(thin, links).share(3) == 1.0
        for _ in range(8):
            settled(alike, links)
    assert links.share(3) == 1.0


def test_a_link_that_recovers_is_like_the_others_again() -> None:
    links = settled(dict.fromkeys(range(1, 6), FAST) | {2: FAST / 100})
    num_syncs = 0
    while links.share(2) != 1.0:
        settled(dict.fromkeys(range(1, 6), FAST), links)
        num_syncs += 1
    assert num_syncs <= 4


def test_a_link_that_is_never_the_limit_is_like_any_other() -> None:
    """What a sync moves it moves in less than a hundredth of the time between two commits."""
    rates = dict.fromkeys(range(1, 6), FAST) | {2: FAST / 10}
    for num_bytes, is_thin in ((10**5, False), (10**12, True)):
        links = Links()
        exchange(links, rates)
        links.settle(rates.keys(), num_bytes, 10.0)
        assert (links.share(2) < 1.0) == is_thin


@pytest.mark.parametrize("wait_s", [0.0012, 0.003, 0.01, 0.03])
def test_a_machine_that_was_busy_for_a_moment_keeps_no_site_from_reducing(wait_s: float) -> None:
    """Small syncs, four a second, of which all comes at once. Least of it follows a lead at a site that reduces
    nothing: a thousand bytes a millisecond is the fastest that can be seen of its link."""
    links = Links()
    for waited_s in (wait_s, *[5e-5] * 50):
        links.note(1, [LinkUse(site_id=i, received_bytes=4000, seconds=5e-5) for i in (2, 3)])
        links.note(2, [LinkUse(site_id=i, received_bytes=4000, seconds=5e-5) for i in (1, 3)])
        links.note(3, [LinkUse(site_id=i, received_bytes=1000, seconds=waited_s) for i in (1, 2)])
        links.settle((1, 2, 3), 12_500, 0.27)
    assert [links.share(i) for i in (1, 2, 3)] == [1.0] * 3


def test_who_leaves_is_forgotten() -> None:
    links = settled(dict.fromkeys(range(1, 5), FAST) | {2: FAST / 100})
    links.forget(2)
    assert links.share(2) == 1.0
    assert links.up_bytes_per_s(2) is links.down_bytes_per_s(2) is None
    assert all(2 not in (link.sender, link.receiver) for link in links.slowest(100))
    assert len(links.slowest(100)) == 6


def test_a_thousand_sites_are_remembered_by_a_bounded_number_of_pairs() -> None:
    links = Links()
    for receiver in range(1000):
        links.note(receiver, [use(sender, 1e6) for sender in range(1000) if sender != receiver][:MAX_LINKS])
        links.note(receiver, [use(sender, 1e6) for sender in range(999, 0, -1) if sender != receiver][:MAX_LINKS])
    assert len(links.slowest(10**6)) == 1000 * MAX_LINKS
    for site_id in range(1000):
        links.forget(site_id)
    assert links.slowest(1) == []


def test_odd_words_are_bounded() -> None:
    links = Links()
    links.note(1, [LinkUse(site_id=1, received_bytes=5, seconds=1.0)])  # of itself
    links.note(1, [LinkUse(site_id=2, received_bytes=0, seconds=1.0)])
    links.note(1, [LinkUse(site_id=2, received_bytes=5, seconds=-1.0)])
    assert links.slowest(5) == []
    links.note(1, [LinkUse(site_id=2, received_bytes=(1 << 64) - 1, seconds=0.0)])
    links.note(1, [LinkUse(site_id=3, received_bytes=1, seconds=1.7e308)])
    links.settle([1, 2, 3], 10**12, PLENTY_S)
    assert all(0 < links.share(i) < 1e30 for i in (1, 2, 3))
