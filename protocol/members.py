"""A site as others are told of it.

Used through `messages`, as all messages are.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.fields import bounded

MAX_ENDPOINTS = 63  # of a site, beside its first


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    address: str = bounded(256)
    first_chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    site_id: int
    incarnation: int
    address: str = bounded(256)
    tokens: int = 0
    endpoints: tuple[Endpoint, ...] = bounded(MAX_ENDPOINTS, ())
    name: str = bounded(64, "")
    influence: int = 0
