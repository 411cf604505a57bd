"""The session's messages as frozen dataclasses, one for each message of the same name in v1/*.proto.

The pure cores speak these; `wire.py` converts and checks bounds at the door. Fields are documented in the .proto files.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from atoll.protocol.audit_messages import (
    AuditChunk,
    AuditOutcome,
    ChunkAudited,
    ErrorsBefore,
    FalsePayload,
    Made,
    Signature,
    SignedErrors,
)
from atoll.protocol.data_messages import (
    MAX_RANGES_OF_COMMIT,
    MAX_RANGES_OF_SITE,
    DataRange,
    LeaseRequest,
    Leases,
    LineRanges,
)
from atoll.protocol.deposit_messages import Deposit, Deposits, DepositsReturned, ReturnDeposits
from atoll.protocol.dispute_messages import (
    EVIDENCE_PART_BYTES,
    MAX_LISTED_CHUNKS,
    CommitRebuilt,
    Disputed,
    Evidence,
    ListPayloads,
    PayloadList,
    RebuildCommit,
    Show,
    Shown,
)
from atoll.protocol.fields import MAX_MEMBERS, CoordinatorMessage, SiteMessage, bounded, digest
from atoll.protocol.figures import Figures, Readings, SyncPhases
from atoll.protocol.layout import MAX_GROUPS
from atoll.protocol.logged import Best, Logged, LoggedValue
from atoll.protocol.members import MAX_ENDPOINTS, Endpoint, Member
from atoll.protocol.product_messages import Influences, Products

MAX_LOG_COMMITS = 4096
MAX_FRAGMENTS = 1 << 10
MAX_ERROR_COMMITS = 1 << 18  # 64 fragments of 4,096 contributors
MAX_RATES = 2 * MAX_GROUPS
MAX_CHANGED_CHARACTERS = 1024
MAX_BANNED = 1 << 16  # names
MAX_PROBED = 32  # peers that one site probes
MAX_DONORS = 8  # that one site asks at once
MAX_LISTED_DONORS = 64  # that it is told of at once; of others when it asks again
MAX_WAITS = 64  # sites of each kind that a heartbeat names
MAX_PHASES = 64  # syncs of which a heartbeat says what they took
MAX_LINKS = 32  # of which a site says at once how they were used
MAX_TOKENS = 1 << 48  # of one site in one sync
MAX_MANIFEST_BYTES = 32 << 20
MANIFEST_PART_BYTES = 1 << 18  # a thin link must not keep heartbeats waiting behind one part


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    protocol_version: int
    run_id: str = bounded(64)
    term: int = 0
    site_id: int = 0
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    first_chunk: int
    num_chunks: int
    parents: tuple[int, ...] = bounded(MAX_MEMBERS, ())
    """Empty: a star around `top`."""
    top: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Open(CoordinatorMessage):
    sync: int
    fragment: int = 0
    base_commit: int
    run_step: int
    run_tokens: int
    num_steps: int
    overlap_steps: int = 0
    resting: tuple[int, ...] = bounded(MAX_MEMBERS, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(CoordinatorMessage):
    sync: int
    attempt: int
    term: int
    fragment: int = 0
    base_commit: int
    contributors: tuple[Member, ...] = bounded(MAX_MEMBERS)
    receivers: tuple[Member, ...] = bounded(MAX_MEMBERS, ())
    trees: tuple[Tree, ...] = bounded(1 << 16)
    stall_limit_s: float
    num_steps: int
    deadline_s: float
    slowest_bytes_per_s: int
    ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(CoordinatorMessage):
    commit: int
    sync: int
    attempt: int
    term: int
    fragment: int = 0
    contributors: tuple[Member, ...] = bounded(MAX_MEMBERS)
    payload_digest: bytes = digest()
    run_step: int
    run_tokens: int
    final: bool = False
    next: Open | None = None
    branch: int = 0
    done: tuple[LineRanges, ...] = bounded(MAX_MEMBERS, ())
    error_commits: tuple[int, ...] = bounded(MAX_ERROR_COMMITS, ())
    rates: tuple[float, ...] = bounded(MAX_RATES, ())
    changed_json: str = bounded(MAX_CHANGED_CHARACTERS, "")
    best: Best | None = None


# --- site -> coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(SiteMessage):
    name: str = bounded(64)
    key: bytes = bounded(32)
    address: str = bounded(256)
    has_state: bool = False
    last_commit: int = 0
    state_hash: bytes = bounded(32, b"")
    atoll_version: str = bounded(64, "")
    from_saved_model: bool = False
    branch: int = 0
    process_id: bytes = bounded(16, b"")
    deposits_to: int = 0
    takes_changes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(SiteMessage):
    manifest_digest: bytes = digest()
    data_fingerprint: bytes = bounded(32, b"")
    max_retained_bytes: int
    bandwidth_bytes_per_s: int = 0
    endpoints: tuple[Endpoint, ...] = bounded(MAX_ENDPOINTS, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestPart(SiteMessage):
    first_byte: int
    total_bytes: int
    data: bytes = bounded(MANIFEST_PART_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied(SiteMessage):
    commit: int
    state_hash: bytes = digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(SiteMessage):
    sync: int
    tokens: int
    num_steps: int
    mean_loss: float = 0.0
    train_s: float = 0.0
    ranges: tuple[DataRange, ...] = bounded(MAX_RANGES_OF_SITE, ())
    unreachable_site_ids: tuple[int, ...] = bounded(MAX_MEMBERS, ())
    error_commits: tuple[int, ...] = bounded(MAX_FRAGMENTS, ())
    rates: tuple[float, ...] = bounded(MAX_RATES, ())
    of_shards: bool = False
    contributions_root: bytes = bounded(32, b"")
    signature: Signature | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    site_id: int
    norm: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    site_id: int
    received_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    num_chunks: int
    norms: tuple[float, ...] = bounded(MAX_MEMBERS, ())
    num_high: tuple[int, ...] = bounded(MAX_MEMBERS, ())
    cosines: tuple[float, ...] = bounded(MAX_MEMBERS, ())
    average_share: float = 0.0
    last_cosine: tuple[float, ...] = bounded(1, ())
    codec_error: tuple[float, ...] = bounded(1, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(SiteMessage):
    sync: int
    attempt: int
    term: int
    payload_digest: bytes = digest()
    last_commit: int
    state_hash: bytes = digest()
    tokens: tuple[int, ...] = bounded(MAX_MEMBERS, ())
    stood_out: Outlier | None = None
    links: tuple[LinkUse, ...] = bounded(MAX_LINKS, ())
    averaged: Averaged | None = None
    payloads_root: bytes = bounded(32, b"")
    signature: Signature | None = None
    errors: SignedErrors | None = None


class Direction(IntEnum):
    UNSPECIFIED = 0
    SENDING = 1
    RECEIVING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFailed(SiteMessage):
    sync: int
    attempt: int
    term: int
    peer_site_id: int
    direction: Direction
    phase: str = bounded(64)
    text: str = bounded(1024)
    tensor: str = bounded(1024, "")
    outliers: tuple[Outlier, ...] = bounded(MAX_MEMBERS, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Figures, SiteMessage):
    phase: str = bounded(64)
    loss: float = 0.0
    moved_bytes: int = 0
    doing: str = bounded(64, "")
    limit_s: float = 0.0
    waits_for_contributions: tuple[int, ...] = bounded(MAX_WAITS, ())
    waits_for_payloads: tuple[int, ...] = bounded(MAX_WAITS, ())
    progress: int = 0
    phases: tuple[SyncPhases, ...] = bounded(MAX_PHASES, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry(Readings, SiteMessage):
    """Nothing is decided by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindSources(SiteMessage):
    has_state: bool
    after_commit: int
    lacks_commit: int = 0
    undialled_site_ids: tuple[int, ...] = bounded(MAX_DONORS, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged(SiteMessage):
    commit: int
    text: str = bounded(1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(SiteMessage):
    reason: str = bounded(1024)
    fatal: bool = False


# --- coordinator -> site


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(CoordinatorMessage):
    settings_json: str = bounded(1 << 20)
    site_id: int = 0
    last_commit: int = 0
    started: bool = False
    parent_json: str = bounded(1 << 16, "")
    error_commits: tuple[int, ...] = bounded(MAX_FRAGMENTS, ())
    changed_json: str = bounded(MAX_CHANGED_CHARACTERS, "")
    takes_logged: bool = False


class AdmittedAs(IntEnum):
    UNSPECIFIED = 0
    SEEDER = 1
    JOINER = 2
    MEMBER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted(CoordinatorMessage):
    site_id: int
    admitted_as: AdmittedAs
    run_seed: int
    state_hash: bytes = bounded(32, b"")
    last_commit: int = 0


class RefusedKind(IntEnum):
    UNSPECIFIED = 0
    PROTOCOL = 1
    RUN = 2
    MANIFEST = 3
    DATA = 4
    NAME_TAKEN = 5
    STALE = 6
    SUPERSEDED = 7
    INVALID = 8
    STATE = 9
    FULL = 10
    BANNED = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(CoordinatorMessage):
    kind: RefusedKind
    text: str = bounded(4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendManifest(CoordinatorMessage):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned(CoordinatorMessage):
    sync: int
    reason: str = bounded(1024)
    next: Open | None = None
    without_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Donor:
    site_id: int
    incarnation: int
    address: str = bounded(256)
    commit: int
    name: str = bounded(64, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    commit: int
    state_hash: bytes = digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources(CoordinatorMessage):
    attested: tuple[Attestation, ...] = bounded(MAX_LOG_COMMITS, ())
    donors: tuple[Donor, ...] = bounded(MAX_LISTED_DONORS, ())
    commits: tuple[Commit, ...] = bounded(MAX_LOG_COMMITS, ())
    more: bool = False
    touched: tuple[int, ...] = bounded(MAX_FRAGMENTS, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted(CoordinatorMessage):
    reason: str = bounded(1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack(CoordinatorMessage):
    branch: int
    commit: int
    reason: str = bounded(1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(CoordinatorMessage):
    commit: int
    reason: str = bounded(1024)
    run_step: int
    run_tokens: int
    state_hash: bytes = bounded(32, b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights(CoordinatorMessage):
    sync: int
    attempt: int
    term: int
    tokens: tuple[int, ...] = bounded(MAX_MEMBERS)
    roots: tuple[bytes, ...] = bounded(MAX_MEMBERS, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers(CoordinatorMessage):
    members: tuple[Member, ...] = bounded(MAX_PROBED, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Banned(CoordinatorMessage):
    names: tuple[str, ...] = bounded(MAX_BANNED, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(CoordinatorMessage):
    reason: str = bounded(1024, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class DialBack(CoordinatorMessage):
    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse(CoordinatorMessage):
    pass
