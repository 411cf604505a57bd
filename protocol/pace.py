"""How often something may happen, as token buckets, and how often it did of late: by key. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Pace:
    at_once: int
    """After a rest."""
    per_s: float
    """From then on."""


class Buckets(Generic[K]):
    """A bucket that is full again is forgotten, so there are no more of them than `at_once` / `per_s` lets fill.
    Beyond `max_keys` the one that was used least recently is forgotten: whoever comes by many keys is not slowed down
    by this, and needs another bound."""

    def __init__(self, pace: Pace, max_keys: int, other: Mapping[K, Pace] = MappingProxyType({})) -> None:
        """`other` paces, of some keys."""
        self._pace = pace
        self._other = other
        self._max_keys = max_keys
        self._left: dict[K, tuple[float, float]] = {}  # tokens, and when that was so; the last used at the end

    def __len__(self) -> int:
        return len(self._left)

    def take(self, key: K, now: float) -> bool:
        """Whether it may happen now; if so, it counts."""
        left = self._now(key, now)
        if left < 1:
            return False
        self._keep(key, left - 1, now)
        return True

    def give_back(self, key: K, now: float) -> None:
        """It is not to count after all."""
        if key in self._left:
            self._keep(key, self._now(key, now) + 1, now)

    def spend(self, key: K, now: float) -> float:
        """It happens in any case; how many seconds it has to wait."""
        left = self._now(key, now) - 1
        self._keep(key, left, now)
        return max(0.0, -left / self._pace_of(key).per_s)

    def _pace_of(self, key: K) -> Pace:
        return self._other.get(key, self._pace)

    def _now(self, key: K, now: float) -> float:
        pace = self._pace_of(key)
        left, since = self._left.get(key, (float(pace.at_once), now))
        return min(pace.at_once, left + max(0.0, now - since) * pace.per_s)

    def _keep(self, key: K, left: float, now: float) -> None:
        self._left.pop(key, None)
        self._left[key] = left, now
        while len(self._left) > self._max_keys or (self._left and self._is_full(next(iter(self._left)), now)):
            del self._left[next(iter(self._left))]

    def _is_full(self, key: K, now: float) -> bool:
        return self._now(key, now) >= self._pace_of(key).at_once


class Recent(Generic[K]):
    """How often it happened of late: after `half_life_s` each time counts half. Beyond `max_keys` the one of which it
    happened least recently is forgotten."""

    def __init__(self, half_life_s: float, max_keys: int) -> None:
        self._half_life_s = half_life_s
        self._max_keys = max_keys
        self._times: dict[K, tuple[float, float]] = {}  # and when they were so many; the last at the end

    def of(self, key: K, now: float) -> float:
        times, since = self._times.get(key, (0.0, now))
        return float(times * 0.5 ** ((now - since) / self._half_life_s))

    def add(self, key: K, now: float) -> None:
        self._keep(key, self.of(key, now) + 1, now)

    def give_back(self, key: K, since: float, now: float) -> None:
        """That it happened at `since` is not to count after all."""
        self._keep(key, max(0.0, self.of(key, now) - 0.5 ** ((now - since) / self._half_life_s)), now)

    def _keep(self, key: K, times: float, now: float) -> None:
        self._times.pop(key, None)
        self._times[key] = times, now
        if len(self._times) > self._max_keys:
            del self._times[next(iter(self._times))]
