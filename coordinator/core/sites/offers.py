"""Offers of models that are not known yet, and the one manifest that is on its way. Plain data; `manifests` decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.protocol.messages import Offer


@dataclass(slots=True, kw_only=True)
class Incoming:
    """The manifest of one stream's offer, in parts."""

    stream: int
    offer: Offer
    until: float | None
    """The stream has that long for the part that comes next; all parts move it. None: it is whole, and being read."""
    total_bytes: int = 0
    """0 until the first part."""
    data: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class Offers:
    waiting: dict[int, Offer] = field(default_factory=dict)
    """By stream, in the order in which they came."""
    incoming: Incoming | None = None
