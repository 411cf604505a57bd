"""What must hold in a dispute, whatever its parties do: no honest site is evicted for it, and the run stands still only
while no honest site could show what is lacking."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.coordinator.core.events import SiteRecord
from atoll.coordinator.core.log import evidence
from atoll.coordinator.core.log.disputes import Dispute, Need
from atoll.protocol.errors import AtollError
from atoll.protocol.messages import Evidence

if TYPE_CHECKING:
    from tests.simulation.world import World

_FOR_A_DISPUTE = re.compile(
    r"its state of commit [1-9]|it was asked for |it said that commit |it said what state commit "
)
"""Of commit 0 the seeder is right by its word."""


def honest_who_lost(world: World) -> list[str]:
    """Evicted as if they had lied. A site whose core hangs may be, as it shows nothing."""
    bad = {site.process.machine for site in world.checks.bad_hosts} | world.hostile
    found = []
    for record in world.store.kept:
        if not isinstance(record, SiteRecord) or record.name in bad or not _FOR_A_DISPUTE.search(record.evicted):
            continue
        if record.name not in world.hung or "has not answered" not in record.evicted:
            found.append(f"{record.name}: {record.evicted}")
    return sorted(set(found))


def who_could_settle(world: World) -> list[str]:
    """Honest sites that the coordinator hears, and what they have of that which it says nobody shows."""
    server = world.coordinator.server if world.coordinator is not None else None
    dispute = server._core.run.dispute if server is not None else None
    if server is None or dispute is None:
        return []
    run, found = server._core.run, []
    for site in run.members.connected():
        node = world.nodes[site.name].node if site.name in world.nodes else None
        plane = node.plane if node is not None else None
        if site.name in world.hostile | world.hung or plane is None or site.applied is None or site.fetches:
            continue
        for need in _lacking(dispute):
            try:
                data = plane._evidence(need.evidence, need.commit, need.chunk)
            except (AtollError, OSError):
                continue
            check = evidence._check(run, need, len(data))
            check.add(data)
            if check.finish() == need.expected:
                found.append(f"{site.name} has {need.in_words()}")
    return found


def _lacking(dispute: Dispute) -> Iterator[Need]:
    for need in dict.fromkeys(need for need, _ in dispute.tried):
        of_a_side = need.evidence is Evidence.CHUNK_HASHES and need.commit == dispute.commit
        is_named = "not every side shows" in dispute.undecided if of_a_side else need.in_words() in dispute.undecided
        if is_named and need not in dispute.found:
            yield need
