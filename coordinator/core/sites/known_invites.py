"""The invites of which a run knows, by their ids; and of each name those that were used. Each call of each site asks
for the newest of these, and a ban asks for all who watch: not by looking at thousands of invites each time."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.coordinator.core.records import InviteRecord


class KnownInvites(dict[str, InviteRecord]):
    def __init__(self, records: Iterable[InviteRecord]) -> None:
        super().__init__()
        self._used: dict[tuple[str, str], dict[str, InviteRecord]] = {}  # by role and name
        for record in records:
            self[record.invite_id] = record

    def __setitem__(self, invite_id: str, record: InviteRecord) -> None:
        super().__setitem__(invite_id, record)
        if record.key_digest:
            self._used.setdefault((record.role, record.name), {})[invite_id] = record

    def __delitem__(self, invite_id: str) -> None:
        of = self[invite_id].role, self[invite_id].name
        super().__delitem__(invite_id)
        used = self._used.get(of, {})
        used.pop(invite_id, None)
        if not used:
            self._used.pop(of, None)

    def newest(self, role: str, name: str) -> InviteRecord | None:
        """The last one of that name that was used; None if there is none."""
        return max(self._used.get((role, name), {}).values(), key=lambda used: used.number, default=None)
