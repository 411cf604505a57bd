"""Who was left out of a sync for what it contributed, and has contributed to no commit since. Plain data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from atoll.coordinator.core.events import CommitRecord, ExclusionRecord
from atoll.coordinator.core.membership import Site
from atoll.protocol.messages import Member

KEPT_EXCLUSIONS = 32
"""In memory, for people, and to find those who were left out again."""


class Exclusions:
    def __init__(self, records: Sequence[ExclusionRecord], commits: Sequence[CommitRecord]) -> None:
        self.recent = deque(records, KEPT_EXCLUSIONS)
        self._standing = {record.site_id: record for record in records}
        for commit in commits:
            self.committed(commit.commit.contributors, commit.commit.sync)

    def note(self, record: ExclusionRecord) -> None:
        self.recent.append(record)
        self._standing[record.site_id] = record

    def stands(self, site: Site) -> bool:
        """Whether this start of the site was left out before."""
        record = self._standing.get(site.site_id)
        return record is not None and record.incarnation == site.incarnation

    def forget(self, site_id: int) -> None:
        """It begins anew."""
        self._standing.pop(site_id, None)

    def committed(self, contributors: Iterable[Member], sync: int) -> None:
        """Nobody found these absurd."""
        for member in contributors if self._standing else ():
            record = self._standing.get(member.site_id)
            if record is not None and record.sync < sync:
                del self._standing[member.site_id]
