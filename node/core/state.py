"""What a site's core knows. Plain data: each field is changed by one module, and read by all."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.node.core.disk import Disk
from atoll.node.core.events import DataAnnounced, Difference, DrawAsked
from atoll.node.core.lanes.lane import Lane
from atoll.node.core.outputs import Exit
from atoll.node.core.workers import Workers
from atoll.protocol.messages import Commit, DataRange, Diverged, Finished, Open
from atoll.protocol.ranges import Ranges


@dataclass(slots=True, kw_only=True)
class DataQueue:
    """Leased positions in the order in which they are drawn; `leases.py` says how."""

    announced: DataAnnounced | None = None  # by the workers, if they draw samples
    per_step: int = 0  # positions that a step takes, as far as is known; 0: they are shards, or none
    leased: Ranges = field(default_factory=Ranges)  # by this incarnation, and in no commit
    asked: int | None = None  # wanted in all, not answered yet
    short_of: int | None = None  # wanted in all, and the answer had fewer
    epoch: int = 0
    queue: list[DataRange] = field(default_factory=list)
    first: int = 0  # place of queue[0]: those before it are in commits
    end: int = 0
    used: int = 0  # place up to which the last snapshot was trained
    step: int = 0  # generation step of that snapshot
    reserved: Ranges = field(default_factory=Ranges)  # in a snapshot of an older epoch that may still be committed
    draws: dict[int, DrawAsked] = field(default_factory=dict)  # by rank, not answered yet

    def between(self, first: int, end: int) -> tuple[DataRange, ...]:
        """The positions at places [first, end)."""
        found = []
        place = self.first
        for item in self.queue:
            low, high = max(first, place), min(end, place + item.num_samples)
            if low < high:
                found.append(DataRange(first=item.first + low - place, num_samples=high - low))
            place += item.num_samples
        return tuple(found)


@dataclass(slots=True, kw_only=True)
class Saving:
    """A model that is written beside its place, and put there when it counts."""

    commit: int
    state_hash: bytes
    is_written: bool = False
    is_void: bool = False  # the state was not the run's
    is_being_kept: bool = False
    keep_at: float | None = None  # the last one, if nobody contradicts until then


def lanes_of(num_fragments: int) -> tuple[Lane, ...]:
    """Of each fragment; where there are several, the last one is of all."""
    return tuple(Lane(fragment=fragment) for fragment in range(num_fragments + (num_fragments > 1)))


@dataclass(slots=True, kw_only=True)
class SiteState:
    connected: bool = False
    beat_at: float | None = None  # when the next heartbeat is due; None without a stream
    welcomed: bool = False
    away_since: float | None = 0.0  # when the last session ended that was welcomed; None while one is
    lost_because: list[str] = field(default_factory=list)  # said since then
    admitted: bool = False
    seeding: bool = False  # this site makes the starting state
    site_id: int = 0
    run_seed: int = 0
    term: int = 0
    last_commit_of_run: int = 0
    changed_json: str = ""  # settings that are not as the run began, as far as this site heard
    contributors: tuple[int, ...] = ()  # of the last commit that was applied, by site id
    unreachable_site_ids: tuple[int, ...] = ()  # peers that do not answer at their addresses
    disk: Disk = field(default_factory=Disk)
    num_wrong_states: int = 0  # how often the state on the disk was not the run's
    is_disputed: bool = False  # sites hold, or held, different states of the commit that it holds
    is_checked: bool = False  # ... and it is being found out whose is right
    sources_asked: bool = False  # the coordinator is to say who has the state
    retry_fetch_at: float | None = None
    fetch_failures: int = 0
    newest_sync: int = 0  # the highest that was opened, as far as this site heard
    opened_at: float = 0.0  # when it heard that
    window_s: float | None = None  # from the opening before to that one
    num_empty_in_a_row: int = 0  # snapshots without tokens that a sync was abandoned for
    held_errors: tuple[int | None, ...] = ()  # by fragment: the commit whose error the disk had at the start
    errors_of_hosts: list[tuple[int | None, ...]] = field(default_factory=list)  # that came, not compared yet
    error_commits: tuple[int, ...] = ()  # of each fragment: the commit that advanced its error; 0: there is none
    error_shares: tuple[float, ...] = ()  # the same: its norm over that of what was to be sent then
    errors_in_doubt: set[int] = field(default_factory=set)
    """Fragments: by the coordinator's word a commit that was not heard of may hold a later contribution."""
    advance_is_void: bool = False  # the error was dropped, and a job that advances it still runs
    not_advanced_by: dict[int, int] = field(default_factory=dict)
    """By fragment: the last commit that should have advanced the error and could not, which is said already."""
    num_errors_dropped: int = 0
    lanes: tuple[Lane, ...] = field(default_factory=lambda: lanes_of(1))  # by fragment
    commits: dict[int, Commit] = field(default_factory=dict)  # received, not applied yet
    missing_hosts: tuple[int, ...] = ()  # of this site
    has_model: bool = False  # workers have said what it is, and the shell has room for its state
    workers: Workers = field(default_factory=Workers)
    num_crashes: int = 0  # of workers
    last_crash: str = ""  # why the last of them was
    finite_on: int | None = None  # the commit from which the workers' last window with a finite loss began
    bad_on: int | None = None  # the same of the first window after that whose losses were not finite
    diverged: Diverged | None = None  # said of the commit after that
    data: DataQueue = field(default_factory=DataQueue)
    saving: Saving | None = None
    kept: int | None = None  # the commit whose model was put in place last
    best: int | None = None  # the commit whose model this site was told to be the best so far
    saved_elsewhere: str = ""  # where the last model is, and why it is there
    leaving: str = ""
    leave_deadline: float | None = None
    finished: Finished | None = None  # heard; looked at again when a commit is applied or the disk is rolled back
    over: str = ""  # the run is, and how; the last commit is being applied
    exit: Exit | None = None  # the node ends

    def change(self, changed_json: str) -> None:
        """Those of the newest commit."""
        self.changed_json = changed_json

    @property
    def version(self) -> int | None:
        """The newest commit that the workers have taken, with all before it; None before each copy has a base."""
        known = [copy.version for copy in self.workers.copies if copy.version is not None]
        return min(known) if len(known) == len(self.workers.copies) else None

    @property
    def base_step(self) -> int:
        """The generation step at which the newest base was taken."""
        return max(copy.base_step for copy in self.workers.copies)

    @property
    def in_flight(self) -> tuple[Lane, ...]:
        """The lanes whose sealed snapshot these workers wrote."""
        generation = self.workers.generation
        return tuple(x for x in self.lanes if x.snapshot.is_sealed and x.snapshot.generation == generation)

    def sealed_beyond(self, open_: Open) -> tuple[Lane, ...]:
        """The lanes in flight whose snapshot is for a newer window than the sync. None if the site rests in it."""
        outer, trains = self.disk.outer, self.site_id not in open_.resting
        opened = [(x, x.open) for x in self.in_flight if x.open is not None and x.open.run_step > open_.run_step]
        return tuple(x for x, o in opened if trains and outer is not None and outer.has_base(x.fragment, o.base_commit))

    @property
    def oldest_sealed(self) -> Lane | None:
        """Of the lanes with a sealed snapshot: the ranks come to wait for the end of its sync first."""
        sealed = (lane for lane in self.lanes if lane.snapshot.is_sealed)
        return min(sealed, key=lambda lane: lane.snapshot.sealed_at, default=None)

    @property
    def window_step(self) -> int:
        """The generation step after which the window of the next snapshot begins: that of the newest snapshot that is
        in flight or in a commit."""
        return max(self.workers.committed_step, *(lane.snapshot.step for lane in self.in_flight), 0)

    @property
    def publish_is_in_use(self) -> bool:
        """PUBLISH holds a difference that the workers have not taken yet, and of which no other one can be made. The
        outer state does not change until PUBLISH holds their values again."""
        content = self.disk.published
        if self.workers.running and self.workers.read_in_place and self.workers.is_taking:
            return True  # it is read where it lies
        if not isinstance(content, Difference) or not self.workers.running:
            return False
        copy = self.workers.copies[content.fragment]
        return copy.version is not None and content.base == copy.taken and not copy.is_discarded

    def nobody_reads(self, commit: int) -> bool:
        """Where ranks read the outer values in place: none does before it takes that commit, or a later one, for which
        the old values are not needed. All have sealed what it holds, and asked again at that step; one that was told to
        train on since, or did not contribute, may read."""
        workers, snapshot = self.workers, self.lanes[0].snapshot
        if not workers.read_in_place or workers.ask is None or workers.is_taking:
            return False
        is_held = snapshot.is_sealed and snapshot.committed_in == commit
        return is_held and (snapshot.generation, snapshot.step) == (workers.generation, workers.ask.step)
