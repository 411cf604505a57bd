"""What failed exchanges teach about the next syncs: whom to let reduce nothing, and whom to let receive only. Pure.

A link that is bad stays bad for a while: finding that out anew in every sync would cost each of them an attempt. And a
member that means harm would fail as often as it is tried, so that it is tried more and more rarely.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from atoll.coordinator.core.sync.blame import Pair, partners_of

REMEMBERED_SYNCS = 64
"""A failure is followed by a longer term if the last term ended less than so many syncs before, or than it lasted."""
MAX_LINKS = 4096
_THE_RUN = 0
"""No site has that id."""


@dataclass(slots=True)
class _Term:
    until: int  # the first sync in which the site is tried again
    num_times: int


class Probation:
    """For the first of `lengths` after a failure, in syncs, and the next one each time that it fails again."""

    def __init__(self, *lengths: int) -> None:
        self._lengths = lengths
        self._terms: dict[int, _Term] = {}

    def note(self, site_ids: Iterable[int], sync: int) -> None:
        """They failed in that sync."""
        for site_id in site_ids:
            times = 0
            if (old := self._terms.get(site_id)) is not None:
                quiet = max(0, sync - old.until)  # syncs in which it was tried, and nothing was held against it
                forgiven = quiet // max(REMEMBERED_SYNCS, self._lengths[old.num_times])
                times = min(max(0, old.num_times + 1 - forgiven), len(self._lengths) - 1)
            self._terms[site_id] = _Term(sync + 1 + self._lengths[times], times)

    def of(self, sync: int) -> frozenset[int]:
        """Sites that are on probation in that sync."""
        return frozenset(site_id for site_id, term in self._terms.items() if sync < term.until)

    def forget(self, site_id: int) -> None:
        """Nothing is held against the site."""
        self._terms.pop(site_id, None)


class Trouble:
    """Over the syncs of one start of the coordinator."""

    def __init__(self, num_fragments: int = 1) -> None:
        """Of a run whose fragments take turns: its next sync of the same fragment is so many later."""
        # Until that one too, or the word of one reducer could leave a site out of a fragment time and again.
        self.reduce_nothing = Probation(*(num_fragments * length for length in (1, 4, 16, 64)))
        self.receive_only = Probation(1, 4, 16, 64, 256, 1024)
        self.ended_attempts = Probation(0, 1, 4, 16, 64, 256, 1024)
        """Sites that left, or could not go on, while others exchanged with them. That happens once to anybody."""
        # It costs such a site nothing to reduce no more, and the others a stall each time that it holds them up.
        self.held_up_others = Probation(64, 512, 4096)
        self._misled = Probation(64, 512, 4096)  # the run as a whole
        self._links: dict[Pair, int] = {}  # the last sync in which an exchange over it failed

    def held_back(self, sync: int) -> frozenset[int]:
        """Sites that reduce in that sync only if no others can."""
        return self.reduce_nothing.of(sync) | self.held_up_others.of(sync)

    def spared(self, sync: int) -> frozenset[int]:
        """Sites that receive only in that sync, if there are enough others."""
        return self.receive_only.of(sync) | self.ended_attempts.of(sync)

    def note_misled(self, sync: int) -> None:
        """Contributors averaged with other weights than were said."""
        self._misled.note([_THE_RUN], sync)

    def plans_ahead(self, sync: int) -> bool:
        """Whether that sync may be planned before its sites have said their weights."""
        return _THE_RUN not in self._misled.of(sync)

    def note_links(self, pairs: Collection[Pair], sync: int) -> None:
        """Exchanges over these links failed in that sync."""
        for pair in pairs:
            self._links.pop(pair, None)
            self._links[pair] = sync
        for pair in list(self._links)[:-MAX_LINKS]:
            del self._links[pair]

    def links(self, sync: int) -> list[Pair]:
        """Over which exchanges failed in the syncs before."""
        return [pair for pair, failed_in in self._links.items() if sync - failed_in <= REMEMBERED_SYNCS]

    def ends_at_fault(self, pairs: Collection[Pair], sync: int) -> set[int]:
        """Of links that failed: of each the end that has failed with more others of late; both if nobody knows."""
        partners = partners_of((*self.links(sync), *pairs))
        return {i for pair in pairs for i in pair if len(partners[i]) == max(len(partners[end]) for end in pair)}

    def forget(self, site_id: int) -> None:
        """Nothing is held against the site."""
        for probation in (self.reduce_nothing, self.receive_only, self.ended_attempts, self.held_up_others):
            probation.forget(site_id)
