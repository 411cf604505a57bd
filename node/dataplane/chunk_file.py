"""A file of chunks, each with a version and a hash: written by several threads, then sealed.

A head, a table and the digest of both, then the chunks as they came. `seal` writes the table when all chunks are there:
what a crash tore has none that is right.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from atoll.protocol.digest import DIGEST_BYTES, Digest
from atoll.protocol.disk import begin_to_write_back, disk_error, open_new, sync_folder, write_at
from atoll.protocol.errors import DigestMismatch, InvalidMessage, StateError

_MAGIC = b"ATOLLCF1"
_HEAD = struct.Struct("<8s32sQ")  # magic, key, number of chunks
_ENTRY = struct.Struct("<QIQ32s")  # offset, length, version, hash
ENTRY_BYTES = _ENTRY.size
WRITTEN_BACK_BYTES = 1 << 20
"""Of a file that is synced in the end, so many at a time are on their way to the disk before."""


class ChunkFile:
    """Readable at any time, each chunk from the moment it is put."""

    hashed: Callable[[bytes], bytes]
    """The hash of a chunk."""

    def __init__(self, path: Path, key: bytes, chunks: Sequence[int], *, is_new: bool | None, fsync: bool) -> None:
        """`key` says what the file is of. `is_new`: None if another process makes and seals it. With `fsync` what is
        sealed is found again after a crash of the machine too.

        Raises HostError if a new file cannot be made, StateError unless another one is whole, sealed and of this key.
        """
        self.path = path
        self.sealed = False
        self.num_seals = 0
        self.chunks = chunks
        self._fsync = fsync
        self._written_back = 0  # up to here, more or less: threads may still write before it
        self._head = _HEAD.pack(_MAGIC, key, len(chunks))
        self._end = _HEAD.size + _ENTRY.size * len(chunks) + DIGEST_BYTES
        self._limit = sys.maxsize  # what is put ends before it
        self._entries: dict[int, bytes] = {}
        self._lock = threading.RLock()
        self._is_closed = False
        if is_new:
            try:
                open_new(path).close()
            except OSError as error:
                raise disk_error(error, path) from error
        elif is_new is False:
            self._load()

    def close(self) -> None:
        """Whoever reads or writes at this moment ends that."""
        with self._lock:
            self._is_closed = True

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    # --- writing

    def put(self, chunk: int, data: bytes, hash: bytes, version: int = 0) -> None:
        """Stores a chunk; the caller has checked that `hash` is its hash. Again is no error.

        Raises DigestMismatch if another one is held already, StateError if the file is sealed or closed, HostError if
        the disk is full.
        """
        if self._is_held(chunk, hash):
            return
        with self._lock:
            if self.sealed:
                raise StateError(f"{self.path.name}: sealed, chunk {chunk} comes too late")
            offset = self._end
            if offset + len(data) > self._limit:
                raise StateError(f"{self.path.name}: no room for chunk {chunk} in what was set aside for this process")
            self._end += len(data)
        with self._opened() as descriptor:
            write_at(descriptor, data, offset)
            begin, end = self._written_back, offset + len(data)
            if self._fsync and end - begin >= WRITTEN_BACK_BYTES:
                self._written_back = end
                begin_to_write_back(descriptor, begin, end - begin)
        with self._lock:
            if not self._is_held(chunk, hash):  # another thread may have been faster
                self._entries[chunk] = _ENTRY.pack(offset, len(data), version, hash)

    # --- parts that other processes write

    def set_aside(self, num_bytes: int) -> range:
        """Where another process may put chunks; what is not used of it is a hole in the file."""
        with self._lock:
            start, self._end = self._end, self._end + num_bytes
        return range(start, start + num_bytes)

    def put_within(self, region: range) -> None:
        """What is put from now on goes to what another process has set aside for this one."""
        with self._lock:
            self._end, self._limit = region.start, region.stop

    def entry_of(self, chunk: int) -> bytes | None:
        """Where it lies, of which length, version and hash; None if it is not here."""
        return self._entries.get(chunk)

    def take_over(self, chunk: int, entry: bytes) -> None:
        """A chunk that the process that makes the file has put there."""
        with self._lock:
            self._entries[chunk] = entry

    def adopt(self, chunk: int, entry: bytes, regions: Sequence[range], max_bytes: int) -> None:
        """A chunk that another process has put within one of these regions, of at most so many bytes. Again is no
        error, wherever it lies.

        Raises InvalidMessage if it does not lie there, DigestMismatch as `put` does.
        """
        offset, length, _, hash = _ENTRY.unpack(entry)
        with self._lock:
            if self._is_held(chunk, hash):
                return
            is_within = any(region.start <= offset and offset + length <= region.stop for region in regions)
            if not is_within or length > max_bytes:
                raise InvalidMessage(f"{self.path.name}: chunk {chunk} is not within what was set aside for it")
            self._entries[chunk] = entry

    def _is_held(self, chunk: int, hash: bytes) -> bool:
        held = self.hash_of(chunk)
        if held is not None and held != hash:
            raise DigestMismatch(f"{self.path.name}: chunk {chunk} comes twice, with different bytes")
        return held is not None

    def seal(self) -> None:
        """Marks the file as whole. Raises StateError while chunks are missing, HostError for the disk."""
        if self.sealed:
            return
        table = self._table()
        with self._opened() as descriptor:
            if self._fsync:
                os.fdatasync(descriptor)
            write_at(descriptor, table, 0)
            if self._fsync:
                os.fdatasync(descriptor)
                sync_folder(self.path.parent)
        self.num_seals += 1
        self.sealed = True

    def lose(self, chunk: int) -> None:
        """Missing from now on, so that it can be put again."""
        with self._lock:
            if self._entries.pop(chunk, None) is not None:
                self.sealed = False

    # --- reading

    def missing(self) -> list[int]:
        with self._lock:
            return [c for c in self.chunks if c not in self._entries]

    def hash_of(self, chunk: int) -> bytes | None:
        """None if the chunk is missing."""
        entry = self._entries.get(chunk)
        return None if entry is None else entry[-DIGEST_BYTES:]

    def all_hashes(self) -> list[bytes]:
        """In the order of the chunks. Raises StateError while some are missing."""
        return [entry[-DIGEST_BYTES:] for entry in self._all_entries()]

    def size_of(self, chunk: int) -> int:
        """In bytes. Raises StateError if the chunk is not here."""
        return self._entry(chunk)[1]

    def read(self, chunk: int) -> bytes:
        """Raises StateError if the chunk is not here, or its bytes do not have its hash: it is missing from then on."""
        offset, length, _, expected = self._entry(chunk)
        with self._opened() as descriptor:
            data = os.pread(descriptor, length, offset)
        if self.hashed(data) != expected:
            self.lose(chunk)
            raise StateError(f"{self.path.name}: chunk {chunk} is damaged; fetch it again")
        return data

    def _entry(self, chunk: int) -> tuple[int, int, int, bytes]:
        if (entry := self._entries.get(chunk)) is None:
            raise StateError(f"{self.path.name}: chunk {chunk} is not here")
        offset, length, version, expected = _ENTRY.unpack(entry)
        return offset, length, version, expected

    def _versions(self) -> list[int]:
        with self._lock:
            return [_ENTRY.unpack(entry)[2] for entry in self._entries.values()]

    # --- the table

    def _all_entries(self) -> list[bytes]:
        with self._lock:
            if missing := self.missing():
                raise StateError(f"{self.path.name}: {len(missing)} of {len(self.chunks)} chunks are missing")
            return [self._entries[chunk] for chunk in self.chunks]

    def _table(self) -> bytes:
        body = self._head + b"".join(self._all_entries())
        return body + Digest("atoll/chunk-file/v1").data(body).finish()

    def _load(self) -> None:
        with self._opened() as descriptor:
            table, size = os.pread(descriptor, self._end, 0), os.fstat(descriptor).st_size
        entries = table[_HEAD.size : -DIGEST_BYTES]
        for place, chunk in enumerate(self.chunks):
            self._entries[chunk] = entries[place * _ENTRY.size : (place + 1) * _ENTRY.size]
        if len(table) < self._end or table != self._table():
            raise StateError(f"{self.path}: not sealed, torn, or of another run")
        for entry in self._entries.values():
            offset, length, _, _ = _ENTRY.unpack(entry)
            if offset + length > size:
                raise StateError(f"{self.path}: truncated")
        self._end = size
        self.sealed = True

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor for this thread. Raises StateError if the file was closed, or is not there."""
        try:
            with self._lock:  # another file may have this path once this one is closed
                if self._is_closed:
                    raise FileNotFoundError
                file = self.path.open("r+b", buffering=0)
            with file:
                yield file.fileno()
        except FileNotFoundError:
            raise StateError(f"{self.path.name}: it was dropped") from None
        except OSError as error:
            raise disk_error(error, self.path) from error
