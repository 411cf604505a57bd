"""What is decided: a wait, or a step that `driver` carries out and looks again. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.coordinator.core.events import InfluencesRecord, WeightsRecord
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync.attempts import NoAverage
from atoll.coordinator.core.sync.blame import Pair
from atoll.protocol.messages import Outlier, Plan


@dataclass(frozen=True, slots=True)
class Wait:
    reason: str
    """What is waited for, in words."""
    until: float | None = None
    """Looked at again then, if nothing happens before. None: nothing follows from time alone."""
    is_pause: bool = False
    """The run is paused: it does not go on as things stand."""
    is_unreachable: bool = False
    """Nobody who is here can reach the newest commit."""


@dataclass(frozen=True, slots=True)
class GiveWay:
    """The plan that was made ahead no longer holds."""

    reason: str


@dataclass(frozen=True, slots=True)
class Weigh:
    """All contributors of the plan are ready."""

    weights: WeightsRecord


@dataclass(frozen=True, slots=True)
class Influence:
    """All reducers have said the inner products of what they are to average."""

    influences: InfluencesRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose:
    """Another attempt."""

    plan: Plan
    suspects: frozenset[int]
    late: frozenset[int]
    """Who is slower than most, and was not waited for."""
    why: str


@dataclass(frozen=True, slots=True)
class CollectAgain:
    """Too few are left for another attempt."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The attempt may not commit any more, and failed exchanges are blamed on somebody."""

    reason: str
    among: tuple[int, ...]
    """Contributors of whom somebody may be to blame."""
    pairs: Mapping[Pair, bool] = field(default_factory=dict)
    """More exchanges that failed."""
    payloads_differ: str = ""
    """It failed because of that; in words."""


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """A reducer found contributions absurd."""

    found: NoAverage


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForLists:
    """Of hashes of payloads, on these streams, by site id."""

    streams: Mapping[int, int]
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """Contributors that get no further."""

    sites: tuple[tuple[Site, str], ...]
    """Why each is evicted, or what it waits for."""
    heard: frozenset[int]
    """Sites that say for whom they wait."""
    pairs: Mapping[Pair, bool]
    """What follows from that."""


@dataclass(frozen=True, slots=True)
class Misled:
    """Contributors averaged with weights that others said, and these are not those that were said of the plan."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    sites: tuple[tuple[Site, str, str], ...]
    """With what is said of it, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """For good, and why."""

    sites: tuple[tuple[Site, str], ...]


@dataclass(frozen=True, slots=True)
class JudgeStates:
    """Contributors hold different states of that commit."""

    commit: int


@dataclass(frozen=True, slots=True)
class Commit:
    payload_digest: bytes
    stood_out: Outlier | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    reason: str
    without_tokens: bool = False
    """Contributions that are empty are not taken into the next sync."""
    error: str = ""
    """What is said before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoBack:
    """Most sites' loss is not finite since a commit."""

    commit: int
    reason: str
    without: int
    """A site that is left out of what follows; 0: none."""
    obstacle: str
    """Why the run stays where it is; empty: it goes back."""


OfAttempt = GiveWay | Weigh | Influence | Fail | LeaveOut | AskForLists | Stuck | Misled | Evict | JudgeStates | Commit
"""Of the attempt under way."""
OfSync = Propose | CollectAgain | Abandon | Refuse
Decision = Wait | OfSync | OfAttempt
