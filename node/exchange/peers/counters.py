"""What moved and what was refused, as plain attributes for the metrics collector."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from atoll.protocol.errors import RefusedError


@dataclass(slots=True)
class Counters:
    """Of a node since it started."""

    sent_bytes: int = 0
    """Of messages between nodes, without the transport's own."""
    sent_contribution_bytes: int = 0
    """Of these, in exchanges: to reducers, and averages to all."""
    sent_average_bytes: int = 0
    received_bytes: int = 0
    refused: Counter[type[RefusedError]] = field(default_factory=Counter)
    """Messages refused here, by their error."""
    moved_bytes: int = 0
    """Chunk data that got a site on: it was lacking here and came, or a site that lacks it was given it."""
    reconnects: int = 0
    """Streams that broke and were opened again."""

    def refuse(self, error: RefusedError) -> None:
        self.refused[type(error)] += 1
