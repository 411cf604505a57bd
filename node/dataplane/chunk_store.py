"""Records of chunks on disk, each with a version and a hash, whole after a crash at any byte.

A record is computed into a spare place and put in force by one index entry (see `places.py`, `chunk_index.py`), so a
crash leaves each chunk as it was or as it shall be. Readers pin a record: its place is not used again before they are
done. What the records hold, and which versions belong together, is its owner's affair. Methods may be called from
several threads.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from atoll.node.dataplane import store_files
from atoll.node.dataplane.chunk_index import Entry
from atoll.node.dataplane.places import SPARES, PlaceMap
from atoll.node.dataplane.store_files import Bytes, StoreKind
from atoll.node.threads import each, pool_of
from atoll.protocol.disk import Disk
from atoll.protocol.errors import StateError
from atoll.protocol.layout import chunk_hash

log = logging.getLogger(__name__)

MAX_VERIFYING_THREADS = 4
"""As a store is opened; each has a record in memory."""
EMPTY = Entry(version=0, serial=0, place=-1, hash=chunk_hash(b""))
"""In force for chunks without bytes, always."""
_STALL_S = 60.0
"""While other records are written a slow disk is waited for; from the last one on so long, or up to twice that."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A copy."""

    version: int
    hash: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class Pin:
    """A record in its place, where it stays as it is until it is unpinned. `data` is read-only."""

    entry: Entry
    data: Bytes


class Records(Protocol):
    """Of chunks, to read."""

    folder: Path

    def pinned(self, chunk: int) -> AbstractContextManager[Pin]:
        """See `ChunkStore.pinned`."""
        ...


class ChunkStore:
    """Made by `create` or `open`."""

    def __init__(self, folder: Path, kind: StoreKind, places: PlaceMap) -> None:
        self.folder = folder
        self.kind = kind
        self._sizes = kind.record_bytes
        self._places = places
        self._index, self._records = store_files.opened(folder, kind, places)
        self.lock = threading.Condition()
        """Guards all that follows, and what the owner keeps by `noted`."""
        self.noted: Callable[[int, Entry | None, Entry | None], None] = lambda chunk, old, new: None
        """Called under the lock as another entry comes into force: chunk, the entry before, the one from now on."""
        self._entries: list[Entry | None] = [None if size else EMPTY for size in self._sizes]
        self._serials = [0] * len(self._sizes)
        self.num_missing = self._entries.count(None)
        self._pins: Counter[int] = Counter()
        self._retired: set[int] = set()  # replaced places that a reader still pins
        self._writing: set[int] = set()
        self.num_ended = 0
        """Records that were written, or not."""
        self._spares = [list(range(g.first_place, g.first_place + g.num_places)) for g in places.groups]

    @classmethod
    def create(cls, folder: Path, kind: StoreKind, disk: Disk, num_spares: int = SPARES) -> ChunkStore:
        """A store without a record in `folder`, instead of what was there, of which so many chunks of one size can be
        replaced at once. Raises HostError if the disk has no room."""
        places = PlaceMap(kind.record_bytes, num_spares)
        store_files.create(folder, kind, places, disk)
        return cls(folder, kind, places)

    @classmethod
    def open(cls, folder: Path, kind: StoreKind) -> ChunkStore:
        """What `folder` holds; `verify` it next. Raises TornState if the files are not whole, StateError if they are
        not of this kind."""
        return cls(folder, kind, store_files.places_in(folder, kind))

    # --- reading

    @property
    def versions(self) -> list[int | None]:
        """Of each chunk; None where there is no valid record; 0 for chunks without bytes."""
        with self.lock:
            return [entry.version if entry else None for entry in self._entries]

    def hash_of(self, chunk: int) -> bytes | None:
        with self.lock:
            entry = self._entries[chunk]
        return entry.hash if entry else None

    def hashes(self) -> list[bytes]:
        """Of all chunks, none of which may be missing."""
        with self.lock:
            return [entry.hash for entry in self._entries if entry]

    @contextmanager
    def pinned(self, chunk: int) -> Iterator[Pin]:
        """Raises StateError if there is no valid record."""
        pin = self.pin(chunk)
        try:
            yield pin
        finally:
            self.unpin(chunk, pin)

    def pin(self, chunk: int) -> Pin:
        """As `pinned`, until it is unpinned."""
        with self.lock:
            if (entry := self._entries[chunk]) is None:
                raise StateError(
                    f"{self.folder}: chunk {chunk} of {self.kind.name_of(chunk)!r} is missing; fetch the state again"
                )
            return self._pin(chunk, entry)

    def offset_bytes(self, chunk: int, pin: Pin) -> int:
        """Of its record in the file of records."""
        return self._places.offset_bytes(chunk, pin.entry.place)

    def pin_all(self) -> dict[int, Pin]:
        """The records of all chunks that have one, as they are at this moment; each is to be unpinned."""
        with self.lock:
            return {chunk: self._pin(chunk, e) for chunk, e in enumerate(self._entries) if e and self._sizes[chunk]}

    def _pin(self, chunk: int, entry: Entry) -> Pin:
        self._pins[entry.place] += 1
        view = self._record(chunk, entry.place)
        view.flags.writeable = False
        return Pin(entry, view)

    def unpin(self, chunk: int, pin: Pin) -> None:
        place = pin.entry.place
        with self.lock:
            self._pins[place] -= 1
            if not self._pins[place]:
                del self._pins[place]
                if place in self._retired:
                    self._retired.remove(place)
                    self._release(chunk, place)

    # --- writing

    def replace(self, chunk: int, version: int, fill: Callable[[Bytes], None], hash: bytes | None = None) -> bytes:
        """Lets `fill` compute a record into a spare place, then puts it in force; its hash. `hash`: of what is filled
        in, if the caller has just computed it.

        Nothing changes if `fill` raises. Raises StateError if no place becomes free, and none is written.
        """
        if not self._sizes[chunk]:
            return EMPTY.hash
        spares = self._spares[self._places.group_of[chunk]]
        with self.lock:
            num_ended = -1
            while not self.lock.wait_for(lambda: spares and chunk not in self._writing, _STALL_S):
                if num_ended == self.num_ended:
                    raise StateError(
                        f"{self.folder}: no spare place for chunk {chunk}; nothing was written there for {_STALL_S:g} s"
                    )
                num_ended = self.num_ended
            place = spares.pop()
            self._writing.add(chunk)
        done = False
        try:
            record = self._record(chunk, place)
            fill(record)
            entry = Entry(version, self._serials[chunk] + 1, place, hash or chunk_hash(record.data))
            self._index.write(chunk, entry)
            done = True
        finally:
            with self.lock:
                self._writing.remove(chunk)
                self.num_ended += 1
                if done:
                    self._put_in_force(chunk, entry)
                else:
                    spares.append(place)
                self.lock.notify_all()
        return entry.hash

    def relabel(self, chunk: int, version: int) -> None:
        """The record in force is of that version from now on; for good once `index_path` is synced. Nothing else may be
        written meanwhile."""
        with self.lock:
            old = self._entries[chunk]
            if old is not None and self._sizes[chunk]:
                entry = replace(old, version=version, serial=old.serial + 1)
                self._index.write(chunk, entry)
                self._entries[chunk], self._serials[chunk] = entry, entry.serial
                self.noted(chunk, old, entry)

    @property
    def index_path(self) -> Path:
        """Which record of each chunk counts."""
        return store_files.path_of(self.folder, self.kind.name, "index")

    def forget(self, chunk: int) -> None:
        """The chunk is missing from now on."""
        with self.lock:
            old = self._entries[chunk]
            if old is None or not self._sizes[chunk]:
                return
            self._index.clear(chunk)  # first: another process may be reading there
            self._entries[chunk] = None
            self.num_missing += 1
            self.noted(chunk, old, None)
            self._retire(chunk, old.place)

    def _put_in_force(self, chunk: int, entry: Entry) -> None:
        old, self._entries[chunk] = self._entries[chunk], entry
        self._serials[chunk] = entry.serial
        if old is None:
            self.num_missing -= 1
        self.noted(chunk, old, entry)
        if old is not None:
            self._retire(chunk, old.place)

    def _retire(self, chunk: int, place: int) -> None:
        """It is free once nobody reads there any more."""
        if self._pins[place]:
            self._retired.add(place)
        else:
            self._release(chunk, place)

    def _release(self, chunk: int, place: int) -> None:
        self._spares[self._places.group_of[chunk]].append(place)
        self.lock.notify_all()

    def _record(self, chunk: int, place: int) -> Bytes:
        if not self._sizes[chunk]:
            return self._records[:0]
        start = self._places.offset_bytes(chunk, place)
        return self._records[start : start + self._sizes[chunk]]

    # --- damage

    def damaged(self) -> list[int]:
        """Chunks whose bytes do not have their hash any more. Nothing may be written meanwhile."""
        found = []
        for chunk, entry in enumerate(self._entries):
            if entry is not None:
                with self.pinned(chunk) as pin:
                    if chunk_hash(pin.data.data) != entry.hash:
                        found.append(chunk)
        return found

    def verify(self, num_threads: int) -> list[list[Entry]]:
        """Takes for each chunk the newest entry whose record has its hash, and no place twice.

        Once, before anything else. Returns the valid entries of each chunk, in force or not, the newest first.
        """
        found = [self._index.entries(chunk) if size else [] for chunk, size in enumerate(self._sizes)]
        with pool_of(min(num_threads, MAX_VERIFYING_THREADS)) as pool:
            intact = each(lambda c: [e for e in found[c] if self._is_intact(c, e)], range(len(found)), pool)
        taken: set[int] = set()
        chosen: dict[int, Entry] = {}
        for newest in (True, False):  # what is in force goes before what was
            for chunk, entries in enumerate(intact):
                for entry in entries:
                    if chunk in chosen or (entry is found[chunk][0]) is not newest or entry.place in taken:
                        continue
                    taken.add(entry.place)
                    chosen[chunk] = entry
        for spares in self._spares:
            spares[:] = [place for place in spares if place not in taken]
        with self.lock:
            for chunk, entries in enumerate(found):
                if entries:
                    self._take(chunk, entries[0], chosen.get(chunk))
        return found

    def _take(self, chunk: int, newest: Entry, chosen: Entry | None) -> None:
        if chosen is not newest:  # what does not count here does not count for another process either
            self._index.clear(chunk, [] if chosen is None else [chosen])
        if chosen is not None:
            self._put_in_force(chunk, chosen)
        else:
            self._serials[chunk] = newest.serial
        if chosen is not newest:
            log.warning(
                "%s: chunk %d of %r is damaged at commit %d; %s",
                self.folder, chunk, self.kind.name_of(chunk), newest.version,
                f"commit {chosen.version} is whole" if chosen else "it must be fetched",
            )  # fmt: skip

    def _is_intact(self, chunk: int, entry: Entry) -> bool:
        return self._places.fits(chunk, entry.place) and chunk_hash(self._record(chunk, entry.place).data) == entry.hash
