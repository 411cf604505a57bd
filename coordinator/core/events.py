"""What happens to the coordinator (events), and what its core wants done (outputs)."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.coordinator.core.asked import (
    Asked,
    AuditAsked,
    BanAsked,
    DrainAsked,
    EvictAsked,
    InviteAsked,
    JoinAsked,
    LiftBanAsked,
    NoteAsked,
    PauseAsked,
    RenewAsked,
    ResetAsked,
    ResumeAsked,
    RollbackAsked,
    RotateAsked,
    SetAsked,
    StopAsked,
    TakeBackAsked,
)
from atoll.coordinator.core.records import (
    AbandonRecord,
    AttestationRecord,
    AuditRecord,
    AuditsEndedRecord,
    BanLiftedRecord,
    BanRecord,
    ChangedRecord,
    CommitRecord,
    CurveRecord,
    DoneRecord,
    DrawingRecord,
    ExclusionRecord,
    FinishedRecord,
    ForgetRecord,
    InfluencesRecord,
    InviteForgottenRecord,
    InviteRecord,
    LeaseRecord,
    LineRecord,
    ManifestRecord,
    OfPlan,
    OpenAuditsRecord,
    OpenRecord,
    PausedRecord,
    PlanRecord,
    Record,
    ResetRecord,
    ResumedRecord,
    RollbackRecord,
    SiteRecord,
    StopRecord,
    WeightsRecord,
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
    fault: Exception | None = None
    """That nobody foresaw, for whoever is to mend it."""


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
