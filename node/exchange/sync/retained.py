"""The contributions that a reducer retains for one sync, over all attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.sync.spill import Spill, Spilled
from atoll.protocol.errors import InvalidMessage

Site = tuple[int, int]  # site id, incarnation
Key = tuple[int, int, int]  # the same, and a chunk
AT_ONCE = 512
"""Contributions that are looked at before the event loop has its turn."""


class Retained:
    """A contribution never changes: the first one of a key stays."""

    def __init__(self, pool: Executor, spill: Spill | None = None) -> None:
        """Without `spill` all stays in memory."""
        self._pool = pool
        self._spill = spill
        self._items: dict[Key, Encoded | Spilled] = {}
        self._arrived: dict[Site, list[int]] = {}  # chunks, in their order; what is forgotten may still be among them
        self.weights: dict[Site, int] = {}
        self.roots: dict[Site, bytes] = {}
        self.num_bytes = 0
        self._is_dropped = False

    def arrived(self) -> list[tuple[Site, list[int]]]:
        """Chunks of each site whose contributions are here, for a thread: the lists only grow while nothing is
        forgotten."""
        return list(self._arrived.items())

    def kept(self, items: list[Encoded]) -> list[Encoded | Spilled]:
        """In a thread: the same in memory or on the disk, each to be added. Raises HostError."""
        return [item if self._spill is None else self._spill.keep(item) for item in items]

    def is_new(self, site_id: int, incarnation: int, item: Encoded | Spilled) -> bool:
        """Raises InvalidMessage if other bytes are held under the same key."""
        found = self._items.get((site_id, incarnation, item.chunk))
        if found is not None and found.hash != item.hash:
            raise InvalidMessage(
                f"site {site_id} sent chunk {item.chunk} again with other bytes; a contribution never changes"
            )
        return found is None

    def add(self, site_id: int, incarnation: int, item: Encoded | Spilled) -> None:
        """What was `kept`, unless there is one already, whose bytes `is_new` compares. Nothing after `drop`."""
        key = (site_id, incarnation, item.chunk)
        if key in self._items or self._is_dropped:
            self._release([item])
            return
        self._items[key] = item
        self._arrived.setdefault((site_id, incarnation), []).append(item.chunk)
        self.num_bytes += item.num_bytes

    def get(self, site_id: int, incarnation: int, chunk: int) -> Encoded | Spilled | None:
        return self._items.get((site_id, incarnation, chunk))

    def holds_any(self, site_id: int, incarnation: int) -> bool:
        return bool(self._arrived.get((site_id, incarnation)))

    def chunks_of(self, site_id: int, incarnation: int) -> set[int]:
        """In a thread."""
        arrived = self._arrived.get((site_id, incarnation), [])
        return {chunk for chunk in arrived if (site_id, incarnation, chunk) in self._items}

    async def keep(self, wanted: Callable[[Key], bool]) -> None:
        """Forgets what is not wanted, some at a time; who still reads it from the disk gets it, or a StaleError."""
        for site in list(self._arrived):
            arrived, kept, first = self._arrived[site], list[int](), 0
            while first < len(arrived):  # it may grow
                some = [(*site, chunk) for chunk in arrived[first : first + AT_ONCE]]
                first += len(some)
                stays = [wanted(key) for key in some]
                kept += [key[2] for key, stay in zip(some, stays, strict=True) if stay]
                self._forget([key for key, stay in zip(some, stays, strict=True) if not stay])
                await asyncio.sleep(0)
                if self._is_dropped:
                    return
            self._arrived[site] = kept

    def _forget(self, keys: list[Key]) -> None:
        items = [self._items.pop(key) for key in keys if key in self._items]
        self.num_bytes -= sum(item.num_bytes for item in items)
        if items:
            self._release(items)

    def drop(self) -> None:
        """Forgets all, and what a stream still brings: nobody would ever forget that."""
        self._is_dropped = True
        items, self._items, self.num_bytes = self._items, {}, 0
        self._release(items)
        free(self._arrived, self._pool)
        self._arrived = {}

    def _release(self, items: dict[Key, Encoded | Spilled] | list[Encoded | Spilled]) -> None:
        free(items, self._pool, None if self._spill is None else self._spill.release)


def free(items: dict[Any, Any] | list[Any], pool: Executor, release: Callable[[Any], None] | None = None) -> None:
    """Empties it in a thread: the system takes back the memory of what is large when its last reference goes, and needs
    as long for that as for giving it."""
    try:
        pool.submit(_empty, items, release)
    except RuntimeError:
        _empty(items, None)  # the pool is closed, and all of the spill's folder goes


def _empty(items: dict[Any, Any] | list[Any], release: Callable[[Any], None] | None) -> None:
    """One by one: `clear` would have the interpreter lock until the last of a million is freed."""
    while items:
        item = items.popitem()[1] if isinstance(items, dict) else items.pop()
        if release is not None:
            release(item)
