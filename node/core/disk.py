"""What this disk holds, and the one job that works on it, on the payload log or on PUBLISH. Others wait in one queue.

A job is the output that begins it; an event of its own ends it. A seed, a fetch, a check and a rollback wait in the
queue. An apply and a publish follow from what is held: they begin when nothing runs, and never wait. Writing a model
and putting it in place are no jobs: they work on pinned records and in a folder of their own, and a fetch may take
hours.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from atoll.node.core.events import Content
from atoll.node.core.outputs import (
    AdvanceErrors,
    ApplyCommit,
    DistrustState,
    FetchState,
    PublishState,
    RollBack,
    SeedState,
)
from atoll.protocol.messages import Sources

Job = SeedState | FetchState | AdvanceErrors | ApplyCommit | PublishState | DistrustState | RollBack
J = TypeVar("J", bound=Job)


class IllegalStep(Exception):
    """A step that may not follow on those before: a fault of this code, whatever was said to this site."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """The outer state on this host."""

    commit: int
    state_hash: bytes
    run_step: int
    run_tokens: int
    touched: tuple[int, ...] = ()  # of each fragment, the last commit that did; empty: it may be `commit`

    def touch(self, fragment: int) -> int:
        """The last commit that touched the fragment, as far as is known; of all fragments it is this one."""
        return self.touched[fragment] if fragment < len(self.touched) else self.commit

    def has_base(self, fragment: int, base_commit: int) -> bool:
        """Whether the fragment is here as it was at that commit of the run, which is here."""
        return self.touch(fragment) <= base_commit <= self.commit

    def touched_by(self, commit: int, fragment: int, num_fragments: int) -> tuple[int, ...]:
        """As `touched`, after a commit of that fragment, or of all, follows this state."""
        fragments = range(num_fragments)
        return tuple(commit if fragment in (f, num_fragments) else self.touch(f) for f in fragments)


@dataclass(slots=True, kw_only=True)
class Disk:
    outer: Outer | None = None
    has_moved: bool = False  # a job broke off, and what is on the disk is not at `outer` any more
    final: bool = False  # the commit in `outer` is the last one
    lacks: int = 0  # the commit after `outer`, if its payloads are not in this site's log
    branch: int = 0  # in which the commits on this disk are numbered
    published: Content | None = None  # what PUBLISH holds
    has_let_go: bool = False  # of what ranks read in place, and nothing was published since
    publish_is_void: bool = False  # the one that runs is for workers that are gone
    running: Job | None = None
    queue: list[Job] = field(default_factory=list)

    # --- jobs

    def find(self, kind: type[J]) -> J | None:
        """The job of that kind that waits, else the one that runs, if there is one."""
        return next((job for job in (*self.queue, self.running) if isinstance(job, kind)), None)

    @property
    def applying(self) -> int | None:
        """The commit that is being applied."""
        return self.running.commit.commit if isinstance(self.running, ApplyCommit) else None

    @property
    def is_void(self) -> bool:
        """What is on the disk is to be checked, or goes back: a job that ends before that does not count."""
        return self.find(RollBack) is not None or any(isinstance(job, DistrustState) for job in self.queue)

    def add(self, job: Job) -> None:
        """Instead of one of its kind that waits, but for errors, which are of several fragments. Checks and rollbacks
        go first; errors go before a fetch, which takes their base away."""
        if not isinstance(job, AdvanceErrors):
            self.queue = [other for other in self.queue if type(other) is not type(job)]
        place = 0 if isinstance(job, DistrustState | RollBack) else len(self.queue)
        if isinstance(job, AdvanceErrors):
            place = next((i for i, other in enumerate(self.queue) if isinstance(other, FetchState)), place)
        self.queue.insert(place, job)

    def next_job(self, *, publish_is_in_use: bool) -> Job | None:
        """Begin the first job that may begin, if nothing runs. No other passes a rollback that waits for PUBLISH.
        Errors wait as the apply does that follows: after a difference PUBLISH is to hold values again first."""
        for job in self.queue if self.running is None else ():
            if not publish_is_in_use or not isinstance(job, FetchState | RollBack | AdvanceErrors):
                self.queue.remove(job)
                return self.begin(job)
            if isinstance(job, RollBack):
                break
        return None

    def begin(self, job: J) -> J:
        """Raises IllegalStep if something runs. What PUBLISH holds does not count any more if the job may change it."""
        if self.running is not None:
            raise IllegalStep(f"{job} is to begin, while {self.running} has not ended and these wait: {self.queue}")
        self.running = job
        lets_go = isinstance(job, ApplyCommit) and job.lets_go
        if lets_go or isinstance(job, PublishState | DistrustState | RollBack):
            self.published = None
        self.has_let_go = self.has_let_go or lets_go
        if isinstance(job, RollBack):
            self.has_moved = False  # it ends with what is held then
        return job

    def end(self, kind: type[J]) -> J | None:
        """The job that ended; None if it was given up before."""
        job = self.running
        if not isinstance(job, kind):
            return None
        self.running = None
        return job

    def broke_off(self, *, has_moved: bool) -> None:
        """A fetch or an apply. If it `has_moved` what is on the disk, nothing can be made of that until another one
        brings it to some commit. The log may, as it has payloads that it lacked."""
        if has_moved:
            self.has_moved, self.lacks = True, 0

    def forget(self, kind: type[Job], fragment: int | None = None) -> None:
        """Those that wait, or those of a fragment."""
        self.queue = [
            job
            for job in self.queue
            if not isinstance(job, kind) or (isinstance(job, AdvanceErrors) and fragment not in (None, job.fragment))
        ]

    def runs(self, kind: type[Job]) -> bool:
        """Whether the job that runs is of that kind."""
        return isinstance(self.running, kind)

    def unpublish(self) -> None:
        """What PUBLISH holds, or will hold when the publish that runs has ended, is not for those who ask next."""
        self.published, self.publish_is_void = None, self.runs(PublishState)

    def publish_ended(self, content: Content) -> None:
        """PUBLISH holds this now."""
        self.end(PublishState)
        self.published, self.publish_is_void = None if self.publish_is_void else content, False
        self.has_let_go = False

    def cancel_fetch(self) -> bool:
        """Whether one was under way. What its thread still writes, the lock of the data plane keeps from the next."""
        self.forget(FetchState)
        return self.end(FetchState) is not None

    # --- what is held

    def hold(self, outer: Outer, *, final: bool) -> None:
        """A fetch that waits, and would bring nothing newer, is dropped."""
        self.outer, self.final, self.lacks, self.has_moved = outer, final, 0, False
        self.queue = [j for j in self.queue if not (isinstance(j, FetchState) and newest(j.sources) <= outer.commit)]

    def lose(self) -> None:
        """What is on the disk is not the state of the commit that this site said it holds."""
        self.outer, self.has_moved = None, False

    def left(self, held: tuple[int, bytes] | None) -> None:
        """After a rollback: commit and state hash. The coordinator says how far the run was there."""
        self.outer = None if held is None else Outer(commit=held[0], state_hash=held[1], run_step=0, run_tokens=0)

    def count(self, run_step: int, run_tokens: int) -> None:
        """Of the run, up to the commit that is held."""
        assert self.outer is not None
        self.outer = replace(self.outer, run_step=run_step, run_tokens=run_tokens)

    def end_run(self, run_step: int, run_tokens: int) -> None:
        """The commit that is held is the last one."""
        self.count(run_step, run_tokens)
        self.final = True

    def lack(self, commit: int) -> None:
        """Its payloads are not in the log."""
        self.lacks = commit

    def go_back(self, commit: int, branch: int) -> int:
        """Queue a rollback. The commit up to which what is here stays: the disk may still be as it was before another
        rollback, which has not ended."""
        if (before := self.find(RollBack)) is not None:
            commit = min(commit, before.commit)
        self.branch, self.lacks = branch, 0
        self.add(RollBack(commit, branch))
        if self.outer is not None and self.outer.commit > commit:
            self.outer, self.final = None, False
        return commit


def newest(sources: Sources) -> int:
    """The newest commit that they name; -1: none."""
    return max([c.commit for c in sources.commits] + [a.commit for a in sources.attested], default=-1)
