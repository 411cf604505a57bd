"""Snapshots of the outer state: files that, once there, are whole, and from which the payload log leads on.

A snapshot is copied chunk by chunk while commits go on, so its chunks may be at several commits; each has its version
and hash in the file's table, and the payloads of the commits between are in the log (`rebuild.py` puts them together).
Frozen tensors never change and have a file of their own, written once.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.node.dataplane.chunk_store import ChunkRecord
from atoll.node.dataplane.outer_state import OuterState, state_key
from atoll.node.dataplane.outer_update import record_bytes
from atoll.protocol.digest import DIGEST_BYTES, Digest
from atoll.protocol.disk import disk_error, make_folder, open_new, sync_folder
from atoll.protocol.errors import StateError
from atoll.protocol.layout import Layout, chunk_hash

log = logging.getLogger(__name__)

_MAGIC = b"ATOLLSN1"
_HEADER = struct.Struct("<8s32sQ")  # magic, key of run and layout, number of chunks; the table; a digest of both
_ENTRY = struct.Struct("<IQ32s")  # chunk, version, hash
_NAME = re.compile(r"commit-(\d{1,20})\.snapshot")
FROZEN = "frozen.snapshot"


@dataclass(frozen=True, slots=True)
class _Place:
    version: int
    hash: bytes
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """One snapshot, its table checked; the records are checked as they are read."""

    path: Path
    _places: dict[int, _Place] = field(repr=False)

    @property
    def oldest(self) -> int:
        """The lowest version of a chunk: the log must have all commits after it."""
        return min((p.version for p in self._places.values()), default=0)

    @property
    def newest(self) -> int:
        """The highest version of a chunk: the first commit at which the whole state can be."""
        return max((p.version for p in self._places.values()), default=0)

    def version(self, chunk: int) -> int | None:
        """None if the chunk is not in this file."""
        place = self._places.get(chunk)
        return place.version if place else None

    def read(self, chunk: int) -> ChunkRecord:
        """Raises StateError, naming the file, if the record is not the one that was written."""
        place = self._places[chunk]
        try:
            with self.path.open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.size)
        except OSError as error:
            raise StateError(f"{self.path}: {error.strerror}") from None
        if chunk_hash(data) != place.hash:
            raise StateError(f"{self.path}: the record of chunk {chunk} is damaged")
        return ChunkRecord(place.version, place.hash, data)


class Snapshots:
    """The snapshots of one run in a folder. Damaged ones are removed, with a warning, when the folder is opened."""

    def __init__(self, folder: Path, layout: Layout, slots: tuple[str, ...], run_id: str) -> None:
        self._folder = folder
        self._aside = folder / "snapshot.new"
        self._rebuilt = folder / "rebuilt.new"
        self._lock = threading.Lock()
        self.num_cleared = 0
        """How often snapshots were removed by `clear` or `roll_back`."""
        self.spared: int | None = None
        """The commit of a snapshot that `add` made and `write` leaves, however many younger ones there are."""
        self._sizes = [record_bytes(layout, slots, c.index) for c in layout.chunks]
        self._key = state_key(layout, slots, run_id)
        self._sync_chunks = layout.sync_chunks
        self._frozen_chunks = [c.index for c in layout.chunks[layout.num_sync_chunks :] if c.num_elements]
        self.files: tuple[SnapshotFile, ...] = ()
        """Of the sync's chunks, the newest first. Another tuple takes its place: who reads it sees one moment."""
        self.frozen: SnapshotFile | None = None
        try:
            make_folder(folder)
        except OSError as error:
            raise disk_error(error, folder) from error
        self._open_all()

    def write(self, outer: OuterState, keep: int, num_cleared: int) -> None:
        """A snapshot of `outer` as it is now, on the disk for good; then at most `keep` are left. Nothing comes of it
        if snapshots were removed since `num_cleared` was read: read it before `outer` is chosen.

        Raises StateError if a chunk is missing, or its bytes do not have its hash any more; HostError for the disk.
        """
        if self._frozen_chunks and self.frozen is None:
            self._write_frozen(outer, num_cleared)
        newest = self._write_aside(self._aside, outer, self._sync_chunks, lambda chunk: _checked(outer, chunk))
        self._put_in_place(self._aside, num_cleared, f"commit-{newest}.snapshot")
        with self._lock:
            gone = [f for f in self.files[keep:] if f.newest != self.spared]
            self.files = tuple(f for f in self.files if f not in gone)
            for old in gone:
                old.path.unlink(missing_ok=True)

    def add(
        self, outer: OuterState, commit: int, read: Callable[[int], ChunkRecord], check: Callable[[], None]
    ) -> None:
        """A snapshot of an older commit than `outer` has, on the disk for good; no younger one takes its place while
        it is `spared`. `read` gives the records at `commit`; `check` raises if they were not what was wanted.

        Raises StateError if snapshots were removed meanwhile, HostError for the disk.
        """
        num_cleared = self.num_cleared
        if self._frozen_chunks and self.frozen is None:
            self._write_frozen(outer, num_cleared)
        self._write_aside(self._rebuilt, outer, self._sync_chunks, read)
        try:
            check()
        except BaseException:
            self._rebuilt.unlink(missing_ok=True)
            raise
        if not self._put_in_place(self._rebuilt, num_cleared, f"commit-{commit}.snapshot"):
            self._rebuilt.unlink(missing_ok=True)
            raise StateError(f"{self._folder}: the snapshots were removed meanwhile")
        self.spared = commit

    def _write_frozen(self, outer: OuterState, num_cleared: int) -> None:
        self._write_aside(self._aside, outer, self._frozen_chunks, lambda chunk: _checked(outer, chunk))
        self._put_in_place(self._aside, num_cleared, FROZEN)

    def clear(self) -> None:
        """Removes all, for good: what is discarded must not come back."""
        with self._lock:
            self.num_cleared += 1
            self.spared = None
            for path in sorted(self._folder.iterdir()):
                path.unlink(missing_ok=True)
            self.files, self.frozen = (), None
            sync_folder(self._folder)

    def roll_back(self, commit: int) -> None:
        """Removes, for good, those with chunks of later commits, and the one that is being written."""
        with self._lock:
            self.num_cleared += 1
            self.spared = None
            void = [f for f in self.files if f.newest > commit]
            self.files = tuple(f for f in self.files if f not in void)
            for file in void:
                file.path.unlink(missing_ok=True)
            sync_folder(self._folder)

    def _write_aside(
        self, aside: Path, outer: OuterState, chunks: Sequence[int], read: Callable[[int], ChunkRecord]
    ) -> int:
        """A synced file under another name; the highest version in it."""
        table = bytearray(_HEADER.pack(_MAGIC, self._key, len(chunks)))
        newest = 0
        try:
            with open_new(aside) as file:
                file.seek(self._table_bytes(len(chunks)))
                for chunk in chunks:
                    record = read(chunk)
                    file.write(record.data)
                    table += _ENTRY.pack(chunk, record.version, record.hash)
                    newest = max(newest, record.version)
                file.seek(0)
                file.write(table + self._digest(table))
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            aside.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise disk_error(error, aside, sum(self._sizes[c] for c in chunks)) from error
            raise
        return newest

    def _put_in_place(self, aside: Path, num_cleared: int, name: str) -> bool:
        """False if snapshots were removed meanwhile."""
        path = self._folder / name
        with self._lock:
            if num_cleared != self.num_cleared:
                return False
            try:
                os.replace(aside, path)
                sync_folder(self._folder)
            except OSError as error:
                raise disk_error(error, path) from error
            if name == FROZEN:
                self.frozen = self._open(path, self._frozen_chunks)
            else:
                self._add(self._open(path, self._sync_chunks))
        return True

    # --- opening

    def _open_all(self) -> None:
        for path in sorted(self._folder.iterdir()):
            try:
                if path.name.endswith(".new"):
                    path.unlink(missing_ok=True)
                elif path.name == FROZEN:
                    self.frozen = self._open(path, self._frozen_chunks)
                elif _NAME.fullmatch(path.name):
                    self._add(self._open(path, self._sync_chunks))
            except StateError as error:
                log.warning("removed a snapshot: %s", error)
                path.unlink(missing_ok=True)

    def _add(self, file: SnapshotFile) -> None:
        """It takes the place of one with its name."""
        others = (f for f in self.files if f.path != file.path)
        self.files = tuple(sorted((file, *others), key=lambda f: -f.newest))

    def _open(self, path: Path, expected: Iterable[int]) -> SnapshotFile:
        chunks = list(expected)
        size = self._table_bytes(len(chunks))
        try:
            with path.open("rb") as file:
                head = file.read(size)
                end = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise StateError(f"{path}: {error.strerror}") from None
        table = head[:-DIGEST_BYTES]
        if len(head) != size or head[-DIGEST_BYTES:] != self._digest(table):
            raise StateError(f"{path}: torn, or of another run")
        magic, key, count = _HEADER.unpack_from(table)
        if (magic, key, count) != (_MAGIC, self._key, len(chunks)):
            raise StateError(f"{path}: of another run or model")
        places, offset = {}, size
        for place in range(count):
            chunk, version, value = _ENTRY.unpack_from(table, _HEADER.size + place * _ENTRY.size)
            places[chunk] = _Place(version, value, offset, self._sizes[chunk])
            offset += self._sizes[chunk]
        if end != offset:
            raise StateError(f"{path}: {end} bytes, {offset} are expected")
        return SnapshotFile(path=path, _places=places)

    def _table_bytes(self, count: int) -> int:
        return _HEADER.size + count * _ENTRY.size + DIGEST_BYTES

    def _digest(self, table: bytes | bytearray) -> bytes:
        return Digest("atoll/snapshot/v1").data(bytes(table)).finish()


def _checked(outer: OuterState, chunk: int) -> ChunkRecord:
    """Raises StateError if the record's bytes do not have its hash any more."""
    record = outer.read(chunk)
    if chunk_hash(record.data) != record.hash:
        raise StateError(
            f"{outer.folder}: chunk {chunk} of {outer.layout.name_of(chunk)!r} is damaged at commit {record.version}: "
            "its bytes do not have its hash"
        )
    return record
