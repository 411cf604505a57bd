"""What tests ask a site's core, by name. No other test knows how the core keeps it.

Most of what a core decides is an output: tests look there first. Answers are numbers and frozen messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from atoll.node.core import outputs as out
from atoll.node.core.context import SiteIdentity
from atoll.node.core.disk import Job, Outer
from atoll.node.core.events import Answer, Event, MergeMode
from atoll.node.core.lanes import answers, snapshots
from atoll.node.core.lanes.lane import Lane, Snapshot, SnapshotPhase, SnapshotStep
from atoll.node.core.site import SiteCore
from atoll.node.core.state import SiteState
from atoll.protocol import messages as m
from atoll.protocol.settings import RunSettings
from tests.harness.snapshots import snapshot

if TYPE_CHECKING:
    from atoll.node.daemon.node import Node

PROCESS = b"this process"


def an_identity(*, from_saved_model: bool = False, start_limit_s: float = 0.0) -> SiteIdentity:
    """Of the site `a`, started for the first time."""
    hello = m.Hello(
        name="a",
        key=bytes(32),
        address="127.0.0.1:1",
        atoll_version="0",
        from_saved_model=from_saved_model,
        process_id=PROCESS,
    )
    return SiteIdentity(hello=hello, incarnation=1, start_limit_s=start_limit_s)


def a_core(
    settings: RunSettings,
    held: Outer | None,
    now: float,
    *,
    from_saved_model: bool = False,
    held_errors: tuple[int | None, ...] = (),
    num_hosts: int = 1,
) -> SiteCore:
    """`held`, `held_errors`: what it finds on its disk."""
    identity = an_identity(from_saved_model=from_saved_model)
    return SiteCore(identity, settings, held, now, held_errors=held_errors, num_hosts=num_hosts)


def a_node_core(
    settings: RunSettings,
    now: float,
    num_ranks: int = 1,
    *,
    held: Outer | None = None,
    num_hosts: int = 1,
    start_limit_s: float = 0.0,
) -> SiteCore:
    """With ranks, which are divided among its hosts."""
    identity = an_identity(start_limit_s=start_limit_s)
    return SiteCore(identity, settings, held, now, num_ranks=num_ranks, num_hosts=num_hosts)


def wanted(core: SiteCore, event: Event, now: float) -> list[out.Output]:
    """Without heartbeats, which come with time alone."""
    return [output for output in without_fault(core.handle(event, now)) if not isinstance(output, out.Beat)]


def watch_steps(core: SiteCore, before: Callable[[Event], None]) -> None:
    """Calls `before` for each event that the core is about to handle, also for those that follow from others."""
    step = core._step

    def watched(event: Event) -> None:
        before(event)
        step(event)

    core._step = watched  # type: ignore[method-assign]


def without_fault(outputs: list[out.Output]) -> list[out.Output]:
    """No step of the core was illegal."""
    faults = [o.text for o in outputs if isinstance(o, out.Report) and "a fault of this node" in o.text]
    assert not faults, faults
    return outputs


class SiteQuestions:
    core: SiteCore

    # --- the site and its coordinator

    @property
    def site_id(self) -> int:
        """0 before it is admitted."""
        return self.core.site.site_id

    def newest_term(self) -> int:
        """The highest that it has heard."""
        return self.core.site.term

    def is_welcomed(self) -> bool:
        """In this session."""
        return self.core.site.welcomed

    def is_away(self) -> bool:
        """No session has been welcomed since the last one ended."""
        return self.core.site.away_since is not None

    def has_ended(self) -> bool:
        return self.core.site.exit is not None

    def deadline(self) -> float | None:
        """When something is due, heartbeats aside."""
        site = self.core.site
        beat_at, site.beat_at = site.beat_at, None
        try:
            return self.core.next_deadline()
        finally:
            site.beat_at = beat_at

    # --- its state

    def holds(self) -> int | None:
        """The commit of its outer state; None without one."""
        outer = self.core.site.disk.outer
        return None if outer is None else outer.commit

    def branch(self) -> int:
        """In which the commits of its state are numbered."""
        return self.core.site.disk.branch

    def lacks(self) -> int:
        """The commit that its own log does not lead to; 0: none."""
        return self.core.site.disk.lacks

    def num_wrong_states(self) -> int:
        return self.core.site.num_wrong_states

    def errors(self) -> tuple[int, ...]:
        """Of each fragment: the commit that advanced its error feedback; 0: none."""
        return self.core.site.error_commits

    def errors_on_disk(self) -> tuple[int | None, ...]:
        """The same as an earlier start has left it; None: of a part."""
        return self.core.site.held_errors

    def had_errors(self, *commits: int) -> None:
        """As if these had advanced it."""
        self.core.site.error_commits = commits

    def num_errors_dropped(self) -> int:
        return self.core.site.num_errors_dropped

    def queue(self, *jobs: Job) -> list[Job]:
        """What waits for the disk, with these jobs."""
        for job in jobs:
            self.core.site.disk.add(job)
        return self.core.site.disk.queue

    # --- its workers

    @property
    def generation(self) -> int:
        return self.core.site.workers.generation

    def crashes(self) -> tuple[int, str]:
        """Of its workers, since its node started, and why the last one was."""
        return self.core.site.num_crashes, self.core.site.last_crash

    def blames_commit(self) -> bool:
        """It says that its loss is not finite since the last commit."""
        return self.core.site.diverged is not None

    def workers_run(self) -> bool:
        return self.core.site.workers.running

    def has_contributed(self) -> bool:
        """A commit holds what the workers trained, and they have not taken it yet."""
        return any(copy.contributed is not None for copy in self.core.site.workers.copies)

    def discards_local(self) -> bool:
        """What the workers trained: the next values replace it."""
        return any(copy.is_discarded for copy in self.core.site.workers.copies)

    # --- the sync

    @property
    def _lane(self) -> Lane:
        """That of a snapshot or exchange that is in flight, else one that is open."""
        lanes = self.core.site.lanes
        in_flight = [lane for lane in lanes if lane.snapshot.phase is not SnapshotPhase.FREE or lane.exchange]
        return (in_flight or [lane for lane in lanes if lane.open is not None] or lanes)[0]

    def open_sync(self) -> int:
        """The newest; 0: none is open."""
        return max((lane.open.sync for lane in self.core.site.lanes if lane.open is not None), default=0)

    def open_windows(self) -> dict[int, tuple[int, int]]:
        """By fragment, or the number of all, of the sync that is open: where its window begins, and its steps."""
        opened = [lane.open for lane in self.core.site.lanes if lane.open is not None]
        return {open_.fragment: (open_.run_step, open_.num_steps) for open_ in opened}

    def snapshot_phase(self) -> str:
        """free, writing, sealed or consumed."""
        return self._lane.snapshot.phase.value

    def is_written(self) -> bool:
        """The ranks are at a snapshot."""
        return any(lane.snapshot.phase is SnapshotPhase.WRITING for lane in self.core.site.lanes)

    def sealed_snapshots(self) -> dict[int, tuple[int, int]]:
        """By fragment, or the number of all, the snapshots that no commit it holds has: generation and step in which
        each was written."""
        found = {lane.fragment: lane.snapshot for lane in self.core.site.lanes if lane.snapshot.is_sealed}
        return {fragment: (snapshot.generation, snapshot.step) for fragment, snapshot in found.items()}

    def snapshot_written(self, fragment: int) -> tuple[int, int, int]:
        """Of which generation its snapshot of this fragment is, or of the number of all, and the step and seq at which
        the ranks were told to write it."""
        snapshot = self.core.site.lanes[fragment].snapshot
        return snapshot.generation, snapshot.step, snapshot.seq

    def snapshot_committed_in(self, fragment: int) -> int | None:
        """The commit that holds what its sealed snapshot of this fragment was made of, which is not exchanged again."""
        snapshot = self.core.site.lanes[fragment].snapshot
        assert snapshot.is_sealed
        return snapshot.committed_in

    def take_snapshot_steps(self, *steps: SnapshotStep) -> None:
        """Whatever the core would do."""
        lane = self._lane
        for step in steps:
            lane.snapshot = Snapshot(phase=snapshots._step(lane, step))

    def snapshot_samples(self, fragment: int | None = None) -> tuple[m.DataRange, ...]:
        """What the snapshot was trained on; of this fragment, or the one that is in flight."""
        lane = self._lane if fragment is None else self.core.site.lanes[fragment]
        return lane.snapshot.ranges

    def is_exchanging(self) -> bool:
        return self._lane.exchange is not None

    def has_next_plan(self) -> bool:
        """One waits for its weights, or for the boundary."""
        return self._lane.next_plan is not None

    # --- samples

    def data_epoch(self) -> int:
        return self.core.site.data.epoch

    def leased_samples(self) -> tuple[m.DataRange, ...]:
        return self.core.site.data.leased.as_tuple()

    def queued_samples(self) -> tuple[m.DataRange, ...]:
        """Of this epoch, in the order in which they are drawn; those in commits are gone."""
        data = self.core.site.data
        return data.between(0, data.end)

    def queue_places(self) -> tuple[int, int]:
        """Of the first sample that is queued, and after the last."""
        return self.core.site.data.first, self.core.site.data.end

    def num_draws_waiting(self) -> int:
        """Of ranks, for samples that are not leased yet."""
        return len(self.core.site.data.draws)


INSIGNIFICANT = frozenset({"out", "now", "inbox", "settings", "limits"})


def decisions(core: SiteCore) -> Any:
    """Everything that the core holds but the time and what it was made with."""
    return snapshot(core.ctx, INSIGNIFICANT)


def of_node(node: Node) -> SiteQuestions:
    """To the core of a node that runs."""
    return of_core(node.core)


def of_core(core: SiteCore) -> SiteQuestions:
    questions = SiteQuestions()
    questions.core = core
    return questions


def take_no_care_of_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores keep a difference back when a later sync opens, and make the next one of it."""
    decide = answers.decide

    def decides(site: SiteState, settings: RunSettings, **options: Any) -> answers.Decision:
        decision = decide(site, settings, **options)
        is_shift = isinstance(decision, Answer) and decision.mode is MergeMode.SHIFT
        outer = site.disk.outer
        if is_shift and outer is not None and answers.next_sync(site, outer, away=False) is None:
            return answers.Hold("waiting for the coordinator to open the next sync")
        return decision

    def is_in_use(site: SiteState) -> bool:
        return any(copy.offered is not None for copy in site.workers.copies)

    monkeypatch.setattr(answers, "decide", decides)
    monkeypatch.setattr(SiteState, "publish_is_in_use", property(is_in_use))
