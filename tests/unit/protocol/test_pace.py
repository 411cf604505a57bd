from __future__ import annotations

import pytest

from atoll.protocol.pace import Buckets, Pace, Recent


def test_after_a_rest_many_may_happen_at_once_and_then_as_many_as_the_pace_allows() -> None:
    buckets = Buckets[str](Pace(at_once=3, per_s=2.0), 10)
    assert [buckets.take("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert not buckets.take("a", 0.25)
    assert buckets.take("a", 0.5)
    assert not buckets.take("a", 0.75), "what was refused has cost nothing, what happened has"
    assert [buckets.take("a", 100.0) for _ in range(4)] == [True, True, True, False], "no more is saved up"


def test_one_key_does_not_slow_down_another_and_each_may_have_its_own_pace() -> None:
    buckets = Buckets[str](Pace(at_once=1, per_s=1.0), 10, {"b": Pace(at_once=2, per_s=1.0)})
    assert [buckets.take("a", 0.0) for _ in range(2)] == [True, False]
    assert [buckets.take("b", 0.0) for _ in range(3)] == [True, True, False]


def test_what_is_given_back_may_happen_again_but_no_more_than_a_rest_allows() -> None:
    buckets = Buckets[str](Pace(at_once=2, per_s=0.001), 10)
    for _ in range(1000):
        assert buckets.take("a", 0.0)
        buckets.give_back("a", 0.0)
    buckets.give_back("a", 0.0)
    assert [buckets.take("a", 0.0) for _ in range(3)] == [True, True, False]


def test_what_happens_in_any_case_waits_for_its_turn() -> None:
    buckets = Buckets[str](Pace(at_once=2, per_s=4.0), 10)
    assert [buckets.spend("a", 0.0) for _ in range(4)] == [0.0, 0.0, 0.25, 0.5]
    assert buckets.spend("a", 0.75) == 0.0
    assert buckets.spend("a", 1000.0) == 0.0


@pytest.mark.parametrize("num_keys", [5, 1000])
def test_full_buckets_are_forgotten_and_others_are_bounded(num_keys: int) -> None:
    buckets = Buckets[int](Pace(at_once=1, per_s=1.0), 10)
    for key in range(num_keys):
        assert buckets.take(key, 0.0)
    assert len(buckets) == min(num_keys, 10)
    assert not buckets.take(num_keys - 1, 0.0), "the newest are known"
    assert buckets.take(-1, 5.0)
    assert len(buckets) == 1


def test_a_clock_that_goes_back_gives_nothing() -> None:
    buckets = Buckets[str](Pace(at_once=1, per_s=1.0), 10)
    assert buckets.take("a", 10.0)
    assert not buckets.take("a", 5.0)


def test_what_happened_of_late_counts_less_and_less() -> None:
    recent = Recent[str](half_life_s=10.0, max_keys=2)
    for _ in range(4):
        recent.add("a", 0.0)
    assert [recent.of("a", now) for now in (0.0, 10.0, 20.0)] == [4.0, 2.0, 1.0]
    recent.add("a", 10.0)
    recent.give_back("a", 10.0, 10.0)
    assert recent.of("a", 20.0) == 1.0
    recent.give_back("a", 20.0, 20.0)
    recent.give_back("a", 20.0, 20.0)
    assert recent.of("a", 20.0) == 0.0, "nothing counts less than nothing"
    recent.add("b", 20.0)
    recent.add("a", 20.0)
    recent.add("c", 20.0)
    assert [recent.of(key, 20.0) for key in "abc"] == [1.0, 0.0, 1.0]


def test_what_is_given_back_counts_as_little_as_it_does_by_then() -> None:
    recent = Recent[str](half_life_s=10.0, max_keys=2)
    recent.add("a", 0.0)
    recent.add("a", 10.0)
    recent.give_back("a", 0.0, 10.0)
    assert recent.of("a", 10.0) == 1.0, "the later one, and the half of the first that was left is gone"
