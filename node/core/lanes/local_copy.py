"""The workers' copy of one fragment: what it is based on, and what becomes of what they trained since. A new generation
begins with new ones."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.node.core.events import Answer, MergeMode


@dataclass(slots=True, kw_only=True)
class LocalCopy:
    version: int | None = None  # the newest commit that it holds all of; None before the first APPLY
    taken: int = 0  # the commit of the last APPLY: those up to `version` did not touch this fragment
    base_step: int = 0  # generation step at which that base was taken
    offered: Answer | None = None  # APPLY sent, not merged by all ranks yet
    offered_is_discarded: bool = False  # evicted since it was offered: the ranks take it, and then another
    is_discarded: bool = False  # after eviction: the next APPLY replaces, whatever was trained
    contributed: int | None = None  # generation step of a snapshot that a commit holds which the ranks have not merged

    # --- what the ranks are told

    def offer(self, answer: Answer, *, step: int) -> None:
        """They take this version at `step`."""
        self.offered = answer
        self.base_step = answer.mode.base(before=self.base_step, snapshot=self.contributed or 0, now=step)

    def merged(self) -> bool:
        """Every rank has taken what was offered. Whether they go on from it: not if it was discarded meanwhile."""
        offered = self.offered
        assert offered is not None
        if offered.mode is not MergeMode.SHIFT:
            self.contributed = None
        self.is_discarded = self.is_discarded and self.offered_is_discarded
        self.version = self.taken = offered.version
        self.offered, self.offered_is_discarded = None, False
        return not self.is_discarded

    # --- what becomes of what they train

    def consumed(self, step: int) -> None:
        """A commit holds the snapshot that these workers wrote at `step`."""
        self.contributed = step if self.version is not None else None

    def reaches(self, commit: int) -> None:
        """The commits from its version up to that one were of other fragments."""
        self.version = commit

    def discard(self) -> None:
        """What they have trained counts no longer."""
        self.contributed = None
        if self.version is not None or self.offered is not None:
            self.is_discarded = True
            self.offered_is_discarded = self.offered is not None
