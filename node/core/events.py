"""What happens to a site, and what its ranks are told at a boundary. What its core wants done is in `outputs.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from atoll.node.core.exchange_events import ExchangeFinished, ProductsMade
from atoll.node.core.host_events import HostErrors, HostsChanged, SlicesArrived, SnapshotShared
from atoll.node.core.ranks.pieces import SitePieces
from atoll.node.local_protocol import Said
from atoll.protocol.errors import WorkerError
from atoll.protocol.layout import Manifest
from atoll.protocol.messages import CoordinatorMessage, Endpoint, Plan, Signature, SiteMessage


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
    MIX = 4

    def base(self, *, before: int, snapshot: int, now: int) -> int:
        """The moment after which the ranks have trained what the outer state lacks, once they have merged. Requires the
        moment of the base before, of the snapshot and of the merge."""
        if self is MergeMode.REPLACE:
            return now
        return before if self is MergeMode.SHIFT else snapshot


@dataclass(frozen=True, slots=True)
class Values:
    """PUBLISH holds the outer values that the fragment has at this commit: all but SHIFT read them, and a difference
    starts from them."""

    version: int
    fragment: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """PUBLISH holds, for trainable tensors of the fragment, what SHIFT adds: the base at commit `version` minus that at
    `base`.

    The next difference cannot be made of it: values come first.
    """

    base: int
    version: int
    fragment: int = 0


Content = Values | Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What every rank does at (step, seq). See protocol/v1/local.proto."""

    kind: AnswerKind
    next_step: int = 0
    fragment: int = 0
    version: int = 0
    """Of APPLY. Of CONTINUE, if it is not 0: PUBLISH changes to it from now on."""
    mode: MergeMode = MergeMode.REPLACE
    run_step: int = 0
    run_tokens: int = 0
    run_length: int = 0
    site_index: int = 0
    num_sites: int = 0
    """0: not known."""
    reason: str = ""
    fresh: bool = False
    data_epoch: int = 0
    hash_shared: bool = False
    """Set for the ranks of a site among themselves."""
    run_over: bool = False


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


# --- events: one rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSaid:
    """One message of a rank, as it came through the socket."""

    generation: int
    rank: int
    said: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """The connection of a rank ended; `text` says how. The exit, which says more, follows."""

    generation: int
    rank: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecesMerged:
    """What the ranks of MergePieces hold together, and the node has room for; or why their pieces make no model."""

    generation: int
    pieces: SitePieces | str
    max_retained_bytes: int = 0
    """What this node may hold as a reducer."""
    endpoints: tuple[Endpoint, ...] = ()
    """Of the other hosts of the site."""


@dataclass(frozen=True, slots=True)
class LayoutSent:
    """SendLayout is carried out."""

    generation: int


# --- events: the workers, already agreed over all ranks; the core makes them of those above


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersJoined:
    """Every rank has connected, and their pieces tile every tensor exactly once."""

    generation: int
    manifest: Manifest
    data_fingerprint: bytes
    max_retained_bytes: int = 0
    """What this node may hold as a reducer."""
    endpoints: tuple[Endpoint, ...] = ()
    """Of the other hosts of the site."""
    read_in_place: bool = False
    """They take outer values from the outer file, which keeps those that they may still read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryAsked:
    """The first rank asks at (step, seq); the others get the same answer."""

    generation: int
    step: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSealed:
    """Every owner has written its slices. `tokens` counts each data rank once; `samples_used` is how far into the queue
    of this epoch they were trained. `is_arriving`: slices that were written on other hosts are still on their way."""

    generation: int
    step: int
    tokens: int
    num_steps: int
    mean_loss: float
    train_s: float
    samples_used: int = 0
    rates: tuple[float, ...] = ()
    of_shards: bool = False
    is_arriving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotArrived:
    """Of the snapshot of that fragment that ranks wrote at (step, seq), each host has what it is to send."""

    generation: int
    fragment: int
    step: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAnnounced:
    """The ranks will draw samples, `round_samples` of the site for a batch of each."""

    generation: int
    num_samples: int
    round_samples: int
    rounds_ahead: int
    of_shards: bool = False
    """How many steps a round takes is not known."""


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
    by_script: bool = False
    """Values that are not finite, and it looks as if the script's own steps made them."""


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
    touched: tuple[int, ...] = ()
    """Of each fragment, the last commit that did; empty: it may be `commit`."""


@dataclass(frozen=True, slots=True)
class FetchFailed:
    reason: str
    has_moved: bool = False
    """What is on the disk is not at the commit any more at which it was."""


@dataclass(frozen=True, slots=True)
class ExchangeBroken:
    """`error` says what failed, and with which peer."""

    plan: Plan
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitApplied:
    commit: int
    state_hash: bytes


@dataclass(frozen=True, slots=True)
class ContributionsKept:
    """What this site contributes to the sync, which is of that fragment. `root`: empty if it could not be encoded,
    because its base is gone. `signature`: of it; None in plain text."""

    sync: int
    fragment: int
    root: bytes
    signature: Signature | None = None


@dataclass(frozen=True, slots=True)
class ErrorsAdvanced:
    """`problem`: why that was not possible; None: it was. `share`: the norm of the error over that of what was to be
    sent."""

    problem: str | None = None
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class ApplyFailed:
    """The payloads of a commit are not in the log, or do not have its digest: fetch them."""

    commit: int
    reason: str
    has_moved: bool = False
    """Some chunks are at this commit."""


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


@dataclass(frozen=True, slots=True)
class Fulfilled:
    """Words for the coordinator that came of a Fulfil."""

    message: SiteMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcesWanted:
    """A fetch that runs has nothing to go on from: what has changed at the coordinator is to be told to it."""

    held: int | None
    """The commit of the whole state on this disk, if there is one."""
    undialled_site_ids: tuple[int, ...]
    """Donors that are to dial this site."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRolledBack:
    """What is left on this disk: commit and state hash of a whole state, if there is one."""

    branch: int
    held: tuple[int, bytes] | None


@dataclass(frozen=True, slots=True)
class PeersProbed:
    """Of the last Peers, those that cannot be dialled from here; ascending."""

    unreachable_site_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """Ctrl-C, SIGTERM."""

    reason: str
    at_once: bool = False
    """Whatever is under way."""


@dataclass(frozen=True, slots=True)
class NodeFailed:
    """A non-finite value, a full disk, damage that only this site can have, a fault of the node: it cannot go on."""

    text: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed `next_deadline()`."""


RankEvent = RankSaid | RankLost | PiecesMerged | LayoutSent | SlicesArrived | SnapshotShared
OfSite = (
    WorkersJoined | BoundaryAsked | SnapshotSealed | SnapshotArrived | Merged | DataAnnounced | DrawAsked
    | WorkersFailed | WorkersLeft
)  # fmt: skip
"""What becomes of events of ranks."""
OfWorkers = RankEvent | OfSite
"""They count while that generation runs."""
Event = (
    OfWorkers | SessionOpened | SessionLost | Received | Fulfilled | PeersProbed | WorkersExited
    | StateSeeded | StateFetched | FetchFailed | SourcesWanted | ExchangeFinished | ExchangeBroken | CommitApplied
    | ContributionsKept | ErrorsAdvanced | ApplyFailed | StateVerified | ModelSaved | ModelKept | Published
    | ProductsMade | DiskRolledBack | HostsChanged | HostErrors | LeaveAsked | NodeFailed | Tick
)  # fmt: skip
