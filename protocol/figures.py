"""The figures of a site, declared once for all places that carry or show them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a node measures of its site and people are shown: in heartbeats, metrics and on the status page alike."""

    inner_step: int = 0
    steps_per_s: float = 0.0
    sent_bytes: int = 0
    """Peer traffic since the node started; so are the next three."""
    received_bytes: int = 0
    train_s: float = 0.0
    wait_s: float = 0.0
    num_ranks: int = 0
    error_share: float = 0.0
    """Norm of the error feedback over that of what was to be sent, of the fragment with the largest."""
