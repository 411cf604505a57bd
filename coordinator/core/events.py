"""What happens to the coordinator (events), what its core wants done (outputs), and what it wants kept (records)."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.coordinator.core.asked import (
    Asked,
    EvictAsked,
    InviteAsked,
    JoinAsked,
    LetInAsked,
    ResetAsked,
    RollbackAsked,
    StopAsked,
    TakeBackAsked,
)
from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.protocol.layout import Manifest, Role
from atoll.protocol.log_length import LogLength
from atoll.protocol.messages import (
    Commit,
    CoordinatorMessage,
    DataRange,
    Endpoint,
    Header,
    Open,
    Outlier,
    Plan,
    SiteMessage,
)
from atoll.protocol.outer import OuterStep
from atoll.protocol.settings import RunSettings

# --- events


@dataclass(frozen=True, slots=True)
class Certified:
    """Whom a stream is of, by its certificate."""

    name: str
    key_digest: bytes


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """`stream` is a number that the shell never uses again. In plain text nobody knows whom it is of."""

    stream: int
    certified: Certified | None = None


@dataclass(frozen=True, slots=True)
class StreamClosed:
    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """`ack` is how many of the outputs `Send` on this stream the site has received."""

    stream: int
    header: Header
    message: SiteMessage
    ack: int = 0


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that breaks a rule: its site is refused. Nobody else notices."""

    stream: int
    text: str


@dataclass(frozen=True, slots=True)
class Garbled:
    """Bytes that are no message, from a link that spoils what it carries: the stream ends, and its site may come back
    on another."""

    stream: int
    text: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed `next_deadline()`."""


# --- records


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRecord:
    """A site that was ever admitted. Its id and name are never given to another."""

    site_id: int
    name: str
    key_digest: bytes
    incarnation: int
    address: str
    live: bool
    """Admitted and neither lost nor gone; such a site has one lease to come back after a restart."""
    evicted: str
    """Why this incarnation was evicted, until it says Hello again knowing it; empty if it was not."""
    max_retained_bytes: int
    bandwidth_bytes_per_s: int
    may_hold: int
    """Of a site that is not live: the newest commit that its disk may have."""
    voided_sync: int
    """The last sync in which a plan listed this incarnation and it discarded its contribution, as it did in all syncs
    before; 0 if there is none."""
    contributed: bool
    """To a commit, ever: such a site is not forgotten."""
    strikes: int
    """How often it was found out, less those that are forgiven (`conduct`)."""
    has_contributed: bool = False
    """Since it was admitted."""
    endpoints: tuple[Endpoint, ...] = ()  # beside the address
    is_certified: bool = False
    """Its key is that of a certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRecord:
    """Sites that have gone and never contributed, with their lines of positions. Their ids are not given again."""

    site_ids: tuple[int, ...]
    last_site_id: int
    """The highest ever given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRecord:
    """What the first site offered; every other one must match."""

    manifest: Manifest
    data_fingerprint: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRecord:
    open: Open
    expected: tuple[int, ...]
    """Ids of the sites that this sync waits for, ascending."""


@dataclass(frozen=True, slots=True)
class PlanRecord:
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRecord:
    """All contributors of a plan are ready: what is known of each, in the order of contributors."""

    sync: int
    attempt: int
    tokens: tuple[int, ...]
    """Its weight."""
    said: tuple[int, ...]
    """Tokens that its Ready says. Its weight may be less."""
    ranges: tuple[tuple[DataRange, ...], ...]
    """What it was trained on: the commit of this attempt lists it."""
    error_commits: tuple[tuple[int, ...], ...] = ()
    """What its Ready says of its error feedback; so does the commit. Empty: nobody has any."""
    rates: tuple[float, ...] = ()
    """What each Ready says, with gradient exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    commit: Commit
    mean_loss: float | None
    """Of the contributors in training since the last commit, weighted by tokens; None if none said it, or no number is
    so large. So is the next one."""
    median_loss: float | None
    """The median over the same contributors: the run's loss, which no single site can falsify."""
    cut: tuple[str, ...] = ()
    """Whose weights are less than what their sites said, in words."""
    stood_out: Outlier | None = None
    """The contribution to a trainable chunk that was nearest to its limit, if one was near to it."""
    touched: tuple[int, ...] = ()
    """Of each fragment, the last commit before this one that touched it; empty in a run with one."""
    resting: tuple[int, ...] = ()
    """Ids of the sites that rested in its sync, ascending."""


@dataclass(frozen=True, slots=True)
class AbandonRecord:
    sync: int
    reason: str
    num_abandoned: int
    """Of the whole run, with this one."""


@dataclass(frozen=True, slots=True)
class AttestationRecord:
    """The state hash that sites agree on for a commit; a later record for the same commit replaces it. Empty: it is
    disputed, and what was attested stands against nobody who comes after a restart."""

    commit: int
    state_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRecord:
    """A line of positions (`ledger.Line`) but for its leases and what is done."""

    line: int
    num_samples: int
    frontier: int
    returned: tuple[DataRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneRecord:
    """Everything of a line that commits list."""

    line: int
    ranges: tuple[DataRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """Everything that one holder leases in a line; nothing: it is forgotten."""

    line: int
    site_id: int
    incarnation: int
    ranges: tuple[DataRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRecord:
    """Commits after `commit` are void; those that follow it are of the new `branch`."""

    branch: int
    commit: int
    voided: tuple[int, ...]
    """Numbers of the commits that were void from then on, ascending."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExclusionRecord:
    """A site was left out of a sync because a reducer found its contribution absurd."""

    sync: int
    attempt: int
    """In which it was found."""
    site_id: int
    incarnation: int
    by_site_id: int
    reason: str
    fragment: int = 0
    """Of the sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptOutRecord:
    """Neither this name nor this key comes in any more. A later record of the name replaces it."""

    name: str
    key_digest: bytes
    """Empty if no site of that name was ever here."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteRecord:
    """A later one of the same id says that it was used."""

    invite_id: str
    number: int
    """Invites count from 1."""
    role: str
    name: str
    expires_s: float
    used_s: float = 0.0
    key_digest: bytes = b""
    """Of the key that used it; empty until then."""


@dataclass(frozen=True, slots=True)
class InviteForgottenRecord:
    invite_id: str


@dataclass(frozen=True, slots=True)
class LetInRecord:
    name: str


@dataclass(frozen=True, slots=True)
class ResetRecord:
    """Before training: sites, model, starting state and the account of samples are forgotten."""

    void_starts: tuple[bytes, ...]
    """State hashes of commit 0 that were ever taken back, ascending."""
    last_site_id: int
    """The highest ever given: ids are not given again."""


@dataclass(frozen=True, slots=True)
class StopRecord:
    reason: str


@dataclass(frozen=True, slots=True)
class FinishedRecord:
    commit: int
    reason: str


Record = (
    SiteRecord | ForgetRecord | ManifestRecord | OpenRecord | PlanRecord | WeightsRecord | CommitRecord | AbandonRecord
    | AttestationRecord | LineRecord | DoneRecord | LeaseRecord | RollbackRecord | ExclusionRecord | KeptOutRecord
    | InviteRecord | InviteForgottenRecord | LetInRecord | ResetRecord | StopRecord | FinishedRecord
)  # fmt: skip


# --- events that answer outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitsRead:
    """The answer to ReadCommits."""

    commits: tuple[CommitRecord, ...]
    """Ascending and without gaps."""
    attestations: tuple[AttestationRecord, ...]
    """Those of the same commits that were attested, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRead:
    """The answer to ReadManifest."""

    stream: int
    manifest: Manifest | None = None
    chunk_sizes: ChunkSizes = field(default_factory=ChunkSizes)
    log_length: LogLength | None = None
    problem: str = ""
    """Why the run cannot have it: it is none, is too large, or is not the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """The answer to Recompute."""

    of: Recompute
    chunk_hash: bytes
    """Of the new record."""
    problem: str = ""
    """Why it cannot be computed here."""


Event = (
    StreamOpened | StreamClosed | Received | Malformed | Garbled | Tick | Asked | CommitsRead | ManifestRead
    | Recomputed
)  # fmt: skip


# --- outputs


@dataclass(frozen=True, slots=True)
class Persist:
    """All of it in one transaction, before any later output is executed."""

    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Send:
    stream: int
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class CloseStream:
    """After everything that was sent on it."""

    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """A line for a person; `level` as in logging."""

    level: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCommits:
    """From the store: commits `first` to `last`, which are older than the log. CommitsRead answers."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadManifest:
    """`manifests.read` away from the event loop: a manifest of many tensors takes seconds. ManifestRead answers."""

    stream: int
    data: bytes
    settings: RunSettings
    known: Manifest | None
    """The run's; None if this becomes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """`evidence.recompute` away from the event loop: a chunk takes a second. Recomputed answers."""

    role: Role
    dtype: str
    num_elements: int
    outer: OuterStep
    record: bytes | bytearray
    payload: bytes | bytearray
    tokens: tuple[int, ...] = ()
    """Of the contributors of its commit."""


@dataclass(frozen=True, slots=True)
class Answer:
    """To a person who asked for something: what came of it. After everything that was persisted before."""

    request: int
    problem: str
    """Empty: it is done."""
    found: str = ""
    """How the run stood: that it was over already, or why it was paused."""


Output = Persist | Send | CloseStream | Report | ReadCommits | ReadManifest | Recompute | Answer
