"""What a sync in flight of one fragment, or of all, needs. Plain data: each field is changed by one module, and read by
all."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from atoll.node.core.events import SnapshotSealed
from atoll.protocol.messages import DataRange, Done, ExchangeFailed, Open, Plan, Products, Signature

STORY_STEPS = 16
UPDATES = 4
"""By which the next one is expected."""


class SnapshotPhase(Enum):
    """SNAPSHOT's life: FREE -> WRITING -> SEALED -> CONSUMED -> FREE (docs/protocol.md).

    CONSUMED: committed, kept until the workers have merged.
    """

    FREE = "free"
    WRITING = "writing"
    SEALED = "sealed"
    CONSUMED = "consumed"


class SnapshotStep(Enum):
    """The value is for a person, in a story."""

    WRITE = "is to be written"
    SEAL = "is sealed"
    CONSUME = "is held by a commit"
    FREE = "is free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Its steps are in `snapshots.py`."""

    phase: SnapshotPhase = SnapshotPhase.FREE
    base_commit: int = 0
    step: int = 0  # of the generation that wrote it
    seq: int = 0  # of the question at that step: what was given up is written again at the same step
    generation: int = 0
    report: SnapshotSealed | None = None  # of all ranks, once it is sealed
    committed_in: int | None = None  # the commit that holds it
    ranges: tuple[DataRange, ...] = ()  # positions that it was trained on
    others: tuple[DataRange, ...] = ()  # of the snapshots in flight when the ranks were told to write it
    data_epoch: int = 0  # in which they were drawn
    overlap_steps: int = 0  # that the ranks may train beyond it before they take a commit that holds it
    sealed_at: float = 0.0
    is_arriving: bool = False  # sealed by all ranks; slices of other hosts are still on their way here
    is_lost: bool = False  # a host is gone with its part: only an exchange that had begun may bring it into a commit
    kept_for: int = 0  # with audits: the sync for which its contribution is, or is being, encoded and kept
    root: bytes = b""  # of that, once it is
    signature: Signature | None = None  # of the root, where this site has a key
    error_commits: tuple[int, ...] = ()  # of each fragment: which commit left the error that its contribution has

    @property
    def is_sealed(self) -> bool:
        """It is whole, and no commit that is applied holds it."""
        return self.phase is SnapshotPhase.SEALED

    @property
    def is_consumed(self) -> bool:
        """A commit that is applied holds it, and the workers have not merged that yet."""
        return self.phase is SnapshotPhase.CONSUMED

    @property
    def tokens(self) -> int:
        """That it was trained on."""
        return self.report.tokens if self.report is not None else 0


@dataclass(slots=True, kw_only=True)
class Exchange:
    plan: Plan
    tokens: int  # this site's weight in it; 0: it receives
    weights: tuple[int, ...]  # of the contributors, once they are said
    influences: tuple[int, ...] = ()  # the same, where averages are by influence
    is_behind: bool = False  # its base was not here when it began
    products: Products | None = None  # said of it, by a reducer; again on a new stream
    spread_until: float | None = None  # what this site sends; hurried: when it was
    finished: bool = False
    broken: bool = False
    said: Done | ExchangeFailed | None = None  # of it, by a contributor; again on a new stream

    @property
    def contributes(self) -> bool:
        """Whether this site has a part in the averages."""
        return self.tokens > 0

    @property
    def is_under_way(self) -> bool:
        """Its payloads may still come."""
        return not self.finished and not self.broken


@dataclass(slots=True, kw_only=True)
class Lane:
    fragment: int
    open: Open | None = None
    snapshot: Snapshot = field(default_factory=Snapshot)
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_STEPS))
    update_s: deque[float] = field(default_factory=lambda: deque(maxlen=UPDATES))  # from sealed to applied, each time
    ending_s: deque[float] = field(default_factory=lambda: deque(maxlen=UPDATES))  # from the end of sending to applied
    exchange: Exchange | None = None
    sent_for: int = 0  # the last sync in whose exchange this site contributes
    discarded_sync: int = 0  # the same when it last discarded what it had: a commit of that sync may hold this still
    next_plan: Plan | None = None  # not begun: its weights are to come, or, if it was made ahead, the boundary

    @property
    def plans(self) -> list[Plan]:
        """Those that this site knows of: the one that is under way, and the next one."""
        known = (self.exchange.plan if self.exchange is not None else None, self.next_plan)
        return [plan for plan in known if plan is not None]

    @property
    def phase(self) -> str:
        """In words, from the sealed snapshot to the commit that holds it; else empty."""
        if not self.snapshot.is_sealed:
            return ""
        if self.exchange is None or self.exchange.broken:
            return "ready"
        return "waiting for commit" if self.exchange.finished else "exchanging"
