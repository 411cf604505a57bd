"""Who was left out of a sync for what it contributed, and has contributed to no commit since. Plain data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from atoll.coordinator.core.events import CommitRecord, ExclusionRecord
from atoll.coordinator.core.persisted import KEPT_EXCLUSIONS
from atoll.coordinator.core.sites.membership import Site
from atoll.protocol.messages import Member


class LeftOut:
    """Over the syncs of a run, as the store keeps it."""

    def __init__(self, records: Sequence[ExclusionRecord], commits: Sequence[CommitRecord]) -> None:
        self.recent = deque(records, KEPT_EXCLUSIONS)
        self._standing: dict[int, ExclusionRecord] = {}
        committed = {record.commit.sync: record.commit.contributors for record in commits}
        by_sync: dict[int, list[ExclusionRecord]] = {}
        for record in records:
            by_sync.setdefault(record.sync, []).append(record)
        for sync in sorted({*by_sync, *committed}):
            for record in by_sync.get(sync, ()):
                self._found_before(record)
            self.committed(committed.get(sync, ()), sync)

    def _found_before(self, record: ExclusionRecord) -> None:
        """Before this start of the coordinator: whom a reducer found for the second time was evicted for it."""
        known = self._standing.get(record.site_id)
        if record.attempt and known is not None and known.incarnation == record.incarnation:
            self.forget(record.site_id)
        else:
            self._standing[record.site_id] = record

    def note(self, record: ExclusionRecord) -> None:
        """The site was left out just now."""
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
        """The commit of that sync has these contributors: nobody found them absurd."""
        for member in contributors if self._standing else ():
            record = self._standing.get(member.site_id)
            if record is not None and record.sync < sync:
                del self._standing[member.site_id]
