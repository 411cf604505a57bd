"""What the coordinator and the donors say while a site catches up, put together. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.protocol.layout import Manifest, state_hash
from atoll.protocol.messages import MAX_LISTED_DONORS, Commit, Donor, Sources


@dataclass(eq=False)
class Index:
    """Attested state hashes, commit records and donors; and the hash lists whose root is an attested hash."""

    manifest: Manifest
    slots: tuple[str, ...]
    attested: dict[int, bytes] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)
    donors: tuple[Donor, ...] = ()
    lists: dict[int, list[bytes]] = field(default_factory=dict)
    unavailable: set[int] = field(default_factory=set)
    """Commits whose payloads no donor has any more."""

    def learn(self, sources: Sources, here: Iterable[Donor] = ()) -> None:
        """`here`: donors that have dialled this site. They stay where the coordinator has others to tell of now."""
        self.attested.update((a.commit, a.state_hash) for a in sources.attested)
        self.commits.update((c.commit, c) for c in sources.commits)
        self.donors = sources.donors
        if len(sources.donors) >= MAX_LISTED_DONORS:
            listed = {(d.site_id, d.incarnation) for d in sources.donors}
            self.donors += tuple(d for d in here if (d.site_id, d.incarnation) not in listed)

    @property
    def newest(self) -> int:
        """The newest commit; -1 if there is none."""
        return max([*self.attested, *self.commits], default=-1)

    def add_list(self, commit: int, hashes: list[bytes]) -> bool:
        """Whether the list is the attested one."""
        if self.attested.get(commit) != state_hash(self.manifest, self.slots, hashes):
            return False
        self.lists[commit] = hashes
        return True

    def can_replay(self, version: int) -> bool:
        """Whether the payloads of every commit after `version` can be had."""
        return version <= self.newest and all(
            n in self.commits and n not in self.unavailable for n in range(version + 1, self.newest + 1)
        )

    def is_valid(self, chunk: int, version: int, value: bytes, *, frozen: bool) -> bool:
        """Whether a chunk of that hash is what was attested at `version` (a frozen one: at any commit)."""
        if frozen:
            # A copy: a thread may add a list meanwhile.
            return version == 0 and any(hashes[chunk] == value for hashes in tuple(self.lists.values()))
        return version in self.lists and self.lists[version][chunk] == value
