"""Who says a message and what its fields may carry, said where it is declared; `wire.py` holds what arrives to it."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from atoll.protocol.digest import DIGEST_BYTES

MAX_MEMBERS = 4096  # of a run


class SiteMessage:
    """What a site says to the coordinator."""

    __slots__ = ()


class CoordinatorMessage:
    """What the coordinator says to a site."""

    __slots__ = ()


def bounded(limit: int, default: Any = None) -> Any:
    """A field whose length (characters, bytes, items) may not exceed `limit` when it arrives."""
    metadata = {"max": limit}
    return field(metadata=metadata) if default is None else field(default=default, metadata=metadata)


def digest() -> Any:
    """A field that holds a whole digest when it arrives."""
    return field(metadata={"min": DIGEST_BYTES, "max": DIGEST_BYTES})
