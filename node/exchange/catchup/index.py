"""What the coordinator and the donors say while a site catches up, put together. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.protocol.errors import InvalidMessage, StateError
from atoll.protocol.history import History
from atoll.protocol.layout import Manifest, state_hash
from atoll.protocol.messages import MAX_LISTED_DONORS, Commit, Donor, Sources


@dataclass(eq=False)
class Index:
    """Attested state hashes, commit records and donors; and the hash lists whose root is an attested hash."""

    manifest: Manifest
    slots: tuple[str, ...]
    num_fragments: int = 1
    attested: dict[int, bytes] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)
    donors: tuple[Donor, ...] = ()
    lists: dict[int, list[bytes]] = field(default_factory=dict)
    unavailable: set[int] = field(default_factory=set)
    """Commits whose payloads no donor has any more."""

    def __post_init__(self) -> None:
        self._touched = (0,) * self.num_fragments
        self.history = History(self._touched)
        """Of the commits that are known without a gap."""

    def learn(self, sources: Sources, here: Iterable[Donor] = ()) -> None:
        """`here`: donors that have dialled this site. They stay where the coordinator has others to tell of now."""
        self.attested.update((a.commit, a.state_hash) for a in sources.attested)
        self.commits.update((c.commit, c) for c in sources.commits)
        if sources.touched and self.history.commit_of(sources.touched) is None:
            if len(sources.touched) != self.num_fragments:
                raise InvalidMessage(f"sources of {len(sources.touched)} fragments, this run has {self.num_fragments}")
            self._touched = sources.touched
        self.history = History.of_log(self._touched, self.commits)
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

    def can_replay(self, commit: int) -> bool:
        """Whether the payloads of every commit after `commit` can be had."""
        touched = self.history.touched(commit) if commit <= self.newest else None
        return touched is not None and all(self.leads_on(f, version) for f, version in enumerate(touched))

    def leads_on(self, fragment: int, version: int) -> bool:
        """Whether those of the fragment's commits after `version` can be had."""
        try:
            needed = self.history.between(fragment, version, self.newest)
        except StateError:
            return False
        return version <= self.newest and all(n in self.commits and n not in self.unavailable for n in needed)

    def lists_with(self, fragment: int | None, version: int) -> list[list[bytes]]:
        """Of the commits at which the chunks of the fragment are at `version`. None: frozen ones, at 0 in all."""
        found = []
        for commit, hashes in tuple(self.lists.items()):  # a copy: a thread may add a list meanwhile
            touched = self.history.touched(commit)
            if (0 if fragment is None else touched and touched[fragment]) == version:
                found.append(hashes)
        return found

    def is_valid(self, chunk: int, fragment: int | None, version: int, value: bytes) -> bool:
        """Whether a chunk of that hash is what was attested at `version`."""
        return any(hashes[chunk] == value for hashes in self.lists_with(fragment, version))
