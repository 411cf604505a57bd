"""What keeps a site from one sync, why, and since when; and who was left out of the syncs before. Pure.

An exclusion is of one start of a site: the next start is another site to the sync. The kinds, what each keeps a site
from and what is remembered of it: docs/decisions/0025-the-shape-of-the-coordinator.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from atoll.coordinator.core.events import CommitRecord, ExclusionRecord
from atoll.coordinator.core.persisted import KEPT_EXCLUSIONS
from atoll.protocol.messages import Commit

Start = tuple[int, int]
"""Site id and incarnation."""


class Kind(Enum):
    GONE = auto()
    """It left or was evicted after it was planned: its contribution is void, and another one cannot take its place."""
    LEFT_DONE = auto()
    """It left after its Done: the attempt goes on with its contribution, and does not wait for it."""
    CANNOT_GO_ON = auto()
    """It said that it cannot exchange with anybody."""
    DEMOTED = auto()
    """Exchanges with it failed: it receives only."""
    ABSURD = auto()
    """Its contribution has no place in an average."""
    NO_ROOM = auto()
    """It cannot hold what it was to reduce. It contributes."""
    NO_AVERAGE = auto()
    """It found a tensor without an average: others look at it again. It contributes."""


VOID = (Kind.GONE, Kind.LEFT_DONE)
BARS = (*VOID, Kind.CANNOT_GO_ON, Kind.DEMOTED, Kind.ABSURD)
"""A site does not contribute, and is not waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    kind: Kind
    reason: str
    since: float
    attempt: int
    """The one under way that had its weights, with the site as a contributor; 0: none."""


class Exclusions:
    """Of one sync. Nothing is taken back before the sync ends, and nothing is replaced: of each start the first of a
    kind stands, however often a site says it again."""

    def __init__(self) -> None:
        self._of: dict[Start, dict[Kind, Exclusion]] = {}

    def note(self, start: Start, exclusion: Exclusion) -> None:
        """The sync's own word: nobody else writes here."""
        self._of.setdefault(start, {}).setdefault(exclusion.kind, exclusion)

    def __contains__(self, start: Start) -> bool:
        return start in self._of

    def bars(self, start: Start) -> bool:
        """Whether the site does not contribute any more."""
        return start in self._of and any(kind in BARS for kind in self._of[start])

    def is_void(self, start: Start) -> bool:
        """Whether the site has discarded what it contributed; peers may hold it."""
        return start in self._of and any(kind in VOID for kind in self._of[start])

    def reasons(self, *kinds: Kind) -> dict[int, str]:
        """By the id of each site that is still here, in the order in which they were found."""
        return {
            site_id: e.reason
            for (site_id, incarnation), found in self._of.items()
            if not self.is_void((site_id, incarnation))
            for kind, e in found.items()
            if kind in kinds
        }

    def failed(self) -> dict[int, str]:
        """Sites that are here and do not contribute, and why."""
        return self.reasons(Kind.CANNOT_GO_ON, Kind.DEMOTED, Kind.ABSURD)

    def of(self, *kinds: Kind) -> dict[Start, Exclusion]:
        """One of these kinds of each start that has any, whether it is still here or not."""
        return {start: found[kind] for start, found in self._of.items() for kind in kinds if kind in found}

    def ids(self, *kinds: Kind) -> set[int]:
        """Of the sites of which that was ever said in this sync."""
        return {site_id for site_id, _ in self.of(*kinds)}

    def ended_attempts(self, last_attempt: int) -> set[int]:
        """Sites that left, or could not go on, while others exchanged with them. That the last attempt was committed
        without a site that left in it cost nobody anything."""
        gone = self.of(Kind.GONE).items()
        return self.ids(Kind.CANNOT_GO_ON) | {start[0] for start, e in gone if 0 < e.attempt < last_attempt}


class LeftOut:
    """Who was left out of a sync for what it contributed, and has contributed to no commit of that fragment since: over
    the syncs of a run, as the store keeps it."""

    def __init__(
        self, records: Sequence[ExclusionRecord], commits: Sequence[CommitRecord], all_fragments: int = 0
    ) -> None:
        """`all_fragments`: what a sync of all names."""
        self._all = all_fragments
        self.recent = deque(records, KEPT_EXCLUSIONS)
        self._standing: dict[int, ExclusionRecord] = {}
        committed = {record.commit.sync: record.commit for record in commits}
        by_sync: dict[int, list[ExclusionRecord]] = {}
        for record in records:
            by_sync.setdefault(record.sync, []).append(record)
        for sync in sorted({*by_sync, *committed}):
            for record in by_sync.get(sync, ()):
                self._found_before(record)
            if sync in committed:
                self.committed(committed[sync])

    def _found_before(self, record: ExclusionRecord) -> None:
        """Before this start of the coordinator: whom a reducer found for the second time was evicted for it."""
        if record.attempt and self.stands((record.site_id, record.incarnation)):
            self.forget(record.site_id)
        else:
            self._standing[record.site_id] = record

    def note(self, record: ExclusionRecord) -> None:
        """The site was left out just now."""
        self.recent.append(record)
        self._standing[record.site_id] = record

    def stands(self, start: Start) -> bool:
        """Whether this start of the site was left out before."""
        record = self._standing.get(start[0])
        return record is not None and record.incarnation == start[1]

    def forget(self, site_id: int) -> None:
        """It begins anew."""
        self._standing.pop(site_id, None)

    def committed(self, commit: Commit) -> None:
        """Nobody found what its contributors have of its chunks absurd."""
        for member in commit.contributors if self._standing else ():
            record = self._standing.get(member.site_id)
            if record is None or record.sync >= commit.sync:
                continue
            if commit.fragment == record.fragment or self._all in (commit.fragment, record.fragment):
                del self._standing[member.site_id]
