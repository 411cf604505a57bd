"""The messages with which a reducer is audited: a chunk is averaged once more by a site that did not reduce it.

Used through `messages`, as all other messages are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from atoll.protocol.codecs import HEADER_BYTES
from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.fields import MAX_MEMBERS, CoordinatorMessage, SiteMessage, bounded, digest
from atoll.protocol.hash_tree import MAX_PROOF_BYTES
from atoll.protocol.members import Member
from atoll.protocol.sync_settings import MAX_CHUNK_ELEMENTS


class AuditOutcome(IntEnum):
    UNSPECIFIED = 0
    RIGHT = 1
    WRONG = 2
    UNKNOWN = 3


NO_ERROR = bytes(DIGEST_BYTES)
"""In place of the hash of an error, where there is none."""
MAX_ERROR_BYTES = 4 * MAX_CHUNK_ELEMENTS
MAX_SIGNATURE_BYTES = 80
"""Of ECDSA with P-256, DER: 72 at most."""
MAX_CERTIFICATE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    value: bytes = bounded(MAX_SIGNATURE_BYTES)
    certificate: bytes = bounded(MAX_CERTIFICATE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedErrors:
    before: bytes = digest()
    after: bytes = digest()
    signature: Signature | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    site_id: int
    first_chunks: tuple[int, ...] = bounded(MAX_MEMBERS)
    nums_chunks: tuple[int, ...] = bounded(MAX_MEMBERS)
    root: bytes = digest()
    signature: Signature | None = None
    errors: SignedErrors | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorsBefore:
    sync: int
    term: int
    attempt: int
    made: Made


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditChunk(CoordinatorMessage):
    number: int
    commit: int
    sync: int
    attempt: int
    term: int
    fragment: int
    base_commit: int
    contributors: tuple[Member, ...] = bounded(MAX_MEMBERS)
    roots: tuple[bytes, ...] = bounded(MAX_MEMBERS)
    chunk: int
    signatures: tuple[Signature, ...] = bounded(MAX_MEMBERS, ())
    made: Made | None = None
    before: ErrorsBefore | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FalsePayload:
    run_id: str = bounded(64)
    asked: AuditChunk
    up: str = bounded(32)
    down: str = bounded(32)
    aggregation: str = bounded(32)
    robust: str = bounded(32)
    clip: float
    trim: int
    num_elements: int
    place: int
    num_chunks: int
    contributions: tuple[bytes, ...] = bounded(MAX_MEMBERS)
    proofs: tuple[bytes, ...] = bounded(MAX_MEMBERS)
    payload_hash: bytes = digest()
    payload_place: int
    num_payloads: int
    payload_proof: bytes = bounded(MAX_PROOF_BYTES)
    error_beta: float = 0.0
    error: bytes = bounded(MAX_ERROR_BYTES, b"")
    error_proof: bytes = bounded(MAX_PROOF_BYTES, b"")
    left_hash: bytes = bounded(DIGEST_BYTES, b"")
    left_proof: bytes = bounded(MAX_PROOF_BYTES, b"")
    payload: bytes = bounded(MAX_ERROR_BYTES + HEADER_BYTES, b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAudited(SiteMessage):
    number: int
    outcome: AuditOutcome
    payload_hash: bytes = bounded(DIGEST_BYTES, b"")
    silent_site_ids: tuple[int, ...] = bounded(MAX_MEMBERS, ())
    refuted_site_ids: tuple[int, ...] = bounded(MAX_MEMBERS, ())
    text: str = bounded(1024, "")
    withheld: bool = False
