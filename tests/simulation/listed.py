"""Which steps a site's snapshots list: each one step or more, and no step in two of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tests.simulation.sites import Sealed, Step

Written = tuple[int, int]
"""When a snapshot was written: generation of the workers and their step."""


@dataclass(slots=True)
class Listed:
    """By one start of a site. A snapshot lists the steps since the one before it was sealed, and those of snapshots
    that were given up until the ranks were told to write it."""

    in_flight: dict[int, Sealed] = field(default_factory=dict)
    """By fragment, or the number of all: sealed, and in no commit that the site holds."""
    most_in_flight: int = 0
    _generation: int = 0
    _epoch: int = 0
    _written_in: int = 0
    """The epoch in which the ranks were told to write a snapshot: it is void in another one."""
    _given_up: tuple[Step, ...] = ()
    _due: tuple[Step, ...] = ()
    """Of these, what the snapshot lists that is being written."""

    def look(
        self,
        held: Mapping[int, Written],
        generation: int,
        *,
        is_in_a_commit: Callable[[Sealed], bool],
        discards: bool,
        epoch: int,
    ) -> None:
        """At what the site holds between two events. Of a generation that is gone nothing is listed again, nor of what
        it discards, or of an epoch of its queue: their samples are drawn anew."""
        if generation != self._generation:
            self._generation, self._given_up, self._due = generation, (), ()
        for fragment, sealed in list(self.in_flight.items()):
            if held.get(fragment) == sealed.written:
                continue
            del self.in_flight[fragment]
            if sealed.generation == generation and not is_in_a_commit(sealed):
                self._given_up += sealed.steps
        if discards or epoch != self._epoch:
            self._epoch, self._given_up, self._due = epoch, (), ()

    def write(self) -> None:
        """The ranks are told to write one. What is given up after this is listed by the next one."""
        self._due, self._written_in = self._given_up, self._epoch

    def seal(self, written: Sealed) -> Sealed:
        """`written` lists the steps since the snapshot before it. With those that it lists in all."""
        before = self.in_flight.pop(written.fragment, None)
        given_up = self._due + (before.steps if before is not None else ())
        steps = tuple(sorted({*given_up, *written.steps}, key=lambda step: step.number))
        self._given_up = tuple(step for step in self._given_up if step not in self._due)
        self._due = ()
        sealed = replace(written, steps=steps)
        if self._written_in == self._epoch:
            self.in_flight[written.fragment] = sealed
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return sealed
