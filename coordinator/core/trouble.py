"""What failed exchanges teach about the next syncs: whom to let reduce nothing, and whom to let receive only. Pure.

A link that is bad stays bad for a while: finding that out anew in every sync would cost each of them an attempt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Term:
    until: int  # the first sync in which the site is tried again
    num_times: int


class Probation:
    """For `first_syncs` after the first failure; `growth` times as many each time that it fails again soon after, up to
    `most_syncs`. Soon is within as many syncs again, or `remembered_syncs`."""

    def __init__(
        self, *, first_syncs: int = 1, growth: int = 2, most_syncs: int = 64, remembered_syncs: int = 0
    ) -> None:
        self._first_syncs = first_syncs
        self._growth = growth
        self._most_syncs = most_syncs
        self._remembered_syncs = remembered_syncs
        self._terms: dict[int, _Term] = {}

    def note(self, site_ids: Iterable[int], sync: int) -> None:
        for site_id in site_ids:
            old = self._terms.get(site_id)
            times = 0
            if old is not None and sync <= old.until + max(self._length(old.num_times), self._remembered_syncs):
                times = old.num_times + 1
            self._terms[site_id] = _Term(sync + 1 + self._length(times), times)

    def of(self, sync: int) -> frozenset[int]:
        """Sites that are on probation in that sync."""
        return frozenset(site_id for site_id, term in self._terms.items() if sync < term.until)

    def _length(self, num_times: int) -> int:
        return int(min(self._first_syncs * self._growth ** min(num_times, 64), self._most_syncs))


class Trouble:
    """Over the syncs of one start of the coordinator."""

    def __init__(self) -> None:
        self.reduce_nothing = Probation()
        self.receive_only = Probation()
        # It costs such a site nothing to reduce no more, and the others a stall each time that it holds them up.
        self.held_up_others = Probation(first_syncs=64, growth=8, most_syncs=4096, remembered_syncs=4096)

    def held_back(self, sync: int) -> frozenset[int]:
        """Sites that reduce in that sync only if no others can."""
        return self.reduce_nothing.of(sync) | self.held_up_others.of(sync)
