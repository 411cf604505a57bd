"""What is known of the contributors' weights: from the plan, or each from its site until the plan says them."""

from __future__ import annotations

from atoll.node.exchange.sync.attempt import Attempt
from atoll.protocol.errors import RefusedError
from atoll.protocol.messages import Member, Plan
from atoll.protocol.plans import is_weighed, weights, with_weights


class Weights:
    def __init__(self, attempt: Attempt, known: dict[tuple[int, int], int]) -> None:
        """`known`: of each start of a site, heard in all attempts at this sync."""
        self._where = attempt.where
        self._plan = attempt.plan
        self._known = known
        self.all_ready = is_weighed(attempt.plan)
        """Of the contributors: the coordinator has heard of all, and they have to get on."""
        for member in attempt.plan.contributors:
            if member.tokens:  # the plan's word counts, whatever was heard in an attempt before
                known[member.site_id, member.incarnation] = member.tokens

    def hear(self, member: Member, tokens: int) -> None:
        """From the header of a site's contributions. Raises RefusedError if it is not its weight."""
        if tokens <= 0:
            raise RefusedError(f"{self._where}: site {member.site_id} contributes with {tokens} tokens")
        known = self._known.setdefault((member.site_id, member.incarnation), tokens)
        if known != tokens:
            raise RefusedError(f"site {member.site_id} says {tokens} tokens, it has {known}; a weight never changes")

    def are_those_of(self, plan: Plan) -> None:
        """All contributors are ready: `plan` is the same with their weights."""
        self._plan = plan
        self.all_ready = True

    def of(self, member: Member) -> int:
        return self._known[member.site_id, member.incarnation]

    @property
    def are_known(self) -> bool:
        """Those who reduce hear all weights from the contributors; others wait for the plan that says them."""
        return all((c.site_id, c.incarnation) in self._known for c in self._plan.contributors)

    def vector(self) -> tuple[int, ...]:
        """Of the contributors, once all are known."""
        return tuple(self.of(c) for c in self._plan.contributors)

    def plan_with(self, tokens: tuple[int, ...]) -> Plan:
        """The plan with the weights that were averaged."""
        return self._plan if weights(self._plan) == tokens else with_weights(self._plan, tokens)
