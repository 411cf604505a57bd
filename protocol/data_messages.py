"""The messages of leases of samples: positions of the order that sites share.

Used through `messages`, as all other messages are.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.fields import CoordinatorMessage, SiteMessage, bounded

MAX_RANGES_OF_SITE = 1 << 12
MAX_RANGES_OF_COMMIT = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRange:
    first: int
    num_samples: int

    @property
    def end(self) -> int:
        """One beyond the last position."""
        return self.first + self.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRanges:
    line: int
    ranges: tuple[DataRange, ...] = bounded(MAX_RANGES_OF_COMMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest(SiteMessage):
    num_samples: int
    wanted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leases(CoordinatorMessage):
    ranges: tuple[DataRange, ...] = bounded(MAX_RANGES_OF_SITE, ())
