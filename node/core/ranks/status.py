"""What is known of one rank: what it does next, when it last got on, and what it said last; and of the points to which
all ranks come."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from atoll.node.core.events import Answer
from atoll.node.local_protocol import NO_CHECKPOINTS, NO_READINGS, CheckpointCounts, RankReadings, SealedReport

STORY = 12
"""Of a rank's last steps."""


class Due(Enum):
    """What a rank does next; the value is for a person."""

    HELLO = "starting"
    JOIN = "building its model"
    LAYOUT = "waiting to be admitted"
    BOUNDARY = "training"
    ANSWER = "waiting for the node"
    SEALED = "writing its snapshot"
    MERGED = "taking new parameters"
    GOODBYE = "told to stop"
    GONE = "done"


WAITS_FOR_NODE = (Due.LAYOUT, Due.ANSWER, Due.GONE)


@dataclass(slots=True)
class RankStatus:
    """What is known of one rank. Times are the caller's clock, seconds."""

    rank: int
    moved_at: float
    """When it last did a step or went on to something else. Saying the same again is not getting on."""
    due: Due = Due.HELLO
    pid: int = 0
    step: int = 0
    """Optimizer steps in this generation, as far as it has said."""
    steps_per_s: float = 0.0
    busy: str = ""
    busy_since: float = 0.0
    busy_until: float = 0.0
    point: int = 0
    """Index of the point that it comes to next or is at."""
    checkpoints: CheckpointCounts = NO_CHECKPOINTS
    readings: RankReadings = NO_READINGS
    data_rank: int = 0
    """The same on ranks that see the same batch."""
    draws_since: float | None = None
    """It waits for samples that are not leased yet."""
    data_epoch: int = 0
    """As the last APPLY said; see node/core/leases.py."""
    num_given: int = 0
    """Places of the site's queue, from 0 on, that it was told in that epoch."""
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY))
    """What it said and was told last, for whoever looks for the reason of an illegal step."""


@dataclass(slots=True)
class Point:
    """A (step, seq) at which all ranks ask, and what they did there."""

    step: int
    seq: int
    asked: bool = False
    answer: Answer | None = None
    sealed: dict[int, SealedReport] = field(default_factory=dict)
    merged: dict[int, float] = field(default_factory=dict)  # rank -> wait_s

    def __str__(self) -> str:
        return f"step {self.step}" + (f" (question {self.seq})" if self.seq else "")
