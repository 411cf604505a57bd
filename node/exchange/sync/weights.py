"""What is known of the contributors' weights: as they were said of the plan, or each from its site until they are."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.node.exchange.sync.attempt import Attempt
from atoll.protocol.errors import RefusedError
from atoll.protocol.messages import Member


class Weights:
    def __init__(self, attempt: Attempt, told: Sequence[int], known: dict[tuple[int, int], int]) -> None:
        """`told`: what was said of the plan, if it was: that counts, whatever was heard in an attempt before. `known`:
        of each start of a site, heard in all attempts at this sync."""
        self._where = attempt.where
        self._starts = [(c.site_id, c.incarnation) for c in attempt.plan.contributors]
        self._known = known
        self.all_ready = bool(told)
        """Of the contributors: the coordinator has heard of all, and they have to get on."""
        if attempt.contributes:
            known[attempt.me.site_id, attempt.me.incarnation] = attempt.tokens
        known.update(zip(self._starts, told, strict=bool(told)))

    def hear(self, member: Member, tokens: int) -> None:
        """From the header of a site's contributions. Raises RefusedError if it is not its weight."""
        if tokens <= 0:
            raise RefusedError(f"{self._where}: site {member.site_id} contributes with {tokens} tokens")
        known = self._known.setdefault((member.site_id, member.incarnation), tokens)
        if known != tokens:
            raise RefusedError(f"site {member.site_id} says {tokens} tokens, it has {known}; a weight never changes")

    def are_told(self) -> None:
        """All contributors are ready, with the weights that are known here."""
        self.all_ready = True

    def of(self, member: Member) -> int:
        return self._known[member.site_id, member.incarnation]

    @property
    def are_known(self) -> bool:
        """Those who reduce hear all weights from the contributors; others wait until they are told."""
        return all(start in self._known for start in self._starts)

    def vector(self) -> tuple[int, ...]:
        """Of the contributors, once all are known."""
        return tuple(self._known[start] for start in self._starts)
