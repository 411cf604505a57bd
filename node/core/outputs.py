"""What a site's core wants done. Frozen dataclasses, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.node.core.events import Answer, Content
from atoll.node.local_protocol import LocalJoin
from atoll.protocol import messages as m


@dataclass(frozen=True, slots=True)
class Send:
    message: m.SiteMessage


@dataclass(frozen=True, slots=True)
class Beat:
    """Send a Heartbeat with the figures of now."""


@dataclass(frozen=True, slots=True)
class Fulfil:
    """Do what the coordinator asks for, of which the core decides nothing. Fulfilled brings what is to be said of it,
    and PeersProbed who cannot be dialled."""

    asked: m.SendManifest | m.Peers | m.DialBack | m.Banned | m.Drain | m.Show | m.RebuildCommit


@dataclass(frozen=True, slots=True)
class ListPayloads:
    """The coordinator asks for the hashes of the payloads that the site has of that plan; Fulfilled brings them."""

    plan: m.Plan


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
    rank: int | None = None
    """Which one is lost, or hangs, where one is to blame. Of another host nothing is known here that it printed."""


@dataclass(frozen=True, slots=True)
class RefuseRank:
    """Cut it off, with the reason: it may not say what it said."""

    generation: int
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class MergePieces:
    """Every rank has said what it holds. PiecesMerged says what that is together, and WorkersFailed that the node has
    no room for it."""

    generation: int
    ranks: tuple[LocalJoin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLayout:
    """The ranks may map the shared buffers and ask for their first values."""

    generation: int
    site_id: int
    run_seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWorkers:
    """What all ranks do at (step, seq)."""

    generation: int
    step: int
    seq: int
    answer: Answer
    ranks: tuple[int, ...] = ()
    """Those that ask there now; the others are answered when they ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSnapshot:
    """All ranks have sealed the snapshot of (step, seq): other hosts than host 0 are to have what they send of it.
    SnapshotShared ends it."""

    generation: int
    fragment: int
    step: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDraw:
    generation: int
    rank: int
    epoch: int
    first: int
    ranges: tuple[m.DataRange, ...]


@dataclass(frozen=True, slots=True)
class SeedState:
    """Make commit 0 from SNAPSHOT (sealed), or from the saved model."""


@dataclass(frozen=True, slots=True)
class FetchState:
    """Bring the outer state to the newest attested commit: from nothing, or by the payloads of `sources.commits`."""

    sources: m.Sources


@dataclass(frozen=True, slots=True)
class TellFetch:
    """The answer to SourcesWanted, for the fetch that runs."""

    sources: m.Sources


@dataclass(frozen=True, slots=True)
class CancelFetch:
    pass


@dataclass(frozen=True, slots=True)
class KeepContributions:
    """In a run with audits: encode what this site is to contribute to the sync, and keep it; ContributionsKept."""

    sync: int
    fragment: int
    base_commit: int
    error_commits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BeginExchange:
    plan: m.Plan
    tokens: int
    """This site's weight; 0: it receives."""
    weights: tuple[int, ...]
    """Of the contributors; nothing where the plan was made ahead and they are not all ready."""
    error_commits: tuple[int, ...] = field(default=(), kw_only=True)
    """Of each fragment: the commit that advanced this site's error. Empty without error feedback."""
    spread_s: float = 0.0
    """In which this site may send what it has to send; 0: as fast as it goes."""
    roots: tuple[bytes, ...] = field(default=(), kw_only=True)
    """With audits, of the contributors' contributions, as the weights are said."""
    in_flight: frozenset[int] = field(default=frozenset(), kw_only=True, compare=False)
    """The syncs of which it still needs what it holds for them; all others are over."""
    is_behind: bool = field(default=False, kw_only=True)
    """The base is not here: the site receives what it is to apply once it has come to the base."""


@dataclass(frozen=True, slots=True)
class WeighExchange:
    """The exchange of this plan began without the others' weights. All contributors are ready now: these are they, and
    who does not get on from now on has failed."""

    plan: m.Plan
    weights: tuple[int, ...]
    roots: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class InfluenceExchange:
    """What the contributions count in the averages of this plan, whose reducers wait for that."""

    plan: m.Plan
    influences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HurryExchange:
    """The ranks wait for this sync: what was to be spread over the time in which they train goes as fast as it can."""

    sync: int


@dataclass(frozen=True, slots=True)
class CancelExchange:
    """Stop moving chunks of this attempt; keep contributions that are held."""

    sync: int
    attempt: int


@dataclass(frozen=True, slots=True)
class AdvanceErrors:
    """Compute what the codec lost of the contribution that the commit holds: SNAPSHOT is sealed, and the base here."""

    commit: int
    fragment: int
    base_commit: int
    error_commits: tuple[int, ...]
    """Of each fragment: what the contribution had in it."""


@dataclass(frozen=True, slots=True)
class ApplyCommit:
    commit: m.Commit
    lets_go: bool = False
    """Where ranks read in place: none does until PUBLISH holds this commit, or a later one."""


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
class KeepBest:
    """The saved model of this commit is the best so far: keep it under a name of its own, too."""

    commit: int


@dataclass(frozen=True, slots=True)
class DropBest:
    """Remove the one that is kept so, if it is of a later commit than this."""

    after: int


@dataclass(frozen=True, slots=True)
class DistrustState:
    """What is on this disk is not the run's state, or too old: each chunk is checked against its own hash, and
    snapshots go. What is left is compared with the others' chunk by chunk when it is fetched."""

    reason: str


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


ToRanks = RefuseRank | AnswerWorkers | AnswerDraw
Output = (
    Send | Beat | Fulfil | ListPayloads | StartWorkers | StopWorkers | DescribeCrash | ToRanks | MergePieces
    | ShareSnapshot | SendLayout | SeedState | FetchState | TellFetch | CancelFetch | KeepContributions | BeginExchange
    | WeighExchange | InfluenceExchange | HurryExchange | CancelExchange | AdvanceErrors | ApplyCommit | PublishState
    | DropSync | SaveModel | KeepModel | DropModel | KeepBest | DropBest | DistrustState | RollBack | Report | Exit
)  # fmt: skip
