"""Intervals against plain sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.messages import DataRange
from atoll.protocol.ranges import Ranges, is_canonical, union

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8)


def numbers(ranges: object) -> set[int]:
    return {p for r in ranges for p in range(r.first, r.end)}  # type: ignore[attr-defined]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 8)), max_size=20))
def test_adding_and_removing(changes: list[tuple[bool, int, int]]) -> None:
    ranges, plain = Ranges(), set[int]()
    for is_added, first, length in changes:
        if is_added:
            ranges.add(first, first + length)
            plain |= set(range(first, first + length))
        else:
            ranges.remove(first, first + length)
            plain -= set(range(first, first + length))
        assert numbers(ranges) == plain
        assert ranges.num_samples == len(plain)
        assert is_canonical(ranges, 40)
        assert len(ranges) == sum(1 for p in plain if p - 1 not in plain)


@given(SPANS, SPANS, st.integers(0, 30), st.integers(0, 10))
def test_questions(some: list[tuple[int, int]], others: list[tuple[int, int]], first: int, length: int) -> None:
    a = Ranges(DataRange(first=f, num_samples=n) for f, n in some)
    b = Ranges(DataRange(first=f, num_samples=n) for f, n in others)
    inside = set(range(first, first + length))
    assert a.holds(first, first + length) == (inside <= numbers(a))
    assert numbers(a.minus(b)) == numbers(a) - numbers(b)
    assert numbers(a.within(first, first + length)) == numbers(a) & inside
    assert a.holds_all(b) == (numbers(b) <= numbers(a))
    assert numbers(union(a, b)) == numbers(a) | numbers(b)
    taken = a.copy()
    lowest = taken.take(length, 1 << 10)
    assert numbers(lowest) == set(sorted(numbers(a))[:length])
    assert numbers(taken) == numbers(a) - numbers(lowest)


def test_what_a_site_may_not_send() -> None:
    def check(*spans: tuple[int, int]) -> bool:
        return is_canonical([DataRange(first=f, num_samples=n) for f, n in spans], 100)

    assert check()
    assert check((0, 5), (6, 94))
    for wrong in ([(5, 1), (0, 1)], [(0, 5), (4, 2)], [(0, 5), (5, 1)], [(3, 0)], [(99, 2)]):
        assert not check(*wrong), wrong
