"""Where a site begins in a ring of others: sites that join together have ids that follow each other, and are to begin
far apart. Pure."""

from __future__ import annotations

_GOLDEN = 0x9E3779B1
"""2^32 divided by the golden ratio: multiples of it, modulo 2^32, are spread evenly, however many there are."""


def place(site_id: int, size: int) -> int:
    """Below `size`, which is not zero."""
    return (site_id * _GOLDEN % (1 << 32) * size) >> 32
