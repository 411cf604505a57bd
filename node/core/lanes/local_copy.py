"""The workers' copy of one fragment: what it is based on, and what becomes of what they trained since. A new generation
begins with a new one."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.node.core.events import Answer, MergeMode


@dataclass(slots=True, kw_only=True)
class LocalCopy:
    version: int | None = None  # commit that it is based on; None before the first APPLY
    base_step: int = 0  # generation step at which that base was taken
    offered: Answer | None = None  # APPLY sent, not merged by all ranks yet
    offered_is_discarded: bool = False  # evicted since it was offered: the ranks take it, and then another
    is_discarded: bool = False  # after eviction: the next APPLY replaces, whatever was trained
    contributed: bool = False  # a commit holds the sealed snapshot and the ranks have not merged it yet
    wait_s: float = 0.0  # of the ranks, for the last version
    sealed_in_vain: bool = False  # a snapshot was ready when a commit came without it
    released_step: int = 0  # of the last snapshot that was given up without tokens: the next window counts from there

    @property
    def counts_from(self) -> int:
        """The generation step from which the steps of its window count."""
        return max(self.base_step, self.released_step)

    # --- what the ranks are told

    def offer(self, answer: Answer, *, snapshot_step: int, step: int) -> None:
        """They take this version at `step`."""
        self.offered = answer
        self.base_step = answer.mode.base(before=self.base_step, snapshot=snapshot_step, now=step)
        if answer.mode is not MergeMode.SHIFT:
            self.sealed_in_vain = False

    def merged(self, wait_s: float) -> bool:
        """Every rank has taken what was offered. Whether they go on from it: not if it was discarded meanwhile."""
        offered = self.offered
        assert offered is not None
        self.contributed = self.contributed and offered.mode is MergeMode.SHIFT
        self.is_discarded = self.is_discarded and self.offered_is_discarded
        self.version, self.wait_s = offered.version, wait_s
        self.offered, self.offered_is_discarded = None, False
        return not self.is_discarded

    # --- what becomes of what they train

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
            self.is_discarded = True
            self.offered_is_discarded = self.offered is not None
