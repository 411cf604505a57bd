"""What the core wants, in order, until its shell takes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.coordinator.core.events import Output, Persist, Record


@dataclass(slots=True)
class Outbox:
    """Collects outputs in order. All that is persisted becomes one transaction, at the place of its first record: a
    decision (a commit and the sync that it opens) is in the store as a whole or not at all, and a thousand sites that
    are admitted together do not wait for a thousand transactions."""

    outputs: list[Output] = field(default_factory=list)
    _records: list[Record] = field(default_factory=list)
    _place: int = 0

    def put(self, output: Output) -> None:
        """After everything before."""
        self.outputs.append(output)

    def persist(self, *records: Record) -> None:
        """At the place of the first record."""
        if not self._records:
            self._place = len(self.outputs)
        self._records += records

    def take(self) -> list[Output]:
        """All of it, once."""
        taken, self.outputs = self.outputs, []
        if self._records:
            taken.insert(self._place, Persist(tuple(self._records)))
            self._records.clear()
        return taken
