"""What the core wants kept: rows of the store, each of which takes the place of an older one of its key
(persisted.py)."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.layout import Manifest
from atoll.protocol.messages import (
    AuditChunk,
    Commit,
    DataRange,
    Endpoint,
    LineRanges,
    Open,
    Outlier,
    Plan,
    Signature,
)


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
    offences: int = 0
    """How often audits found it out, and it did not own up."""
    faults: tuple[int, ...] = ()
    """The last commits by which it owned up to what an audit had found."""
    silences: tuple[int, ...] = ()
    """The last commits by which it had given auditors nothing of its errors."""
    judged_to: int = -1
    """The newest commit when an audit last found it out: one of an earlier commit finds the same."""
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
    last_sync: int = 0
    """The highest number that may have been used for a sync."""


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
    roots: tuple[bytes, ...] = ()
    """What each Ready says of what is contributed, with audits."""
    signatures: tuple[Signature, ...] = ()
    """Of these roots; none in plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfluencesRecord:
    """What the reducers of an attempt average with, with `sync.robust = "gram"`."""

    sync: int
    attempt: int
    influences: tuple[int, ...]
    """Of each contributor, in their order."""


OfPlan = WeightsRecord | InfluencesRecord
"""What is kept of an attempt after its plan."""


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
class ChangedRecord:
    """Settings that are not as the run began, for the commits that follow. A rollback ends it: then those of the commit
    that is the last one hold again."""

    changed_json: str


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
    skipped: tuple[LineRanges, ...] = ()
    """What these commits list and a person wants nobody to draw again: it is done, in no commit that counts."""


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
class BanRecord:
    """Neither this name nor this key comes in any more. A later record of the name replaces it."""

    name: str
    key_digest: bytes
    """Empty if no site of that name was ever here."""
    reason: str
    until_s: float = 0.0
    """Seconds since 1970, by the coordinator's clock; 0: until the ban is lifted."""
    is_over: bool = False
    """That time has come. The ban is kept for a while: the clock may have been wrong."""


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
    is_token: bool = False
    renewed_s: float = 0.0
    """When the identity that came of it was renewed last."""


@dataclass(frozen=True, slots=True)
class InviteForgottenRecord:
    invite_id: str


@dataclass(frozen=True, slots=True)
class BanLiftedRecord:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """An entry of the audit log."""

    number: int
    """From 1."""
    at_s: float
    """Seconds since 1970, by the coordinator's clock."""
    by: str
    what: str
    outcome: str
    previous: str
    """Digest of the entry before; empty for the first."""
    digest: str


@dataclass(frozen=True, slots=True)
class DrawingRecord:
    """The audits of this start of the coordinator are drawn with it."""

    secret: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAuditsRecord:
    """What is audited of a commit, until an AuditsEndedRecord: nothing that was found yet."""

    commit: int
    payload_digest: bytes
    asked: tuple[AuditChunk, ...]
    """Without numbers."""
    reducers: tuple[int, ...]
    """Of each of these, the place of the site that made it among the contributors."""


@dataclass(frozen=True, slots=True)
class AuditsEndedRecord:
    """Of a commit."""

    commit: int


@dataclass(frozen=True, slots=True)
class ResetRecord:
    """Before training: sites, model, starting state and the account of samples are forgotten."""

    void_starts: tuple[bytes, ...]
    """State hashes of commit 0 that were ever taken back, ascending."""
    last_site_id: int
    """The highest ever given: ids are not given again."""


@dataclass(frozen=True, slots=True)
class PausedRecord:
    """By a person, until a ResumedRecord."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResumedRecord:
    """Ends the pause."""


@dataclass(frozen=True, slots=True)
class StopRecord:
    reason: str


@dataclass(frozen=True, slots=True)
class FinishedRecord:
    commit: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRecord:
    """A curve that people are shown (`curves.Curve`)."""

    site_id: int
    name: str
    of_outer: bool
    stride: int
    points: tuple[tuple[int, int, float, float], ...]


Record = (
    SiteRecord | ForgetRecord | ManifestRecord | OpenRecord | PlanRecord | WeightsRecord | CommitRecord | AbandonRecord
    | AttestationRecord | LineRecord | DoneRecord | LeaseRecord | RollbackRecord | ExclusionRecord | BanRecord
    | InviteRecord | InviteForgottenRecord | BanLiftedRecord | AuditRecord | PausedRecord | ResumedRecord | ResetRecord
    | ChangedRecord | StopRecord | FinishedRecord | DrawingRecord | OpenAuditsRecord | AuditsEndedRecord | CurveRecord
    | InfluencesRecord
)  # fmt: skip
