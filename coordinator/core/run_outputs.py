"""What the core wants done: outputs in their order, of which all records become one."""

from __future__ import annotations

from math import inf

from atoll.coordinator.core import events as e

SAY_EVERY_S = 1.0
"""Of commits, where there are many."""


class RunOutputs:
    def __init__(self) -> None:
        self._said_at = -inf  # what a sync comes to
        self._outputs: list[e.Output] = []
        self._records: list[e.Record] = []
        self._place = 0  # of the first of them, among the outputs

    def put_out(self, output: e.Output) -> None:
        """For the shell to execute, after everything that was put out before."""
        self._outputs.append(output)

    def persist(self, *records: e.Record) -> None:
        """All that the same events lead to becomes one transaction, at the place of its first record: a decision (a
        commit and the sync that it opens) is in the store as a whole or not at all, and a thousand sites that are
        admitted together do not wait for a thousand transactions."""
        if not self._records:
            self._place = len(self._outputs)
        self._records += records

    def take_outputs(self) -> list[e.Output]:
        """What the shell is to execute, in order. Once."""
        taken, self._outputs = self._outputs, []
        if self._records:
            taken.insert(self._place, e.Persist(tuple(self._records)))
            self._records, self._place = [], 0
        return taken

    def report(self, level: int, text: str) -> None:
        """A line for a person."""
        self.put_out(e.Report(level, text))

    def is_often(self, now: float) -> bool:
        """Whether what an ordinary sync comes to was told a person less than a second ago."""
        often = now < self._said_at + SAY_EVERY_S
        if not often:
            self._said_at = now
        return often
