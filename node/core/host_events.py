"""What happens to a site of several hosts that does not happen to one of one host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostsChanged:
    missing: tuple[int, ...]  # hosts that are not here, by number
    text: str = ""  # what became of one that was here


@dataclass(frozen=True, slots=True)
class HostErrors:
    """A host has come, with what its disk has of error feedback: of each fragment the commit that has advanced the
    chunks of this host; 0: none has, None: one has advanced a part of them."""

    commits: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesArrived:
    """What a rank of another host sealed at (step, seq) is in the site's SNAPSHOT."""

    generation: int
    rank: int
    step: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotShared:
    """ShareSnapshot is carried out: each host has what it is to send of the snapshot of (step, seq)."""

    generation: int
    step: int
    seq: int
