"""How long an exchange may take. A slow but honest link is never cut off."""

from __future__ import annotations

import pytest

from atoll.coordinator.core.sync.deadlines import exchange_deadline_s, most_link_bytes
from atoll.coordinator.core.sync.link_health import MAX_LINKS, REMEMBERED_SYNCS, Probation, Trouble
from atoll.coordinator.core.sync.pace import Pace
from atoll.coordinator.core.sync.topology import Reducer, direct
from atoll.protocol.codecs import max_encoded_bytes
from atoll.protocol.time_limits import PRESETS
from tests.harness.chunk_runs import sizes_of_runs

TEN_MBIT_BYTES_PER_S = 10_000_000 / 8


def link_bytes(codec: str, num_sites: int, num_reducers: int, num_receivers: int = 0) -> int:
    sizes = sizes_of_runs([(16, max_encoded_bytes(codec, 1 << 20))])
    sites = [Reducer(site_id=i, bandwidth_bytes_per_s=0, max_retained_bytes=1 << 40) for i in range(1, num_sites + 1)]
    avoid = frozenset(range(num_reducers + 1, num_sites + 1))
    return most_link_bytes(sizes, direct(sizes, sites, avoid=avoid), num_sites, num_receivers)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("codec", ["int8", "fp32"])
@pytest.mark.parametrize(("num_sites", "num_reducers"), [(2, 2), (3, 3), (3, 1), (8, 8), (8, 1), (30, 30)])
def test_16_mi_parameters_over_10_mbit_are_no_problem(
    preset: str, codec: str, num_sites: int, num_reducers: int
) -> None:
    moved = link_bytes(codec, num_sites, num_reducers)
    needed_s = moved / TEN_MBIT_BYTES_PER_S
    assert exchange_deadline_s(PRESETS[preset], moved, None, 1) > 5 * needed_s
    # The same when such exchanges are what the run knows.
    assert exchange_deadline_s(PRESETS[preset], moved, needed_s, 1) > 5 * needed_s
    assert PRESETS[preset].slowest_bytes_per_s < TEN_MBIT_BYTES_PER_S / 10


def test_the_busiest_link_counts() -> None:
    sizes = sizes_of_runs([(4, 100)])
    sites = [Reducer(site_id=i, bandwidth_bytes_per_s=0, max_retained_bytes=1 << 40) for i in (1, 2)]
    trees = direct(sizes, sites)
    assert most_link_bytes(sizes, trees, 2, 0) == 200 + 200
    assert most_link_bytes(sizes, trees, 2, 3) == 200 + 200 * 4, "each reducer sends its payloads to receivers too"
    alone = direct(sizes, sites, avoid=frozenset({2}))
    assert most_link_bytes(sizes, alone, 2, 0) == 400


def test_bundles_count_with_all_that_they_hold() -> None:
    sizes = sizes_of_runs([(4, 100)], are_bundled=True)
    sites = [Reducer(site_id=i, bandwidth_bytes_per_s=0, max_retained_bytes=1 << 40) for i in (1, 2)]
    trees = direct(sizes, sites)
    assert most_link_bytes(sizes, trees, 2, 0) == 200 + 2 * 200
    assert most_link_bytes(sizes, trees, 2, 3) == 200 + 2 * 200 * 4
    alone = direct(sizes, sites, avoid=frozenset({2}))
    assert most_link_bytes(sizes, alone, 2, 0) == 2 * 400, "it receives one contribution, the other one two"


def test_history_tightens_the_deadline_and_attempts_widen_it() -> None:
    limits = PRESETS["lan"]
    moved = 1 << 30
    by_size_s = exchange_deadline_s(limits, moved, None, 1)
    assert exchange_deadline_s(limits, moved, 0.1, 1) == 8 * limits.stall_s, "stalls are found sooner by others"
    assert exchange_deadline_s(limits, moved, 100.0, 1) == 800.0
    assert exchange_deadline_s(limits, moved, 1e6, 1) == by_size_s
    assert exchange_deadline_s(limits, moved, 100.0, 3) == 3200.0


def test_a_site_without_a_history_gets_the_time_that_sizes_give() -> None:
    pace = Pace(num_in_flight=1)
    for seconds in (1.0, 3.0, 2.0):
        pace.note_commit([1, 2], 100, seconds, 10.0)
    assert pace.longest_exchange_s([1, 2], 100) == 3.0
    assert pace.longest_exchange_s([1, 2, 3], 100) is None
    for _ in range(8):
        pace.note_commit([1, 2], 100, 0.5, 10.0)
    assert pace.longest_exchange_s([1, 2], 100) == 0.5


def test_a_larger_sync_may_take_longer_in_proportion() -> None:
    pace = Pace(num_in_flight=1)
    pace.note_commit([1, 2], 100, 3.0, 10.0)
    pace.note_commit([1, 2], 400, 8.0, 20.0)
    assert pace.longest_exchange_s([1, 2], 100) == 8.0, "a smaller one is not cut short"
    assert pace.longest_exchange_s([1, 2], 400) == 12.0
    assert pace.longest_exchange_s([1, 2], 1600) == 48.0
    pace.note_commit([3], 0, 1.0, 30.0)
    assert pace.longest_exchange_s([3], 4) == 4.0


def test_probation_is_longer_for_who_fails_again_soon() -> None:
    probation = Probation(1, 4, 16)
    probation.note([7], 10)
    assert [sync for sync in range(10, 16) if probation.of(sync)] == [10, 11]
    probation.note([7], 12)
    assert [sync for sync in range(12, 30) if probation.of(sync)] == list(range(12, 17))
    probation.note([7], 17)
    assert [sync for sync in range(17, 60) if probation.of(sync)] == list(range(17, 34))
    probation.note([7], 34)
    assert [sync for sync in range(34, 90) if probation.of(sync)] == list(range(34, 51)), "the last one is the longest"
    probation.note([7], 51 + REMEMBERED_SYNCS)
    assert probation.of(51 + REMEMBERED_SYNCS + 16) == {7}, "one time is forgiven, and one is new"
    probation.note([7], 1000)
    assert [sync for sync in range(1000, 1010) if probation.of(sync)] == [1000, 1001], "that was long ago"
    probation.forget(7)
    assert not probation.of(1001)


def test_who_fails_as_often_as_it_is_tried_is_tried_more_and_more_rarely() -> None:
    trouble, tried = Trouble(), []
    for sync in range(1, 2000):
        if 7 not in trouble.spared(sync):
            tried.append(sync)
            trouble.receive_only.note([7], sync)
    assert tried == [1, 3, 8, 25, 90, 347, 1372]


@pytest.mark.parametrize("good", range(0, 300, 7))
def test_whatever_a_member_does_in_between_it_fails_in_few_of_its_syncs(good: int) -> None:
    """It fails after so many syncs in which it was tried."""
    trouble, failed, was_good, num_syncs = Trouble(), 0, 0, 10_000
    for sync in range(num_syncs):
        if 7 in trouble.spared(sync):
            continue
        was_good += 1
        if was_good > good:
            trouble.receive_only.note([7], sync)
            failed, was_good = failed + 1, 0
    assert failed <= 6 + num_syncs / REMEMBERED_SYNCS


def test_who_leaves_an_attempt_is_waited_for_the_first_time() -> None:
    trouble = Trouble()
    trouble.ended_attempts.note([7], 10)
    assert not trouble.spared(11)
    trouble.ended_attempts.note([7], 11)
    assert [sync for sync in range(11, 20) if trouble.spared(sync)] == [11, 12]
    trouble.forget(7)
    assert not trouble.spared(12)


def test_who_held_up_the_others_is_remembered_for_long() -> None:
    trouble = Trouble()
    trouble.held_up_others.note([7], 10)
    assert [sync for sync in range(10, 200) if trouble.held_back(sync)] == list(range(10, 75))
    trouble.held_up_others.note([7], 100)
    assert [sync for sync in range(100, 2000) if trouble.held_back(sync)] == list(range(100, 613))
    for sync in range(1000, 1100):
        trouble.held_up_others.note([7], sync)
    assert trouble.held_back(1100 + 4096 - 1) == {7}
    assert not trouble.held_back(1100 + 4096), "there is an end to it"


def test_links_that_failed_are_remembered_for_some_syncs_and_no_more_than_some() -> None:
    trouble = Trouble()
    trouble.note_links([(1, 2)], 10)
    assert trouble.links(10 + REMEMBERED_SYNCS) == [(1, 2)]
    assert trouble.links(11 + REMEMBERED_SYNCS) == []
    trouble.note_links([(1, i) for i in range(2, 3 + MAX_LINKS)], 11)
    trouble.note_links([(1, 2)], 12)
    assert len(trouble.links(12)) == MAX_LINKS
    assert trouble.links(12)[-1] == (1, 2)
