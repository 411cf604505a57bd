"""What a coordinator deposits with sites, and how it gets it back: records of its store, for the day on which only an
old copy of that is left.

Used through `messages`, as all other messages are.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.fields import CoordinatorMessage, SiteMessage, bounded

MAX_DEPOSITS_AT_ONCE = 1 << 12
MAX_DEPOSIT_BYTES = 16 << 20
"""Of the record of a commit of a run as large as may be."""
DEPOSITS_PART_BYTES = 1 << 18
"""Of one message, if that is more than one record: heartbeats do not wait behind many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deposit:
    """A record as it was kept. A later one of the same key (`kind`, `number`, `part`, `name`) takes its place."""

    seq: int
    """In the order in which records were kept, through all terms."""
    record: str = bounded(32)
    """Which record it is: what ends another one has that one's key."""
    kind: str = bounded(32)
    number: int
    part: int
    name: str = bounded(256)
    body: bytes = bounded(MAX_DEPOSIT_BYTES)
    kept_at: float
    """Seconds since 1970."""
    seal: bytes = bounded(DIGEST_BYTES, b"")
    """By a key of the run's root; in a run in plain text nobody needs one to make it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deposits(CoordinatorMessage):
    deposits: tuple[Deposit, ...] = bounded(MAX_DEPOSITS_AT_ONCE, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnDeposits(CoordinatorMessage):
    after_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DepositsReturned(SiteMessage):
    deposits: tuple[Deposit, ...] = bounded(MAX_DEPOSITS_AT_ONCE, ())
    is_last: bool
