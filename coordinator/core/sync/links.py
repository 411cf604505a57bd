"""What each link carries, as the sites that receive over it say; and which sites' links are slower, or faster, than
those of most. Pure.

A site's own word decides nothing for it but against it: what it can send is what most others say that they got from it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from heapq import nsmallest
from typing import NamedTuple

from atoll.protocol.messages import MAX_LINKS, LinkUse

LEAST_S = 1e-3
"""A shorter time says more of the two machines than of their link."""
FAST = 0.01
FAST_S = 0.02
"""A link is fast if it moves the bytes of a sync within `FAST` of a period, or within this time: machines that are busy
take as long by themselves."""
ALIKE = 2.0
"""Links that differ by no more count as alike, and a share changes only if its link does by more."""


PATIENCE = 16
"""In commits, for runs whose reducers keep the errors of their averages: a chunk that changes hands loses its error."""


class Link(NamedTuple):
    sender: int
    receiver: int
    bytes_per_s: float


class Links:
    """By pair of sites, in both directions, over the syncs of one start of the coordinator. A receiver counts for at
    most `MAX_LINKS` senders, those of whom it spoke last."""

    def __init__(self, patience: int = 1) -> None:
        """`patience`: a share changes once its link is another one after so many commits in a row."""
        self._patience = patience
        self._num_others: dict[int, int] = {}  # of sites whose links are not like their shares: commits in a row
        self._into: dict[int, dict[int, float]] = {}  # receiver -> sender -> bytes a second
        self._out_of: dict[int, dict[int, float]] = {}  # the same by sender
        self._shares: dict[int, float] = {}  # of sites whose links are not like those of most

    def note(self, receiver: int, uses: Iterable[LinkUse]) -> None:
        """What came to a site in one exchange. The average is geometric, and half of it is the newest."""
        into = self._into.setdefault(receiver, {})
        for use in uses:
            if use.site_id == receiver or not use.received_bytes or use.seconds < 0:
                continue
            rate = max(1.0, use.received_bytes / max(use.seconds, LEAST_S))
            into[use.site_id] = math.sqrt(into.pop(use.site_id, rate)) * math.sqrt(rate)
            self._out_of.setdefault(use.site_id, {})[receiver] = into[use.site_id]
        for sender in list(into)[:-MAX_LINKS]:
            del into[sender], self._out_of[sender][receiver]

    def forget(self, site_id: int) -> None:
        """The site has left."""
        for sender in self._into.pop(site_id, ()):
            self._out_of[sender].pop(site_id)
        for receiver in self._out_of.pop(site_id, ()):
            self._into[receiver].pop(site_id)
        self._shares.pop(site_id, None)
        self._num_others.pop(site_id, None)

    def up_bytes_per_s(self, site_id: int) -> float | None:
        """To one of the others while it sends to all of them, as most of them say; None if that is not known. Of a
        single link either end may be the slow one, unless the other end is faster with most."""
        return _of_site(self._out_of.get(site_id, {}), self._into)

    def down_bytes_per_s(self, site_id: int) -> float | None:
        """The same of what it receives, as it says itself."""
        return _of_site(self._into.get(site_id, {}), self._out_of)

    def exchange_s(self, site_id: int, sync_bytes: int, num_peers: int) -> float:
        """How long the links of a site that reduces nothing are busy with a sync: all of it goes out once, and comes in
        once. A direction that is not known takes no time."""
        return sum(sync_bytes / num_peers / rate for rate in self._known(site_id))

    def forget_uplink(self, site_id: int) -> None:
        """The site may send faster now than others said."""
        for receiver in self._out_of.pop(site_id, ()):
            del self._into[receiver][site_id]

    def slowest(self, count: int) -> list[Link]:
        """The first ones, the slowest first."""
        links = (Link(s, r, rate) for r, into in self._into.items() for s, rate in into.items())
        return nsmallest(count, links, key=lambda link: (link.bytes_per_s, link.sender, link.receiver))

    def settle(self, site_ids: Collection[int], sync_bytes: int, period_s: float) -> None:
        """After a commit: how each site's link, in the slower direction, compares with the middle one; one that is not
        known is taken for fast. A sync moves so much at each site, to and from all others together, and there is one in
        each period."""
        fast = sync_bytes / max(1, len(site_ids) - 1) / max(FAST * period_s, FAST_S)
        rates = {i: min(fast, *self._known(i)) for i in site_ids}
        middle = statistics.median_high(rates.values())
        for site_id, rate in rates.items():
            share = rate / middle
            if _alike(share, self.share(site_id)):
                self._num_others.pop(site_id, None)
                continue
            self._num_others[site_id] = self._num_others.get(site_id, 0) + 1
            if self._num_others[site_id] >= self._patience:
                self._shares.pop(site_id, None)
                if not _alike(share, 1.0):
                    self._shares[site_id] = share

    def share(self, site_id: int) -> float:
        """1 for a link like those of most, and for one that is not known."""
        return self._shares.get(site_id, 1.0)

    def _known(self, site_id: int) -> Sequence[float]:
        either = (self.up_bytes_per_s(site_id), self.down_bytes_per_s(site_id), math.inf)
        return [rate for rate in either if rate is not None]


def _of_site(rates: dict[int, float], of_peers: dict[int, dict[int, float]]) -> float | None:
    """`of_peers`: the other direction of the same links."""
    if len(rates) != 1:
        return _middle(rates)
    ((peer, rate),) = rates.items()
    of_peer = _middle(of_peers[peer])
    return rate if of_peer is not None and ALIKE * rate < of_peer else None


def _middle(rates: dict[int, float]) -> float | None:
    """Of two the larger one: one slow link of three sites makes one of them slow."""
    return statistics.median_high(rates.values()) if len(rates) > 1 else None


def _alike(one: float, other: float) -> bool:
    return 1 / ALIKE <= one / other <= ALIKE
