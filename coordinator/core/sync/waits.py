"""Who holds up an exchange, from what its contributors say that they wait for. Pure.

A site that has sent everything waits for payloads of a reducer; a reducer waits for contributions, which depend on
nobody else. So what begins with a site that gets no further ends with its reducer, or with whom that one waits for, and
never in a circle. A reducer is believed that it waits for others unless several of those say that they have sent it
everything: its word stands against one other, and neither of the two reduces in the next attempt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from atoll.coordinator.core.sync.blame import Pair
from atoll.protocol.messages import Heartbeat

LEAST_CONTRADICTIONS = 2


@dataclass(frozen=True, slots=True)
class Waits:
    """Of one contributor: the others whose contributions it lacks as a reducer, and whose payloads."""

    contributions: frozenset[int] = frozenset()
    payloads: frozenset[int] = frozenset()

    @property
    def all(self) -> frozenset[int]:
        """Whatever it lacks of them."""
        return self.contributions | self.payloads


def waits_of(site_id: int, heartbeat: Heartbeat, contributors: frozenset[int]) -> Waits:
    """Of what a site says, what can be."""

    def others(named: Collection[int]) -> frozenset[int]:
        return contributors.intersection(named) - {site_id} if named else frozenset()

    return Waits(others(heartbeat.waits_for_contributions), others(heartbeat.waits_for_payloads))


def to_blame(
    site_ids: Iterable[int], waits: Mapping[int, Waits], reports: Iterable[Pair], done: Collection[int]
) -> set[Pair]:
    """Who lacks something of whom, beginning with the sites that get no further.

    `reports`: who said to the coordinator that it could not exchange with whom. A site that is done has sent its
    contributions, and lacks none."""
    reported: defaultdict[int, set[int]] = defaultdict(set)
    for reporter, peer in reports:
        reported[reporter].add(peer)
    waiting: dict[int, list[int]] = {}  # for payloads of this reducer
    found: set[Pair] = set()
    for site_id in site_ids:
        mine = waits[site_id]
        found.update((site_id, peer) for peer in mine.contributions)
        for reducer in mine.payloads:
            waiting.setdefault(reducer, []).append(site_id)
    for reducer, sites in waiting.items():
        excuses = _excuses(reducer, waits, reported[reducer], done)
        named = excuses - {sites[0]} if len(sites) == 1 else excuses
        found.update((reducer, peer) for peer in named)
        found.update((site_id, reducer) for site_id in sites if excuses <= {site_id})
    return found


def _excuses(reducer: int, waits: Mapping[int, Waits], reported: Collection[int], done: Collection[int]) -> set[int]:
    if reducer in done:
        return set()
    named = {*reported, *(waits[reducer].contributions if reducer in waits else ())}
    named.difference_update(done)
    contradict = [peer for peer in named if peer in waits and reducer in waits[peer].payloads]
    return set() if len(contradict) >= LEAST_CONTRADICTIONS else named
