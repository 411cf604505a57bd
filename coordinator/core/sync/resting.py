"""Whose links would make each sync longer, and which syncs these sites sit out. Pure.

A site with a thin link contributes to every n-th sync, with all that it trained since its last turn. In the syncs
between it rests: it receives, trains on, and nobody waits for it. n is such that its turns cost the others a tenth of
their time. Turns are in the syncs whose number n divides, and n is a power of one prime: turns of several sites fall
together, and the others wait once for all of them. The prime is the least one that does not divide the number of
fragments, so that turns come to each fragment.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.coordinator.core.sync.links import Links

COST = 0.1
"""Of the time from commit to commit: so much longer turns make it."""
PRIMES = (2, 3, 5, 7, 11)
"""No number of fragments is divided by all of them."""
MOST_EVERY = 64
LEAST_EXTRA_S = 0.1
"""A shorter delay says more of machines than of their links."""
SLACK = 4.0
"""n falls only if a quarter of it would do: it does not flap."""
MOST_FACTOR = 8.0
RECOVERED = 2.0
"""A link that receives so many times as fast as after the last turn may send faster as well."""
ASKED = 32
"""Sites whose links say what is usual."""
REMEMBERED = 8
"""Syncs without a turn."""


@dataclass(slots=True)
class Thin:
    """A site whose link is slower than those of most."""

    every: int = 1
    extra_s: float = 0.0  # by which a sync with this site is longer
    factor: float = 1.0  # what its last turn cost, over what the rates of its links said
    down_bytes_per_s: float | None = None  # in the first sync after its last turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a commit tells of the sync that it ends."""

    sync: int
    site_ids: Sequence[int]
    """Of all sites that are here."""
    sync_bytes: int
    """That it moves to a site, and from it."""
    period_s: float
    """From one commit to the next."""
    hidden_s: float
    """So long an exchange costs nobody anything: sites train on meanwhile."""
    waited_s: float | None
    """From when the last site that never rests was ready to the commit; None if that says nothing of links."""
    most_every: int
    """Commits that a site may be behind and still come up with the log."""
    num_fragments: int


class Resting:
    """Over the syncs of one start of the coordinator: after a restart all sites contribute until links are known."""

    def __init__(self) -> None:
        self._thin: dict[int, Thin] = {}
        self._without: deque[float] = deque(maxlen=REMEMBERED)  # what syncs without a turn took, beyond what is hidden

    def every(self, site_id: int) -> int:
        """The site contributes to every sync whose number this divides."""
        return self._thin[site_id].every if site_id in self._thin else 1

    def extra_s(self, site_id: int) -> float:
        """By how much the site makes a sync longer in which it contributes, as far as that is known."""
        return self._thin[site_id].extra_s if site_id in self._thin else 0.0

    def rests(self, site_id: int, sync: int) -> bool:
        """Whether the site sits that sync out."""
        return sync % self.every(site_id) > 0

    def turns(self, sync: int) -> set[int]:
        """Sites that rest in most syncs, and not in that one: it waits for them even if they still fetch its base. A
        turn that they miss is used."""
        return {i for i, thin in self._thin.items() if thin.every > 1 and not self.rests(i, sync)}

    def forget(self, site_id: int) -> None:
        """The site has left."""
        self._thin.pop(site_id, None)

    def settle(self, links: Links, committed: Committed) -> list[int]:
        """After a commit: n of each site anew. The sites of which it is another one."""
        recovered = [i for i, thin in self._thin.items() if self._has_recovered(i, thin, committed.sync, links)]
        for site_id in recovered:  # its turn comes at once, and says how fast it sends now
            links.forget_uplink(site_id)
            self.forget(site_id)
        longer = _longer(links, committed)
        for site_id in recovered:
            longer.pop(site_id, None)
        self._measure(longer, committed)
        changed = recovered + [i for i, thin in self._thin.items() if thin.every > 1 and i not in longer]
        self._thin = {i: self._thin.get(i, Thin()) for i in longer}
        for site_id, thin in self._thin.items():
            thin.extra_s = thin.factor * longer[site_id]
            every, thin.every = thin.every, _every(thin, committed)
            if every != thin.every:
                changed.append(site_id)
        if changed:
            self._without.clear()
        return changed

    def _measure(self, longer: dict[int, float], committed: Committed) -> None:
        """What the turns in this sync cost, over what was expected of the slowest of them."""
        if committed.waited_s is None:
            return
        shown_s = max(0.0, committed.waited_s - committed.hidden_s)
        turns = self.turns(committed.sync)
        if not turns:
            self._without.append(shown_s)
            return
        expected_s = max(longer.get(i, 0.0) for i in turns)
        if self._without and expected_s:
            factor = (shown_s - statistics.median(self._without)) / expected_s
            for site_id in turns:
                self._thin[site_id].factor = min(max(factor, 1 / MOST_FACTOR), MOST_FACTOR)

    def _has_recovered(self, site_id: int, thin: Thin, sync: int, links: Links) -> bool:
        now = links.down_bytes_per_s(site_id)
        if not self.rests(site_id, sync):
            thin.down_bytes_per_s = None
        elif thin.down_bytes_per_s is None:
            thin.down_bytes_per_s = now
        before = thin.down_bytes_per_s
        return now is not None and before is not None and now >= RECOVERED * before


def _longer(links: Links, committed: Committed) -> dict[int, float]:
    """Of each site with a thin link: by how much its exchange is longer than usual, by what its links carry."""

    def exchange_s(site_id: int) -> float:
        return links.exchange_s(site_id, committed.sync_bytes, len(committed.site_ids) - 1)

    thin = [i for i in committed.site_ids if links.share(i) < 1]
    others = [i for i in committed.site_ids if links.share(i) >= 1][:ASKED]
    usual_s = max(committed.hidden_s, statistics.median(map(exchange_s, others)) if thin and others else 0.0)
    return {i: max(0.0, exchange_s(i) - usual_s) for i in thin}


def _every(thin: Thin, committed: Committed) -> int:
    needed = thin.extra_s / (COST * committed.period_s) if thin.extra_s >= LEAST_EXTRA_S else 0.0
    if thin.every / SLACK < needed <= thin.every:
        return thin.every
    prime, every = next(p for p in PRIMES if committed.num_fragments % p), 1
    while every < needed and every * prime <= min(MOST_EVERY, committed.most_every):
        every *= prime
    return every
