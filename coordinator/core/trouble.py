"""What failed exchanges teach about the next syncs: whom to let reduce nothing, and whom to let receive only. Pure.

A link that is bad stays bad for a while: finding that out anew in every sync would cost each of them an attempt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_DOUBLINGS = 6


@dataclass(slots=True)
class _Term:
    until: int  # the first sync in which the site is tried again
    num_times: int


class Probation:
    """For one sync after the first failure; for 2, 4, ... if it fails again soon after."""

    def __init__(self) -> None:
        self._terms: dict[int, _Term] = {}

    def note(self, site_ids: Iterable[int], sync: int) -> None:
        for site_id in site_ids:
            old = self._terms.get(site_id)
            recent = old is not None and sync <= old.until + self._length(old.num_times)
            times = old.num_times + 1 if old is not None and recent else 0
            self._terms[site_id] = _Term(sync + 1 + self._length(times), times)

    def of(self, sync: int) -> frozenset[int]:
        """Sites that are on probation in that sync."""
        return frozenset(site_id for site_id, term in self._terms.items() if sync < term.until)

    @staticmethod
    def _length(num_times: int) -> int:
        return int(2 ** min(num_times, MAX_DOUBLINGS))


class Trouble:
    """Over the syncs of one start of the coordinator."""

    def __init__(self) -> None:
        self.reduce_nothing = Probation()
        self.receive_only = Probation()
