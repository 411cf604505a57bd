"""The messages of a run that averages by influence (`sync.robust = "gram"`): inner products of contributions, and what
the coordinator finds by them.

Used through `messages`, as all other messages are.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.fields import CoordinatorMessage, SiteMessage, bounded
from atoll.protocol.sync_settings import MAX_COMPARED_SITES

MAX_PRODUCTS = MAX_COMPARED_SITES * (MAX_COMPARED_SITES + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Products(SiteMessage):
    sync: int
    attempt: int
    term: int
    products: tuple[float, ...] = bounded(MAX_PRODUCTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Influences(CoordinatorMessage):
    sync: int
    attempt: int
    term: int
    influences: tuple[int, ...] = bounded(MAX_COMPARED_SITES)
