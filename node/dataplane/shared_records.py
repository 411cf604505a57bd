"""What another process of this host keeps in a chunk store, read where it lies.

That process alone writes. It computes a record into a spare place, puts it in force by an entry of the index, and uses
the place of the record before again only then. So what was read of a place was whole if the same entry is in force
after it: a reader looks twice, and takes no lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.node.dataplane import store_files
from atoll.node.dataplane.chunk_index import ChunkIndex, Entry
from atoll.node.dataplane.chunk_store import EMPTY, Pin
from atoll.node.dataplane.error_feedback import error_in
from atoll.node.dataplane.outer_state import PinnedChunk, pinned_chunk
from atoll.node.dataplane.places import PlaceMap
from atoll.node.dataplane.store_files import Bytes, StoreKind
from atoll.protocol.codecs.arithmetic import Floats
from atoll.protocol.errors import StateError
from atoll.protocol.layout import Layout


class SharedRecords:
    """`look_anew` before each exchange: the writer may have made other files in place of these."""

    def __init__(self, folder: Path, kind: StoreKind) -> None:
        self.folder = folder
        self._kind = kind
        self._places = PlaceMap(())  # of the files that are mapped
        self._mapped: tuple[ChunkIndex, Bytes] | None = None
        self._file: tuple[int, int] | None = None  # device and number of the one that is mapped

    def look_anew(self) -> None:
        """In a thread. Raises StateError if there is no whole store of this kind."""
        while self._file != (found := self._found()):  # also if it was made anew just now
            self._places = store_files.places_in(self.folder, self._kind)
            self._mapped = store_files.opened(self.folder, self._kind, self._places, to_write=False)
            self._file = found

    def _found(self) -> tuple[int, int]:
        try:
            found = store_files.path_of(self.folder, self._kind.name, "index").stat()
        except OSError as error:
            raise StateError(f"{self.folder}: no {self._kind.what} is there: {error.strerror}") from None
        return found.st_dev, found.st_ino

    @contextmanager
    def pinned(self, chunk: int) -> Iterator[Pin]:
        """The record in its place. Raises StateError at the end if it was replaced meanwhile, whatever was made of it
        inside the block; at the beginning if there is none."""
        size = self._kind.record_bytes[chunk]
        if not size:
            yield Pin(EMPTY, np.empty(0, np.uint8))
            return
        if self._mapped is None:
            raise StateError(f"{self.folder}: the {self._kind.what} was not looked at yet")
        index, records = self._mapped
        entry = self._in_force(index, chunk)
        start = self._places.offset_bytes(chunk, entry.place)
        try:
            yield Pin(entry, records[start : start + size])
        finally:
            if self._in_force(index, chunk) != entry:
                raise StateError(
                    f"{self.folder}: chunk {chunk} of the {self._kind.what} was replaced while it was read: the node "
                    "has gone on, and this exchange is over"
                )

    def _in_force(self, index: ChunkIndex, chunk: int) -> Entry:
        entry = next(iter(index.entries(chunk)), None)
        if entry is None or not self._places.fits(chunk, entry.place):
            raise StateError(f"{self.folder}: chunk {chunk} of {self._kind.name_of(chunk)!r} is missing")
        return entry


@dataclass(frozen=True, slots=True)
class SharedOuter:
    """The outer state of the node."""

    layout: Layout
    records: SharedRecords

    @contextmanager
    def pinned(self, chunk: int) -> Iterator[PinnedChunk]:
        """As of `OuterState`, but that it raises StateError if the record was replaced meanwhile."""
        with self.records.pinned(chunk) as pin:
            yield pinned_chunk(self.layout.chunks[chunk], pin)


@dataclass(frozen=True, slots=True)
class SharedErrors:
    """Its error feedback."""

    layout: Layout
    beta: np.float32
    records: SharedRecords

    def of(self, chunk: int, commit: int) -> AbstractContextManager[Floats]:
        """As of `ErrorFeedback`."""
        return error_in(self.records, self.layout, chunk, commit)
