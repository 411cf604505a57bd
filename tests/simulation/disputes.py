"""What must hold in a dispute, whatever its parties do: no honest site is evicted for it, and the run stands still only
while no honest site could show what is lacking."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from atoll.coordinator.core.events import SiteRecord
from atoll.protocol.errors import AtollError

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
    asked = world.coordinator.asked if world.coordinator is not None else None
    if asked is None:
        return []
    needs, found = asked.lacking_evidence(), []
    for name in asked.connected_sites():
        node = world.nodes[name].node if name in world.nodes else None
        plane = node.disk.plane if node is not None else None
        if name in world.hostile | world.hung or plane is None or asked.holds(name) is None or asked.is_fetching(name):
            continue
        for need in needs:
            try:
                data = plane._evidence(need.evidence, need.commit, need.chunk)
            except (AtollError, OSError):
                continue
            if asked.is_evidence(need, data):
                found.append(f"{name} has {need.in_words()}")
    return found
