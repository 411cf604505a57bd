"""The messages with which a commit in dispute is settled: what is asked for, and the evidence that is shown.

Used through `messages`, as all other messages are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.fields import CoordinatorMessage, SiteMessage, bounded

MAX_LISTED_CHUNKS = 30_000  # of a sync whose payloads differ: their hashes fit one message
EVIDENCE_PART_BYTES = 1 << 18


class Evidence(IntEnum):
    UNSPECIFIED = 0
    CHUNK_HASHES = 1
    RECORD = 2
    PAYLOAD_HASHES = 3
    PAYLOAD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown(SiteMessage):
    commit: int
    evidence: Evidence
    chunk: int
    first_byte: int
    total_bytes: int
    data: bytes = bounded(EVIDENCE_PART_BYTES, b"")
    text: str = bounded(1024, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRebuilt(SiteMessage):
    commit: int
    state_hash: bytes = bounded(DIGEST_BYTES, b"")
    has_oldest: bool = False
    oldest_commit: int = 0
    text: str = bounded(1024, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadList(SiteMessage):
    sync: int
    attempt: int
    term: int
    hashes: bytes = bounded(32 * MAX_LISTED_CHUNKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPayloads(CoordinatorMessage):
    sync: int
    attempt: int
    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disputed(CoordinatorMessage):
    commit: int
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Show(CoordinatorMessage):
    commit: int
    evidence: Evidence
    chunk: int = 0
    first_byte: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildCommit(CoordinatorMessage):
    commit: int
    state_hash: bytes = bounded(DIGEST_BYTES, b"")
    last_commit: int
