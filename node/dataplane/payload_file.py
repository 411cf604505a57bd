"""The payloads of one attempt in one file: a header, a seal, an index entry for each chunk, then the payloads as they
came. What a crash tore is found out: entries and seal carry checks, payloads their hash."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.codecs import parse_header
from atoll.protocol.digest import Digest
from atoll.protocol.disk import disk_error, sync_folder
from atoll.protocol.errors import DigestMismatch, InvalidMessage, StateError
from atoll.protocol.layout import Layout, Role
from atoll.protocol.messages import Commit, Plan
from atoll.protocol.plans import payload_digest, payload_hash
from atoll.protocol.spec import payload_codec

_MAGIC = b"ATOLLPL1"
_HEADER = struct.Struct("<8s32sQQII")  # magic, key of run and layout, sync, term, attempt, number of entries
_SEAL = struct.Struct("<8s32s")
_SEALED = b"SEALED\0\0"
_ENTRY = struct.Struct("<QI32s")  # offset, length, payload hash; then a check
_ENTRY_BYTES = 64
_SEAL_OFFSET = 64
_INDEX_OFFSET = 128


@dataclass(frozen=True, slots=True, order=True)
class AttemptKey:
    sync: int
    term: int
    attempt: int

    @property
    def file_name(self) -> str:
        return f"attempt-{self.sync}-{self.term}-{self.attempt}.payloads"


class PayloadFile:
    """Written by `put` from several threads, then sealed; readable at any time. Made by `create` or `open_sealed`."""

    def __init__(self, path: Path, layout: Layout, run_id: str, key: AttemptKey, descriptor: int) -> None:
        self.path = path
        self.key = key
        self._layout = layout
        self._run_id = run_id
        self._tag = _tag(layout, run_id)
        self._chunks = layout.sync_chunks
        self._wanted = frozenset(self._chunks)
        self._descriptor = descriptor
        self._lock = threading.RLock()
        self._hashes: dict[int, bytes] = {}
        self._end = _INDEX_OFFSET + _ENTRY_BYTES * layout.num_sync_chunks
        self._closed = False
        self._num_users = 0
        self.sealed = False

    @classmethod
    def create(cls, folder: Path, layout: Layout, run_id: str, key: AttemptKey) -> PayloadFile:
        """Raises HostError if the file cannot be made."""
        path = folder / key.file_name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise disk_error(error, path) from error
        made = cls(path, layout, run_id, key, descriptor)
        made._write(made._header(), 0)
        return made

    @classmethod
    def open_sealed(cls, folder: Path, layout: Layout, run_id: str, key: AttemptKey) -> PayloadFile:
        """Raises StateError unless the file is whole and sealed, for this run and layout."""
        path = folder / key.file_name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StateError(f"{path}: {error.strerror}") from None
        found = cls(path, layout, run_id, key, descriptor)
        try:
            found._load()
        except StateError:
            found.close()
            raise
        return found

    def close(self) -> None:
        """The descriptor goes when the last thread that reads or writes is done with it."""
        with self._lock:
            self._closed = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._closed and not self._num_users and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @contextmanager
    def _in_use(self) -> Iterator[int]:
        """The descriptor, open until the end of the block. Raises StateError if the attempt was dropped."""
        with self._lock:
            if self._closed:
                raise StateError(f"{self.path.name}: the attempt was dropped")
            self._num_users += 1
        try:
            yield self._descriptor
        except OSError as error:
            raise disk_error(error, self.path) from error
        finally:
            with self._lock:
                self._num_users -= 1
                self._close_if_unused()

    # --- writing

    def put(self, chunk: int, data: bytes | bytearray | memoryview, hash: bytes) -> None:
        """Stores the payload of a chunk; the caller has checked that `hash` is its hash. Again is no error.

        Raises InvalidMessage if it is no payload of this chunk, DigestMismatch if another one is held already,
        StateError if the attempt was dropped, HostError if the disk is full.
        """
        if chunk not in self._wanted:
            raise InvalidMessage(f"{self.path.name}: chunk {chunk} has no payload in this layout")
        check_payload(self._layout, chunk, data)
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        if self._is_held(chunk, hash):
            return
        with self._lock:
            if self.sealed:
                raise StateError(f"{self.path.name}: sealed, chunk {chunk} comes too late")
            offset = self._end
            self._end += size
        self._write(data, offset)
        body = _ENTRY.pack(offset, size, hash)
        with self._lock:
            if not self._is_held(chunk, hash):  # another thread may have been faster
                self._write(body + self._check(chunk, body), _INDEX_OFFSET + _ENTRY_BYTES * chunk)
                self._hashes[chunk] = hash

    def _is_held(self, chunk: int, hash: bytes) -> bool:
        with self._lock:
            held = self._hashes.get(chunk)
        if held is not None and held != hash:
            raise DigestMismatch(f"{self.path.name}: two different payloads for chunk {chunk}")
        return held is not None

    @property
    def complete(self) -> bool:
        """Whether the payload of every chunk is here."""
        with self._lock:
            return len(self._hashes) == len(self._chunks)

    def missing(self) -> list[int]:
        """Chunks whose payload is not here."""
        with self._lock:
            return [c for c in self._chunks if c not in self._hashes]

    def hash_of(self, chunk: int) -> bytes | None:
        with self._lock:
            return self._hashes.get(chunk)

    def digest(self, plan: Plan | Commit) -> bytes:
        """The digest that Done and Commit carry. Raises StateError while payloads are missing."""
        self._require_complete()
        return payload_digest(self._run_id, plan, [self._hashes[c] for c in self._chunks])

    def seal(self, fsync: bool) -> None:
        """Marks the attempt as whole; it is found again after a crash (of the machine too, with `fsync`)."""
        self._require_complete()
        if self.sealed:
            return
        with self._in_use() as descriptor:
            if fsync:
                os.fdatasync(descriptor)
            self._write(_SEAL.pack(_SEALED, self._index_digest()), _SEAL_OFFSET)
            if fsync:
                os.fdatasync(descriptor)
                sync_folder(self.path.parent)
        self.sealed = True

    def _require_complete(self) -> None:
        missing = self.missing()
        if missing:
            raise StateError(f"{self.path.name}: {len(missing)} of {len(self._chunks)} payloads are missing")

    # --- reading

    def read(self, chunk: int) -> bytes:
        """The payload, checked against its hash. Raises StateError if it is not here or damaged."""
        if chunk not in self._wanted:
            raise StateError(f"{self.path.name}: chunk {chunk} has no payload in this layout")
        with self._in_use():
            entry = self._read(_ENTRY_BYTES, _INDEX_OFFSET + _ENTRY_BYTES * chunk)
            try:
                offset, length, expected = self._parse(chunk, entry)
            except StateError:
                self._lose(chunk)
                raise
            data = self._read(length, offset)
        if payload_hash(data) != expected:
            self._lose(chunk)
            raise StateError(f"{self.path.name}: the payload of chunk {chunk} is damaged; fetch it again")
        return data

    def _lose(self, chunk: int) -> None:
        """Missing from now on, so that it can be put again."""
        with self._lock:
            if self._hashes.pop(chunk, None) is not None:
                self.sealed = False

    def _parse(self, chunk: int, entry: bytes) -> tuple[int, int, bytes]:
        body = entry[: _ENTRY.size]
        if len(entry) != _ENTRY_BYTES or entry[_ENTRY.size :] != self._check(chunk, body):
            raise StateError(f"{self.path.name}: the payload of chunk {chunk} is not here")
        offset, length, expected = _ENTRY.unpack(body)
        if offset + length > os.fstat(self._descriptor).st_size:
            raise StateError(f"{self.path.name}: truncated before the end of chunk {chunk}")
        return offset, length, expected

    def _load(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if size < self._end or self._read(_HEADER.size, 0) != self._header():
            raise StateError(f"{self.path.name}: truncated, or of another run")
        magic, digest = _SEAL.unpack(self._read(_SEAL.size, _SEAL_OFFSET))
        if magic != _SEALED or digest != self._index_digest():
            raise StateError(f"{self.path.name}: not sealed")
        index = self._read(self._end - _INDEX_OFFSET, _INDEX_OFFSET)
        for chunk in self._chunks:
            _, _, self._hashes[chunk] = self._parse(chunk, index[_ENTRY_BYTES * chunk : _ENTRY_BYTES * (chunk + 1)])
        self._end = size
        self.sealed = True

    # --- bytes

    def _header(self) -> bytes:
        key = self.key
        return _HEADER.pack(_MAGIC, self._tag, key.sync, key.term, key.attempt, self._layout.num_sync_chunks)

    def _check(self, chunk: int, body: bytes) -> bytes:
        digest = Digest("atoll/payload-entry/v1").data(self._header()).uint(chunk).data(body).finish()
        return digest[: _ENTRY_BYTES - _ENTRY.size]

    def _index_digest(self) -> bytes:
        index = self._read(_ENTRY_BYTES * self._layout.num_sync_chunks, _INDEX_OFFSET)
        return Digest("atoll/payload-seal/v1").data(self._header()).data(index).finish()

    def _read(self, size: int, offset: int) -> bytes:
        """`size` bytes, fewer at the end of the file."""
        with self._in_use() as descriptor:
            data = os.pread(descriptor, size, offset)
            while len(data) < size:
                more = os.pread(descriptor, size - len(data), offset + len(data))
                if not more:
                    break
                data += more
        return data

    def _write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        view = memoryview(data).cast("B")
        with self._in_use() as descriptor:
            while view:
                done = os.pwrite(descriptor, view, offset)
                view, offset = view[done:], offset + done


def check_payload(layout: Layout, chunk: int, data: bytes | bytearray | memoryview) -> None:
    """Raises InvalidMessage unless `data` has the header and size of an encoded chunk of this place."""
    spec = layout.chunks[chunk]
    dtype = layout.manifest.tensors[spec.tensor].dtype if spec.role is Role.BUFFER_LOWEST else "F32"
    parse_header(data, codec=payload_codec(spec.role, data), num_elements=spec.num_elements, dtype=dtype)


def _tag(layout: Layout, run_id: str) -> bytes:
    digest = Digest("atoll/payload-log/v2").text(run_id).data(layout.manifest.digest)
    return digest.uint(layout.chunk_elements).finish()
