"""The workers of a site as its core sees them: all ranks of one generation, in lock-step."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.node.core.events import Answer, AnswerKind, BoundaryAsked, MergeMode


@dataclass(slots=True, kw_only=True)
class Workers:
    generation: int = 0  # the last one that was launched
    running: bool = False
    joined: bool = False
    laid_out: bool = False
    version: int | None = None  # commit that their local copy is based on; None before the first APPLY
    base_step: int = 0  # generation step at which that base was taken
    offered: Answer | None = None  # APPLY sent, not merged by all ranks yet
    offered_is_discarded: bool = False  # evicted since it was offered: the ranks take it, and then another
    ask: BoundaryAsked | None = None  # not answered yet
    discard_local: bool = False  # after eviction: the next APPLY replaces, whatever was trained
    contributed: bool = False  # a commit holds the sealed snapshot and the ranks have not merged it yet
    wait_s: float = 0.0
    crashes_without_step: int = 0  # since one of them did a step
    crashes_in_a_row: int = 0  # since they came to a boundary
    restart_at: float | None = None  # they crashed; new ones are launched then
    resumed_at: float = 0.0  # when they were last told to go on, and at which step
    resumed_step: int = 0
    step_s: float | None = None  # of one step in their last window
    sealed_in_vain: bool = False  # a snapshot was ready when a commit came without it
    released_step: int = 0  # of the last snapshot that was given up without tokens: the next window counts from there
    overrun_left: int = 0  # steps that may still be trained beyond the boundary with the coordinator away

    def is_current(self, generation: int) -> bool:
        """Whether what that generation says still counts."""
        return self.running and generation == self.generation

    # --- what they ask, and what they are told

    def asked(self, ask: BoundaryAsked, now: float) -> None:
        """The step shows how long one takes; a boundary that is reached ends a row of crashes."""
        if ask.step > 0:
            self.crashes_without_step = self.crashes_in_a_row = 0
        if ask.step > self.resumed_step:
            self.step_s = (now - self.resumed_at) / (ask.step - self.resumed_step)
        self.ask = ask

    def told(self, ask: BoundaryAsked, answer: Answer, now: float, *, snapshot_step: int, is_overrun: bool) -> None:
        """The answer to `ask`, which was open. `is_overrun`: they train beyond their sealed snapshot."""
        self.ask = None
        if answer.kind in (AnswerKind.APPLY, AnswerKind.CONTINUE):
            self.resumed_at, self.resumed_step = now, ask.step
        if answer.kind is AnswerKind.CONTINUE and is_overrun:
            self.overrun_left -= 1
        if answer.kind is not AnswerKind.APPLY:
            return
        self.offered = answer
        self.base_step = answer.mode.base(before=self.base_step, snapshot=snapshot_step, now=ask.step)
        if answer.mode is not MergeMode.SHIFT:
            self.sealed_in_vain = False

    def merged(self, wait_s: float) -> bool:
        """Every rank has taken what was offered. Whether they go on from it: not if it was discarded meanwhile."""
        offered = self.offered
        assert offered is not None
        self.contributed = self.contributed and offered.mode is MergeMode.SHIFT
        self.discard_local = self.discard_local and self.offered_is_discarded
        self.version, self.wait_s = offered.version, wait_s
        self.offered, self.offered_is_discarded = None, False
        return not self.discard_local

    # --- what becomes of what they train

    def sealed(self, overrun_steps: int) -> None:
        """With the coordinator away they may go on for so long."""
        self.overrun_left = overrun_steps

    def consumed(self, *, is_theirs: bool) -> None:
        """A commit holds the snapshot, which these workers wrote or those before them did."""
        self.contributed = is_theirs and self.version is not None

    def missed(self) -> None:
        """A commit came without their snapshot, which was ready."""
        self.sealed_in_vain = True

    def release(self, step: int) -> None:
        """Their snapshot of this step is given up without tokens."""
        self.released_step = step

    def discard(self) -> None:
        """What they have trained counts no longer."""
        self.contributed = False
        if self.version is not None or self.offered is not None:
            self.discard_local = True
            self.offered_is_discarded = self.offered is not None

    # --- their end

    def stop(self) -> None:
        """No others follow."""
        self.running = False
        self.ask = self.offered = None

    def restart_by(self, when: float | None) -> None:
        """If new ones are due: by then, or never."""
        if self.restart_at is not None:
            self.restart_at = None if when is None else min(self.restart_at, when)
