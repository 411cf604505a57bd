"""Snapshots of which ranks on other hosts have slices: sealed when all ranks have reported, whole when these are here.

Slices and reports come by different ways, so either may be there first. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Snapshot:
    fragment: int
    missing: set[int]  # ranks whose slices are not in the site's SNAPSHOT yet
    is_sealed: bool = False  # by all ranks


class Arriving:
    """Of one generation. `elsewhere`: the ranks on other hosts."""

    def __init__(self, elsewhere: range) -> None:
        self._elsewhere = elsewhere
        self._snapshots: dict[tuple[int, int], _Snapshot] = {}  # by step and seq

    def begin(self, step: int, seq: int, fragment: int) -> None:
        """Ranks are told to write it."""
        self._snapshots[step, seq] = _Snapshot(fragment, set(self._elsewhere))

    def seal(self, step: int, seq: int) -> bool:
        """All ranks have reported on it; whether slices are still on their way."""
        snapshot = self._snapshots[step, seq]
        snapshot.is_sealed = True
        if not snapshot.missing:
            del self._snapshots[step, seq]
        return bool(snapshot.missing)

    def came(self, rank: int, step: int, seq: int) -> tuple[int, ...]:
        """The slices of that rank. The fragment of the snapshot, if it is sealed and this makes it whole."""
        snapshot = self._snapshots.get((step, seq))
        if snapshot is None or rank not in snapshot.missing:
            return ()
        snapshot.missing.remove(rank)
        if snapshot.missing or not snapshot.is_sealed:
            return ()
        del self._snapshots[step, seq]
        return (snapshot.fragment,)
