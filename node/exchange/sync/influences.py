"""In a run that averages by influence: what each contributor counts, as the coordinator says it once all reducers have
said the inner products of what they are to average. Until then nobody averages, and nobody waits for payloads."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.node.exchange.sync.attempt import Attempt
from atoll.protocol.messages import Member


class Influences:
    def __init__(self, attempt: Attempt) -> None:
        self._places = {c.site_id: place for place, c in enumerate(attempt.plan.contributors)}
        self.vector: tuple[int, ...] = ()
        """Of the contributors; empty before it is told, and in other runs."""
        self.are_told = not attempt.data.travels.trainable.by_influence

    def tell(self, vector: Sequence[int]) -> None:
        """One for each contributor. It never changes."""
        self.vector, self.are_told = tuple(vector), True

    def of(self, member: Member) -> int:
        return self.vector[self._places[member.site_id]]
