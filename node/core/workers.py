"""The workers of a site as its core sees them: all ranks of one generation, in lock-step, and their copies of the
fragments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.node.core.disk import Outer
from atoll.node.core.events import Answer, AnswerKind, BoundaryAsked, MergeMode
from atoll.node.core.lanes.local_copy import LocalCopy


@dataclass(slots=True, kw_only=True)
class Workers:
    generation: int = 0  # the last one that was launched
    running: bool = False
    joined: bool = False
    laid_out: bool = False
    ask: BoundaryAsked | None = None  # not answered yet
    crashes_without_step: int = 0  # since one of them did a step
    crashes_in_a_row: int = 0  # since they came to a boundary
    restart_at: float | None = None  # they crashed; new ones are launched then
    waits: bool = False  # they are launched when all hosts of the site are here
    resumed_at: float = 0.0  # when they were last told to go on, and at which step
    resumed_step: int = 0
    step_s: float | None = None  # of one step in their last window
    copies: tuple[LocalCopy, ...] = field(default_factory=lambda: (LocalCopy(),))  # by fragment
    committed_step: int = 0  # no commit holds what they trained after this generation step
    taken_step: int = 0  # the generation step at which a version was taken last
    sealed_in_vain: bool = False  # a snapshot was ready when a commit came without it
    read_in_place: bool = False  # they take outer values from the outer file

    def is_current(self, generation: int) -> bool:
        """Whether what that generation says still counts."""
        return self.running and generation == self.generation

    def asked(self, ask: BoundaryAsked, now: float) -> None:
        """The step shows how long one takes; a boundary that is reached ends a row of crashes."""
        if ask.step > 0:
            self.crashes_without_step = self.crashes_in_a_row = 0
        if ask.step > self.resumed_step:
            self.step_s = (now - self.resumed_at) / (ask.step - self.resumed_step)
        self.ask = ask

    def told(self, ask: BoundaryAsked, answer: Answer, now: float) -> None:
        """The answer to `ask`, which was open."""
        self.ask = None
        if answer.kind in (AnswerKind.APPLY, AnswerKind.CONTINUE):
            self.resumed_at, self.resumed_step = now, ask.step

    @property
    def is_taking(self) -> bool:
        """Not all ranks have taken what was offered."""
        return any(copy.offered is not None for copy in self.copies)

    def copies_of(self, fragment: int) -> Sequence[LocalCopy]:
        """Of one fragment, or of all."""
        return self.copies[fragment : fragment + 1] or self.copies

    def offer(self, answer: Answer, *, step: int) -> None:
        """They take this version of a fragment at `step`."""
        copy, self.taken_step = self.copies[answer.fragment], step
        if answer.mode is MergeMode.REPLACE:
            self.committed_step = step
        copy.offer(answer, step=step)
        if answer.mode is not MergeMode.SHIFT:
            self.sealed_in_vain = False

    def reach(self, outer: Outer) -> None:
        """The site holds that state now: a copy has all of it where no commit has touched its fragment since."""
        for fragment, copy in enumerate(self.copies):
            if copy.version is not None and outer.has_base(fragment, copy.version):
                copy.reaches(outer.commit)

    def missed(self) -> None:
        """A commit came without their snapshot, which was ready."""
        self.sealed_in_vain = True

    def count_from(self, step: int) -> None:
        """A commit holds their snapshot of this step, or it had no tokens: the next window counts from there."""
        self.committed_step = max(self.committed_step, step)

    def stop(self) -> None:
        """No others follow."""
        self.running = False
        self.ask = None

    def restart_by(self, when: float | None) -> None:
        """If new ones are due: by then, or never."""
        if self.restart_at is not None:
            self.restart_at = None if when is None else min(self.restart_at, when)
