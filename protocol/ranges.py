"""Sets of positions as merged intervals: their memory grows with the gaps in them, not with what they hold. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from atoll.protocol.messages import DataRange


class Ranges:
    """A set of non-negative integers. Intervals are kept ascending, disjoint and not adjacent."""

    __slots__ = ("_ends", "_firsts")

    def __init__(self, ranges: Iterable[DataRange] = ()) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []  # exclusive
        for item in ranges:
            self.add(item.first, item.end)

    def __iter__(self) -> Iterator[DataRange]:
        """Ascending."""
        for first, end in zip(self._firsts, self._ends, strict=True):
            yield DataRange(first=first, num_samples=end - first)

    def __len__(self) -> int:
        """Number of intervals."""
        return len(self._firsts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and (self._firsts, self._ends) == (other._firsts, other._ends)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        inside = ", ".join(f"{first}-{end - 1}" for first, end in zip(self._firsts, self._ends, strict=True))
        return f"Ranges({inside})"

    @property
    def num_samples(self) -> int:
        return sum(self._ends) - sum(self._firsts)

    def copy(self) -> Ranges:
        result = Ranges()
        result._firsts, result._ends = self._firsts.copy(), self._ends.copy()
        return result

    def as_tuple(self) -> tuple[DataRange, ...]:
        return tuple(self)

    # --- changes

    def add(self, first: int, end: int) -> None:
        """[first, end); what is there already stays."""
        if first >= end:
            return
        low = bisect_left(self._ends, first)  # the first interval that touches it
        high = bisect_right(self._firsts, end)  # the first one beyond it
        if low < high:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
        self._firsts[low:high] = [first]
        self._ends[low:high] = [end]

    def remove(self, first: int, end: int) -> None:
        """[first, end); what is not there is left alone."""
        if first >= end:
            return
        low = bisect_right(self._ends, first)
        high = bisect_left(self._firsts, end)
        if low >= high:
            return
        firsts, ends = [], []
        if self._firsts[low] < first:
            firsts.append(self._firsts[low])
            ends.append(first)
        if self._ends[high - 1] > end:
            firsts.append(end)
            ends.append(self._ends[high - 1])
        self._firsts[low:high] = firsts
        self._ends[low:high] = ends

    def update(self, other: Iterable[DataRange]) -> None:
        for item in other:
            self.add(item.first, item.end)

    def difference_update(self, other: Iterable[DataRange]) -> None:
        for item in other:
            self.remove(item.first, item.end)

    def take(self, num_samples: int, max_ranges: int) -> tuple[DataRange, ...]:
        """Removes the lowest positions: at most so many, in at most so many intervals."""
        taken: list[DataRange] = []
        while num_samples > 0 and self._firsts and len(taken) < max_ranges:
            first = self._firsts[0]
            end = min(self._ends[0], first + num_samples)
            taken.append(DataRange(first=first, num_samples=end - first))
            num_samples -= end - first
            self.remove(first, end)
        return tuple(taken)

    # --- questions

    def holds(self, first: int, end: int) -> bool:
        """All of [first, end)."""
        place = bisect_right(self._firsts, first) - 1
        return first >= end or (place >= 0 and end <= self._ends[place])

    def holds_all(self, other: Iterable[DataRange]) -> bool:
        return all(self.holds(item.first, item.end) for item in other)

    def minus(self, other: Iterable[DataRange]) -> Ranges:
        result = self.copy()
        result.difference_update(other)
        return result

    def common(self, other: Iterable[DataRange]) -> Ranges:
        """What is in both."""
        result = Ranges()
        for item in other:
            result.update(self.within(item.first, item.end))
        return result

    def within(self, first: int, end: int) -> Ranges:
        """The part in [first, end)."""
        result = Ranges()
        low, high = bisect_right(self._ends, first), bisect_left(self._firsts, end)
        for place in range(low, high):
            result.add(max(first, self._firsts[place]), min(end, self._ends[place]))
        return result


def union(*parts: Iterable[DataRange]) -> tuple[DataRange, ...]:
    """Merged and ascending."""
    result = Ranges()
    for part in parts:
        result.update(part)
    return result.as_tuple()


def is_canonical(ranges: Iterable[DataRange], max_position: int) -> bool:
    """Whether they are ascending, not empty, disjoint, not adjacent, and below `max_position`."""
    last = -1
    for item in ranges:
        if item.num_samples < 1 or item.first <= last or item.end > max_position:
            return False
        last = item.end
    return True
