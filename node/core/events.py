"""What happens to a site (events) and what its core wants done (outputs). Frozen dataclasses, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from atoll.protocol.errors import WorkerError
from atoll.protocol.layout import Manifest
from atoll.protocol.messages import (
    Commit,
    CoordinatorMessage,
    DataRange,
    Member,
    Outlier,
    Plan,
    Show,
    Shown,
    SiteMessage,
    Sources,
)


class AnswerKind(IntEnum):
    """Numbers of the local protocol (protocol/v1/local.proto)."""

    CONTINUE = 1
    SNAPSHOT = 2
    APPLY = 3
    STOP = 4


class MergeMode(IntEnum):
    REPLACE = 1
    MERGE = 2
    SHIFT = 3


@dataclass(frozen=True, slots=True)
class Values:
    """PUBLISH holds the outer values of this commit: REPLACE and MERGE read them, and a difference starts from them."""

    version: int


@dataclass(frozen=True, slots=True)
class Difference:
    """PUBLISH holds, for trainable tensors, what SHIFT adds: the base at commit `version` minus that at `base`.

    The next difference cannot be made of it: values come first.
    """

    base: int
    version: int


Content = Values | Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What every rank does at (step, seq). See protocol/v1/local.proto."""

    kind: AnswerKind
    next_step: int = 0
    fragment: int = 0
    version: int = 0
    mode: MergeMode = MergeMode.REPLACE
    run_step: int = 0
    run_tokens: int = 0
    reason: str = ""
    fresh: bool = False
    data_epoch: int = 0
    hash_shared: bool = False
    """Set for the ranks of a site among themselves."""


# --- events: the session


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A stream to the coordinator is up; the core answers with Hello."""


@dataclass(frozen=True, slots=True)
class SessionLost:
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    term: int
    message: CoordinatorMessage


# --- events: the workers, already agreed over all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersJoined:
    """Every rank has connected, their pieces tile every tensor exactly once, and the model fits on this machine."""

    generation: int
    manifest: Manifest
    data_fingerprint: bytes
    max_retained_bytes: int
    """What this node may hold as a reducer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryAsked:
    """The first rank asks at (step, seq); the others get the same answer."""

    generation: int
    step: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSealed:
    """Every owner has written its slices. `tokens` counts each data rank once; `samples_used` is how far into the queue
    of this epoch they were trained."""

    generation: int
    step: int
    tokens: int
    num_steps: int
    mean_loss: float
    train_s: float
    samples_used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAnnounced:
    """The ranks will draw samples, `round_samples` of the site for a batch of each."""

    generation: int
    num_samples: int
    round_samples: int
    rounds_ahead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawAsked:
    """A rank wants at least so many positions of the queue from `first` on."""

    generation: int
    rank: int
    epoch: int
    first: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Every rank has taken `version` from PUBLISH."""

    generation: int
    version: int
    wait_s: float


class FailureKind(Enum):
    CRASHED = "crashed"  # restarted by the core
    FATAL = "fatal"  # the site leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersFailed:
    generation: int
    kind: FailureKind
    text: str
    exit_code: int = WorkerError.exit_code
    """Of the node, if it is fatal."""
    num_steps: int = 0
    """That they had done, as far as they had said."""


@dataclass(frozen=True, slots=True)
class WorkersLost:
    """The connection of a rank ended: the first sign of a crash. The exit, which follows, says more."""

    generation: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersExited:
    """All processes of a generation are gone, and not because they were stopped."""

    generation: int
    code: int
    """0 if every rank ended well; else of the first process that did not, negative: killed by that signal."""
    text: str
    """One line on how it ended, then the last lines printed, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersLeft:
    """Every rank said goodbye: the loader ended, or they were told to stop."""

    generation: int
    reason: str


# --- events: results of outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSeeded:
    """Commit 0 is on this disk."""

    state_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFetched:
    """The outer state is complete and verified at `commit`."""

    commit: int
    state_hash: bytes
    run_step: int
    run_tokens: int
    final: bool = False


@dataclass(frozen=True, slots=True)
class FetchFailed:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFinished:
    sync: int
    attempt: int
    term: int
    payload_digest: bytes
    tokens: tuple[int, ...]
    """The weight of each contributor, as it was averaged."""
    sent_bytes: int
    received_bytes: int
    stood_out: Outlier | None = None
    """Of the contributions that were averaged here, the one that was nearest to its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeBroken:
    sync: int
    attempt: int
    term: int
    peer_site_id: int
    sending: bool
    phase: str
    text: str
    tensor: str = ""
    """Has no average that may be applied."""
    outliers: tuple[Outlier, ...] = ()
    """Because of these contributions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitApplied:
    commit: int
    state_hash: bytes


@dataclass(frozen=True, slots=True)
class ApplyFailed:
    """The payloads of a commit are not in the log, or do not have its digest: fetch them."""

    commit: int
    reason: str


@dataclass(frozen=True, slots=True)
class Published:
    """PUBLISH holds this now."""

    content: Content


@dataclass(frozen=True, slots=True)
class StateVerified:
    """What is left on this disk after DistrustState is whole, chunk by chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSaved:
    """Whole, on the disk, beside its place."""

    commit: int
    trouble: str = ""
    """Why it is not where it was asked for, and where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKept:
    """In its place."""

    commit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadsListed:
    sync: int
    attempt: int
    term: int
    hashes: bytes


@dataclass(frozen=True, slots=True)
class EvidenceShown:
    """What was asked for, or that it is not here."""

    shown: Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRolledBack:
    """What is left on this disk: commit and state hash of a whole state, if there is one."""

    branch: int
    held: tuple[int, bytes] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRebuilt:
    """The answer to RebuildCommit; `state_hash` is empty if it cannot be had here, and `text` says why."""

    commit: int
    state_hash: bytes
    oldest: int | None
    text: str = ""


@dataclass(frozen=True, slots=True)
class PeersProbed:
    """Those of the last ProbePeers that cannot be dialled from here; ascending."""

    unreachable_site_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """Ctrl-C, SIGTERM."""

    reason: str


@dataclass(frozen=True, slots=True)
class DataPlaneFailed:
    """A non-finite value, a full disk, damage that only this site can have: it cannot go on."""

    text: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed `next_deadline()`."""


Event = (
    SessionOpened | SessionLost | Received | WorkersJoined | BoundaryAsked | SnapshotSealed | Merged | WorkersFailed
    | WorkersLost | WorkersExited | WorkersLeft | StateSeeded | StateFetched | FetchFailed | ExchangeFinished
    | ExchangeBroken | CommitApplied | ApplyFailed | StateVerified | ModelSaved | ModelKept | Published
    | EvidenceShown | DiskRolledBack | LeaveAsked | DataPlaneFailed | DataAnnounced | DrawAsked | PayloadsListed
    | CommitRebuilt | PeersProbed | Tick
)  # fmt: skip


# --- outputs


@dataclass(frozen=True, slots=True)
class Send:
    message: SiteMessage


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Launch a new generation of workers; the settings of the run are known."""

    generation: int
    settings_json: str


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """End them at once (restart, or the site is leaving)."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeCrash:
    """The workers have crashed, or hang: WorkersFailed answers at once, with what they printed last."""

    generation: int
    text: str
    num_steps: int
    has_exited: bool
    """Then `text` ends with that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLayout:
    """The ranks may map the shared buffers and ask for their first values."""

    generation: int
    site_id: int
    run_seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWorkers:
    generation: int
    step: int
    seq: int
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDraw:
    generation: int
    rank: int
    epoch: int
    first: int
    ranges: tuple[DataRange, ...]


@dataclass(frozen=True, slots=True)
class SeedState:
    """Make commit 0 from SNAPSHOT (sealed), or from the saved model."""


@dataclass(frozen=True, slots=True)
class FetchState:
    """Bring the outer state to the newest attested commit: from nothing, or by the payloads of `sources.commits`."""

    sources: Sources


@dataclass(frozen=True, slots=True)
class CancelFetch:
    pass


@dataclass(frozen=True, slots=True)
class BeginExchange:
    plan: Plan
    contributes: bool


@dataclass(frozen=True, slots=True)
class WeighExchange:
    """The exchange of this plan began without the others' weights. All contributors are ready now: these are they, and
    who does not get on from now on has failed."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class CancelExchange:
    """Stop moving chunks of this attempt; keep contributions that are held."""

    sync: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ApplyCommit:
    commit: Commit


@dataclass(frozen=True, slots=True)
class PublishState:
    """Write this into PUBLISH. The outer state is at its version; a difference needs the values of its base there."""

    content: Content


@dataclass(frozen=True, slots=True)
class DropSync:
    """The sync is over (committed or abandoned): forget contributions that are held for it."""

    sync: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveModel:
    """Write the model of this commit, at which the outer state is, beside its place. Commits go on meanwhile."""

    commit: int
    run_step: int
    run_tokens: int


@dataclass(frozen=True, slots=True)
class KeepModel:
    """Put it in place of the one before."""

    commit: int


@dataclass(frozen=True, slots=True)
class DropModel:
    """Remove it, in place or beside it: it is not the run's."""

    commit: int


@dataclass(frozen=True, slots=True)
class DistrustState:
    """What is on this disk is not the run's state, or too old: each chunk is checked against its own hash, and
    snapshots go. What is left is compared with the others' chunk by chunk when it is fetched."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPayloads:
    """The hash of each payload of this attempt, as it is in the log."""

    sync: int
    attempt: int
    term: int


@dataclass(frozen=True, slots=True)
class SendManifest:
    """To the coordinator, in parts, on the stream that there is now."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class ProbePeers:
    """Find out, now and then, who of these can be dialled, instead of those before."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class DialBack:
    """This site lacks state and cannot dial here: dial it and answer what it asks for. Said again while it waits."""

    member: Member


@dataclass(frozen=True, slots=True)
class ShowEvidence:
    """One part of what settles a dispute, if it is here. EvidenceShown answers."""

    asked: Show


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildCommit:
    """Put the state at an older commit on the disk, beside the one that is held: the run is to go back to it. It need
    not be kept once a commit after `last_commit` is applied."""

    commit: int
    state_hash: bytes
    """What it had; empty if nobody knows."""
    last_commit: int


@dataclass(frozen=True, slots=True)
class RollBack:
    """Remove, for good, everything on this disk that belongs to commits after `commit`; note the new branch."""

    commit: int
    branch: int


@dataclass(frozen=True, slots=True)
class Report:
    """A line for a person; `level` as in logging."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Exit:
    """The node ends. `code` 0 is a clean end; `text` says why."""

    code: int
    text: str


Output = (
    Send | StartWorkers | StopWorkers | DescribeCrash | SendLayout | AnswerWorkers | SeedState | FetchState
    | CancelFetch | BeginExchange | WeighExchange | CancelExchange | ApplyCommit | PublishState | DropSync | SaveModel
    | KeepModel | DropModel | DistrustState | ShowEvidence | ListPayloads | RebuildCommit | RollBack | SendManifest
    | ProbePeers | DialBack | AnswerDraw | Report | Exit
)  # fmt: skip
