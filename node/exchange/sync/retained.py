"""The contributions that a reducer holds for one sync, over all attempts; beyond a bound on the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import Any

from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.sync.spill import Spill, Spilled
from atoll.protocol.errors import InvalidMessage, RefusedError

Site = tuple[int, int]  # site id, incarnation
Key = tuple[int, int, int]  # the same, and a chunk
AT_ONCE = 512
"""Contributions that are looked at before the event loop has its turn."""


class Retained:
    """A contribution never changes: the first one of a key stays."""

    def __init__(self, spill: Spill | None = None) -> None:
        """Without `spill` all stays in memory."""
        self._spill = spill
        self._in_memory: dict[Key, Encoded] = {}
        self._on_disk: dict[Key, Spilled] = {}
        self._on_the_way: dict[Key, Encoded] = {}  # of those in memory: they are being written
        self._arrived: dict[Site, list[int]] = {}  # chunks, in their order; what is forgotten may still be among them
        self.weights: dict[Site, int] = {}
        self.num_bytes = 0
        self._memory_bytes = 0  # of these, what is in memory
        self._is_dropped = False

    def arrived(self) -> list[tuple[Site, list[int]]]:
        """Chunks of each site whose contributions are here, for a thread: the lists only grow while nothing is
        forgotten."""
        return list(self._arrived.items())

    def weigh(self, site_id: int, incarnation: int, tokens: int) -> None:
        """What the header of a site's contributions says. Raises RefusedError if it said something else before."""
        known = self.weights.setdefault((site_id, incarnation), tokens)
        if known != tokens:
            raise RefusedError(f"site {site_id} says {tokens} tokens, it has {known}; a weight never changes")

    def add(self, site_id: int, incarnation: int, encoded: Encoded) -> bool:
        """Whether it is new. Nothing after `drop`. Raises InvalidMessage if other bytes are held under the same key."""
        if self._is_dropped:
            return False
        key = (site_id, incarnation, encoded.chunk)
        found = self._in_memory.get(key) or self._on_disk.get(key)
        if found is not None:
            if found.hash != encoded.hash:
                raise InvalidMessage(
                    f"site {site_id} sent chunk {encoded.chunk} again with other bytes; a contribution never changes"
                )
            return False
        self._in_memory[key] = encoded
        self._arrived.setdefault((site_id, incarnation), []).append(encoded.chunk)
        self.num_bytes += len(encoded.data)
        self._memory_bytes += len(encoded.data)
        if self._spill is not None:
            self._spill.memory_bytes += len(encoded.data)
        return True

    def get(self, site_id: int, incarnation: int, chunk: int) -> Encoded | Spilled | None:
        key = (site_id, incarnation, chunk)
        return self._in_memory.get(key) or self._on_disk.get(key)

    def holds_any(self, site_id: int, incarnation: int) -> bool:
        return bool(self._arrived.get((site_id, incarnation)))

    def chunks_of(self, site_id: int, incarnation: int) -> set[int]:
        """In a thread."""
        arrived = self._arrived.get((site_id, incarnation), [])
        return {chunk for chunk in arrived if self.get(site_id, incarnation, chunk) is not None}

    async def fit_memory(self, pool: Executor) -> None:
        """Puts the newest on the disk until what all syncs hold in memory is within the bound. Raises HostError."""
        loop = asyncio.get_running_loop()
        while (chosen := self._next_to_spill()) is not None:
            key, item, spill = chosen
            self._on_the_way[key] = item
            spill.memory_bytes -= len(item.data)
            writing = loop.run_in_executor(pool, spill.write, item, spill.new_path())
            written: Spilled | None = None
            try:
                written = await asyncio.shield(writing)
            finally:
                # A stream that ends meanwhile leaves the item in memory; the next one that comes finds it there.
                del self._on_the_way[key]
                is_held = self._in_memory.get(key) is item
                if written is not None and is_held:
                    del self._in_memory[key]
                    self._memory_bytes -= len(item.data)
                    self._on_disk[key] = written
                else:
                    if is_held:
                        spill.memory_bytes += len(item.data)
                    writing.add_done_callback(partial(_remove_written, spill, pool))

    def _next_to_spill(self) -> tuple[Key, Encoded, Spill] | None:
        spill = self._spill
        if spill is None or spill.memory_bytes <= spill.memory_limit_bytes:
            return None
        for key in reversed(self._in_memory):
            if key not in self._on_the_way:
                return key, self._in_memory[key], spill
        return None

    async def keep(self, wanted: Callable[[Key], bool], pool: Executor) -> None:
        """Forgets what is not wanted, some at a time; who still reads it from the disk gets it, or a StaleError."""
        for site in list(self._arrived):
            arrived, kept, first = self._arrived[site], list[int](), 0
            while first < len(arrived):  # it may grow
                some = [(*site, chunk) for chunk in arrived[first : first + AT_ONCE]]
                first += len(some)
                stays = [wanted(key) for key in some]
                kept += [key[2] for key, stay in zip(some, stays, strict=True) if stay]
                self._forget_some([key for key, stay in zip(some, stays, strict=True) if not stay], pool)
                await asyncio.sleep(0)
                if self._is_dropped:
                    return
            self._arrived[site] = kept

    def _forget_some(self, keys: list[Key], pool: Executor) -> None:
        in_memory = {key: self._in_memory.pop(key) for key in keys if key in self._in_memory}
        on_disk = {key: self._on_disk.pop(key) for key in keys if key in self._on_disk}
        if in_memory or on_disk:
            memory_bytes = sum(len(item.data) for item in in_memory.values())
            self._forget(in_memory, memory_bytes, on_disk, sum(item.num_bytes for item in on_disk.values()), pool)

    def drop(self, pool: Executor) -> None:
        """Forgets all, and what a stream still brings: nobody would ever forget that."""
        self._is_dropped = True
        in_memory, self._in_memory = self._in_memory, {}
        on_disk, self._on_disk = self._on_disk, {}
        free(self._arrived, pool)
        self._arrived = {}
        self._forget(in_memory, self._memory_bytes, on_disk, self.num_bytes - self._memory_bytes, pool)

    def _forget(
        self,
        in_memory: dict[Key, Encoded],
        memory_bytes: int,
        on_disk: dict[Key, Spilled],
        disk_bytes: int,
        pool: Executor,
    ) -> None:
        self.num_bytes -= memory_bytes + disk_bytes
        self._memory_bytes -= memory_bytes
        if self._spill is not None:
            on_the_way = (item for key, item in self._on_the_way.items() if in_memory.get(key) is item)
            self._spill.memory_bytes -= memory_bytes - sum(len(item.data) for item in on_the_way)
            if on_disk:
                pool.submit(self._spill.remove, list(on_disk.values()))
        free(in_memory, pool)


def free(items: dict[Any, Any] | list[Any], pool: Executor) -> None:
    """Empties it in a thread: the system takes back the memory of what is large when its last reference goes, and needs
    as long for that as for giving it."""
    try:
        pool.submit(_empty, items)
    except RuntimeError:
        _empty(items)  # the pool is closed


def _empty(items: dict[Any, Any] | list[Any]) -> None:
    """One by one: `clear` would have the interpreter lock until the last of a million is freed."""
    take = items.popitem if isinstance(items, dict) else items.pop
    while items:
        take()


def _remove_written(spill: Spill, pool: Executor, writing: asyncio.Future[Spilled]) -> None:
    if not writing.cancelled() and writing.exception() is None:
        with suppress(RuntimeError):  # the pool is closed: all of the folder goes
            pool.submit(spill.remove, [writing.result()])
