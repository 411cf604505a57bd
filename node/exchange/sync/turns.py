"""Whose turn it is to get payloads from a reducer, and who is woken when that changes.

Contributions go first: reducers starve without them, and the uplink would idle while the last are reduced. But a slow
peer must not hold up the others: payloads go to a peer as soon as that one has this site's contributions. Receivers
come last.

With a thousand sites that all reduce, each has a thousand streams to send and as many to serve: what one of them has
sent wakes the one peer that it concerns, and a payload wakes those that may have it now.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain

from atoll.protocol.messages import Member


@dataclass(slots=True, eq=False)
class ServedPeer:
    """A stream that waits for payloads."""

    site_id: int
    takes_early: bool = True
    """It may have a payload before its turn."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, timeout_s: float) -> None:
        """Until something has changed for it since `changed` was cleared, or for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()


class Turns:
    """Of one exchange. `reducers`: the sites, at each of their places, to which this one sends contributions."""

    def __init__(self, reducers: Iterable[Member]) -> None:
        self.unsent = dict.fromkeys(reducers)
        """Those that do not have all of this site's contributions yet, in the order of the links."""
        self._num_unsent = Counter(reducer.site_id for reducer in self.unsent)  # places of a site
        self._served: dict[int, list[ServedPeer]] = {}  # by site: a stream that broke may end after its successor began

    @contextmanager
    def served(self, site_id: int) -> Iterator[ServedPeer]:
        peer = ServedPeer(site_id)
        self._served.setdefault(site_id, []).append(peer)
        try:
            yield peer
        finally:
            self._served[site_id].remove(peer)

    def may_have(self, site_id: int) -> bool:
        """Whether payloads may go to that site now."""
        return not self.unsent or self._num_unsent.get(site_id) == 0

    @property
    def unsent_site_ids(self) -> list[int]:
        """Each once, in the same order."""
        return list(dict.fromkeys(reducer.site_id for reducer in self.unsent))

    def sent(self, reducer: Member) -> None:
        """It has all contributions of this site to what it reduces at that place."""
        if reducer not in self.unsent:
            return
        del self.unsent[reducer]
        site_id = reducer.site_id
        self._num_unsent[site_id] -= 1
        if self._num_unsent[site_id]:
            return
        if self.unsent:
            self._wake(self._served.get(site_id, ()))
        else:
            self.wake_all()

    def all_sent(self) -> None:
        self.unsent.clear()
        self.wake_all()

    def new_payload(self) -> None:
        self._wake(p for p in self._all() if p.takes_early or self.may_have(p.site_id))

    def wake_all(self) -> None:
        """It is over, or everybody's turn."""
        self._wake(self._all())

    def _all(self) -> Iterator[ServedPeer]:
        return chain.from_iterable(self._served.values())

    def _wake(self, peers: Iterable[ServedPeer]) -> None:
        for peer in peers:
            peer.changed.set()
