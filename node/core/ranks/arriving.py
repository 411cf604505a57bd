"""Snapshots of a site of several hosts: sealed when all ranks have reported, ready when each host has what it is to
send of them.

Slices for host 0 and reports come by different ways, so either may be there first. As soon as all ranks have sealed,
the other hosts are asked to take theirs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.node.core.events import SnapshotArrived
from atoll.node.core.outputs import ShareSnapshot


@dataclass(slots=True)
class _Snapshot:
    fragment: int
    missing: set[int]  # ranks whose slices are not in the site's SNAPSHOT yet
    is_sealed: bool = False  # by all ranks
    is_shared: bool = False  # the other hosts have what they are to send


class Arriving:
    """Of one generation. `elsewhere`: the ranks on other hosts; a site of one host has none, and nothing arrives."""

    def __init__(self, generation: int, elsewhere: range) -> None:
        self._generation = generation
        self._elsewhere = elsewhere
        self._snapshots: dict[tuple[int, int], _Snapshot] = {}  # by step and seq

    def begin(self, step: int, seq: int, fragment: int) -> None:
        """Ranks are told to write it: what they wrote of that fragment before was given up, or is whole."""
        if self._elsewhere:
            self._snapshots = {at: s for at, s in self._snapshots.items() if s.fragment != fragment}
            self._snapshots[step, seq] = _Snapshot(fragment, set(self._elsewhere))

    def is_expected(self, step: int, seq: int) -> bool:
        """Whether a host lacks some of it."""
        return (step, seq) in self._snapshots

    def seal(self, step: int, seq: int) -> list[ShareSnapshot]:
        """All ranks have reported on it."""
        snapshot = self._snapshots.get((step, seq))
        if snapshot is None:
            return []
        snapshot.is_sealed = True
        return [ShareSnapshot(generation=self._generation, fragment=snapshot.fragment, step=step, seq=seq)]

    def came(self, rank: int, step: int, seq: int) -> list[SnapshotArrived]:
        """The slices of that rank."""
        snapshot = self._snapshots.get((step, seq))
        if snapshot is None or rank not in snapshot.missing:
            return []
        snapshot.missing.remove(rank)
        return self._if_ready(step, seq)

    def shared(self, step: int, seq: int) -> list[SnapshotArrived]:
        """Every host has what it is to send, as it was asked to."""
        snapshot = self._snapshots.get((step, seq))
        if snapshot is None or not snapshot.is_sealed:
            return []
        snapshot.is_shared = True
        return self._if_ready(step, seq)

    def _if_ready(self, step: int, seq: int) -> list[SnapshotArrived]:
        snapshot = self._snapshots[step, seq]
        if snapshot.missing or not snapshot.is_shared:
            return []
        del self._snapshots[step, seq]
        return [SnapshotArrived(generation=self._generation, fragment=snapshot.fragment, step=step, seq=seq)]
