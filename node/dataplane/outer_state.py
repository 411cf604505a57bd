"""The outer state on disk: memory-mapped records of chunks (values, then slots) with version and hash.

A record is computed into a spare place and put in force by one index entry (see `slots.py`, `outer_index.py`), so a
crash leaves each chunk as it was or as it shall be. Methods may be called from several threads.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.node.dataplane.frozen_state import FrozenState
from atoll.node.dataplane.optim import OuterOptimizer
from atoll.node.dataplane.outer_index import Entry, OuterIndex
from atoll.node.dataplane.slots import SlotMap
from atoll.node.threads import each, pool_of
from atoll.protocol.codecs import UNCHANGED, kernels, parse_header, peek_codec, scratch
from atoll.protocol.digest import Digest
from atoll.protocol.disk import REAL_DISK, Disk, disk_error, sync_folder
from atoll.protocol.errors import InvalidMessage, StateError
from atoll.protocol.layout import FP32_ROLES, Layout, Role, chunk_hash, state_hash
from atoll.protocol.settings import CODECS

log = logging.getLogger(__name__)

MAX_VERIFYING_THREADS = 4
"""As a state is opened; each has a record in memory."""
KEPT_HASH_LISTS = 4  # of the last commits; donors serve them
_FORMAT = 1
_MAX_META_BYTES = 1 << 16
_SPARE_WAIT_S = 120.0
_EMPTY_HASH = chunk_hash(b"")

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A copy: values, then each slot in order."""

    version: int
    hash: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class PinnedChunk:
    """Read-only views. `values` is 1-D: fp32 for trainable chunks and averaged buffers, uint8 bytes otherwise."""

    version: int
    hash: bytes
    values: npt.NDArray[Any]
    data: Bytes


def record_bytes(layout: Layout, slots: tuple[str, ...], chunk: int) -> int:
    """Bytes of a chunk's record: values and, for trainable chunks, each slot."""
    spec = layout.chunks[chunk]
    return spec.num_bytes * (1 + len(slots)) if spec.role is Role.TRAINABLE else spec.num_bytes


class TornState(StateError):
    """The files are not whole: what is left of them is not a state, and may be made anew."""


class OuterState:
    """Made by `create` or `open`. `layout` and `slots` are those of the run."""

    def __init__(self, folder: Path, layout: Layout, slots: tuple[str, ...], run_id: str) -> None:
        self.folder = folder
        self.layout = layout
        self.slots = slots
        self.run_id = run_id
        self._sizes = [record_bytes(layout, slots, c.index) for c in layout.chunks]
        self._map = SlotMap(self._sizes)
        self._lock_file = _locked(folder / "outer.index", OuterIndex.size_bytes(len(layout.chunks)))
        try:
            self._index = OuterIndex(memoryview(_mapped(folder / "outer.index", 0)), state_key(layout, slots, run_id))
            self._data: Bytes = np.frombuffer(_mapped(folder / "outer.chunks", self._map.file_bytes), np.uint8)
        except BaseException:
            self.close()
            raise
        self._entries: list[Entry | None] = [None] * len(layout.chunks)
        self._serials = [0] * len(layout.chunks)
        self._changed = threading.Condition()  # guards all that follows
        self._pins: Counter[int] = Counter()
        self._retired: set[int] = set()  # replaced slots that a reader still pins
        self._writing: set[int] = set()
        self._frozen: list[FrozenState] = []
        self._free: list[list[int]] = [list(range(g.first_slot, g.first_slot + g.num_slots)) for g in self._map.groups]
        self._sync_chunks = [c.index for c in layout.chunks[: layout.num_sync_chunks] if c.num_elements]
        self._num_missing = sum(1 for size in self._sizes if size)
        self._at_version: Counter[int] = Counter()
        self._hash_lists: OrderedDict[int, list[bytes]] = OrderedDict()

    # --- life

    @staticmethod
    def exists(folder: Path) -> bool:
        return (folder / "outer.json").exists()

    @classmethod
    def create(
        cls, folder: Path, layout: Layout, slots: tuple[str, ...], run_id: str, disk: Disk = REAL_DISK
    ) -> OuterState:
        """An empty state in `folder`, instead of what was there. Raises HostError if the disk has no room for it."""
        cls.discard(folder)
        sizes = [record_bytes(layout, slots, c.index) for c in layout.chunks]
        disk.allocate(folder / "outer.chunks", SlotMap(sizes).file_bytes)
        disk.allocate(folder / "outer.index", OuterIndex.size_bytes(len(layout.chunks)))
        meta = json.dumps(_meta(layout, slots, run_id), indent=1).encode()
        disk.write_whole(folder / "outer.json", meta, fsync=True)
        return cls(folder, layout, slots, run_id)

    @classmethod
    def open(
        cls, folder: Path, layout: Layout, slots: tuple[str, ...], run_id: str, *, num_threads: int = 1
    ) -> OuterState:
        """The state that `folder` holds, each chunk checked against its hash; `missing` lists the damaged ones.

        Raises StateError if it belongs to another run, manifest or outer optimizer, or is in use; TornState if the
        files are not whole.
        """
        path = folder / "outer.json"
        try:
            with path.open("rb") as file:
                found = json.loads(file.read(_MAX_META_BYTES))
        except (OSError, ValueError) as error:
            raise TornState(f"{path}: not an outer state ({error})") from None
        if not isinstance(found, dict) or not found:
            raise TornState(f"{path}: not an outer state")
        for key, value in _meta(layout, slots, run_id).items():
            theirs = found.get(key)
            if theirs != value:
                raise StateError(
                    f"{path}: the outer state there has {key} {theirs!r}, this run has {value!r}; "
                    "choose another folder with --home, or remove this one"
                )
        state = cls(folder, layout, slots, run_id)
        state._verify(num_threads)
        return state

    @staticmethod
    def discard(folder: Path) -> None:
        """Removes it for good: after a power cut it does not come back."""
        for name in ("outer.json", "outer.index", "outer.chunks"):
            (folder / name).unlink(missing_ok=True)
        if folder.exists():
            sync_folder(folder)

    def close(self) -> None:
        """Gives up the folder. No view or method of this object may be used after it."""
        os.close(self._lock_file)
        self._lock_file = -1

    # --- reading

    @property
    def versions(self) -> list[int | None]:
        """Of each chunk: the last commit that touched it; None where there is no valid record; 0 for empty chunks."""
        with self._changed:
            return [
                entry.version if entry else (None if size else 0)
                for entry, size in zip(self._entries, self._sizes, strict=True)
            ]

    @property
    def missing(self) -> list[int]:
        """Chunks without a valid record: never written, or damaged."""
        return [i for i, version in enumerate(self.versions) if version is None]

    @property
    def commit(self) -> int | None:
        """The commit at which every chunk is; None while chunks are missing or differ."""
        with self._changed:
            return self._commit()

    def _commit(self) -> int | None:
        if self._num_missing or len(self._at_version) > 1:
            return None
        return next(iter(self._at_version), 0)

    def chunk_hashes(self, commit: int) -> list[bytes] | None:
        """The hashes of all chunks at `commit`, in chunk order; None if it is not one of the last few held here."""
        with self._changed:
            found = self._hash_lists.get(commit)
            return None if found is None else list(found)

    def hash_of(self, chunk: int) -> bytes | None:
        with self._changed:
            entry = self._entries[chunk]
        return entry.hash if entry else (None if self._sizes[chunk] else _EMPTY_HASH)

    def state_hash(self) -> bytes:
        """Raises StateError while `commit` is None."""
        with self._changed:
            commit = self._commit()
            hashes = None if commit is None else self._hash_lists.get(commit)
        if hashes is None:
            raise StateError(f"{self.folder}: the outer state is not complete at one commit")
        return state_hash(self.layout.manifest, self.slots, hashes)

    @contextmanager
    def pinned(self, chunk: int) -> Iterator[PinnedChunk]:
        """The chunk's record in place; it stays as it is inside the block, whatever is applied meanwhile.

        Raises StateError if there is no valid record.
        """
        if not self._sizes[chunk]:
            empty = np.empty(0, np.uint8)
            yield PinnedChunk(0, _EMPTY_HASH, self._values(chunk, empty), empty)
            return
        with self._changed:
            entry = self._entries[chunk]
            if entry is None:
                raise StateError(
                    f"{self.folder}: chunk {chunk} of {self.layout.name_of(chunk)!r} is missing; fetch the state again"
                )
            self._pins[entry.slot] += 1
        try:
            view = self._record(chunk, entry.slot)
            view.flags.writeable = False
            yield PinnedChunk(entry.version, entry.hash, self._values(chunk, view), view)
        finally:
            self._unpin(chunk, entry.slot)

    def freeze(self) -> FrozenState:
        """The state as it is now, whatever is applied until the frozen one is closed.

        Raises StateError while `commit` is None.
        """
        with self._changed:
            commit = self._commit()
            hashes = None if commit is None else self._hash_lists.get(commit)
            if commit is None or hashes is None:
                raise StateError(f"{self.folder}: the outer state is not complete at one commit")
            slots = {chunk: entry.slot for chunk, entry in enumerate(self._entries) if entry is not None}
            self._pins.update(slots.values())
            frozen = FrozenState(
                run_id=self.run_id,
                commit=commit,
                state_hash=state_hash(self.layout.manifest, self.slots, hashes),
                hashes=list(hashes),
                records={chunk: self._record(chunk, slot) for chunk, slot in slots.items()},
                folder=self.folder,
                release=lambda chunk: self._unpin(chunk, slots[chunk]),
            )
            self._frozen = [*(f for f in self._frozen if not f.is_over), frozen]
        return frozen

    def read(self, chunk: int) -> ChunkRecord:
        """Version, hash and bytes that belong together. Raises StateError if there is no valid record."""
        with self.pinned(chunk) as record:
            return ChunkRecord(record.version, record.hash, record.data.tobytes())

    def values(self, chunk: int) -> npt.NDArray[Any]:
        """A read-only view of the values, fp32 or bytes, valid until the next write to any chunk; see `pinned`."""
        with self.pinned(chunk) as record:
            return record.values

    # --- writing

    def seed(self, chunk: int, data: bytes | bytearray | memoryview | Bytes) -> None:
        """Commit 0 from the bytes of SNAPSHOT; the slots are zero. Raises InvalidMessage for a wrong size."""
        source = np.frombuffer(data, np.uint8)
        expected = self.layout.chunks[chunk].num_bytes
        if source.size != expected:
            raise InvalidMessage(f"first values of chunk {chunk}: {source.size} bytes, {expected} are expected")

        def fill(record: Bytes) -> None:
            record[:expected] = source
            record[expected:] = 0

        self._replace(chunk, 0, fill)

    def put(self, chunk: int, version: int, data: bytes | bytearray | memoryview) -> bytes:
        """A whole record as a donor sent it; returns its hash. Raises InvalidMessage for a wrong size or version."""
        source = np.frombuffer(data, np.uint8)
        if source.size != self._sizes[chunk]:
            raise InvalidMessage(f"state of chunk {chunk}: {source.size} bytes, {self._sizes[chunk]} are expected")
        if chunk >= self.layout.num_sync_chunks and version:
            raise InvalidMessage(f"state of chunk {chunk}: version {version}, a frozen tensor stays at 0")

        def fill(record: Bytes) -> None:
            record[:] = source

        return self._replace(chunk, version, fill)

    def apply(
        self, chunk: int, payload: bytes | bytearray | memoryview, version: int, optimizer: OuterOptimizer
    ) -> None:
        """The outer update of one chunk to commit `version` by its payload; nothing if it is there already.

        Chunks without elements take no payload and need no call. Raises StateError if the chunk is not at the commit
        before, InvalidMessage for a payload that is not this chunk's.
        """
        spec = self.layout.chunks[chunk]
        if chunk >= self.layout.num_sync_chunks:
            raise InvalidMessage(f"chunk {chunk} of {self.layout.name_of(chunk)!r} is frozen and takes no payload")
        if not spec.num_elements:
            return
        with self.pinned(chunk) as old:
            if old.version == version:
                return
            if old.version != version - 1:
                raise StateError(
                    f"{self.folder}: chunk {chunk} is at commit {old.version}, commit {version} cannot be applied to it"
                )
            if spec.role is Role.TRAINABLE and (codec := peek_codec(payload)) not in CODECS:
                raise InvalidMessage(f"payload of chunk {chunk}: codec {codec} carries no pseudo-gradient")

            self._replace(chunk, version, lambda record: self._update(chunk, old.data, payload, optimizer, record))

    def replayed(
        self, chunk: int, data: bytes | Bytes, payload: bytes | bytearray | memoryview, optimizer: OuterOptimizer
    ) -> Bytes:
        """What a record becomes by one more payload; nothing on the disk changes."""
        out = np.empty(self._sizes[chunk], np.uint8)
        self._update(chunk, np.frombuffer(data, np.uint8), payload, optimizer, out)
        return out

    def _update(
        self, chunk: int, old: Bytes, payload: bytes | bytearray | memoryview, optimizer: OuterOptimizer, record: Bytes
    ) -> None:
        spec = self.layout.chunks[chunk]
        dtype = self.layout.manifest.tensors[spec.tensor].dtype if spec.role is Role.BUFFER_LOWEST else "F32"
        if spec.role is not Role.TRAINABLE and peek_codec(payload) == UNCHANGED:
            parse_header(payload, codec=UNCHANGED, num_elements=spec.num_elements, dtype=dtype)
            record[:] = old
        elif spec.role is Role.BUFFER_LOWEST:
            kernels.decode(payload, "raw", spec.num_elements, record, dtype)
        elif spec.role is Role.BUFFER_MEAN:
            kernels.decode(payload, "fp32", spec.num_elements, record.view(np.float32))
        else:
            average = scratch.floats("average", spec.num_elements)
            kernels.decode(payload, peek_codec(payload), spec.num_elements, average)
            rows = old.view(np.float32).reshape(1 + len(self.slots), -1)
            out = record.view(np.float32).reshape(1 + len(self.slots), -1)
            optimizer.apply(rows[0], list(rows[1:]), average, out[0], list(out[1:]))

    # --- damage

    def damaged(self) -> list[int]:
        """Chunks whose bytes do not have their hash any more. Nothing may be written meanwhile."""
        found = []
        for chunk, size in enumerate(self._sizes):
            if size and self._entries[chunk] is not None:
                with self.pinned(chunk) as record:
                    if chunk_hash(record.data.data) != record.hash:
                        found.append(chunk)
        return found

    def forget(self, chunk: int) -> None:
        """The chunk is missing from now on."""
        with self._changed:
            old, self._entries[chunk] = self._entries[chunk], None
            if old is None:
                return
            self._num_missing += 1
            self._retire(chunk, old)
        self._move_away(chunk)

    def _replace(self, chunk: int, version: int, fill: Callable[[Bytes], None]) -> bytes:
        """Computes a record into a spare slot, then puts it in force."""
        if not self._sizes[chunk]:
            return _EMPTY_HASH
        free = self._free[self._map.group_of[chunk]]
        with self._changed:
            if not self._changed.wait_for(lambda: free and chunk not in self._writing, _SPARE_WAIT_S):
                raise StateError(f"{self.folder}: no spare place for chunk {chunk} after {_SPARE_WAIT_S:.0f} s")
            slot = free.pop()
            self._writing.add(chunk)
        done = False
        try:
            record = self._record(chunk, slot)
            fill(record)
            entry = Entry(version, self._serials[chunk] + 1, slot, chunk_hash(record.data))
            self._index.write(chunk, entry)
            done = True
        finally:
            with self._changed:
                self._writing.remove(chunk)
                if done:
                    self._put_in_force(chunk, entry)
                else:
                    free.append(slot)
                self._changed.notify_all()
        self._move_away(chunk)
        return entry.hash

    def _move_away(self, chunk: int) -> None:
        """Its former record, where it is kept for a reader of a whole commit. Not under the lock: it takes its time."""
        for frozen in self._frozen:
            frozen.move_away(chunk)

    def _put_in_force(self, chunk: int, entry: Entry) -> None:
        old = self._entries[chunk]
        self._entries[chunk] = entry
        self._serials[chunk] = entry.serial
        in_sync = chunk < self.layout.num_sync_chunks
        if in_sync:
            self._at_version[entry.version] += 1
        if old is None:
            self._num_missing -= 1
        else:
            self._retire(chunk, old)
        self._note_commit()

    def _retire(self, chunk: int, old: Entry) -> None:
        """Its place is free once nobody reads there any more."""
        if chunk < self.layout.num_sync_chunks:
            self._at_version[old.version] -= 1
            if not self._at_version[old.version]:
                del self._at_version[old.version]
        if self._pins[old.slot]:
            self._retired.add(old.slot)
        else:
            self._release(chunk, old.slot)

    def _note_commit(self) -> None:
        commit = self._commit()
        if commit is None:
            return
        self._hash_lists.pop(commit, None)
        self._hash_lists[commit] = [e.hash if e else _EMPTY_HASH for e in self._entries]
        while len(self._hash_lists) > KEPT_HASH_LISTS:
            self._hash_lists.popitem(last=False)

    def _unpin(self, chunk: int, slot: int) -> None:
        with self._changed:
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                if slot in self._retired:
                    self._retired.remove(slot)
                    self._release(chunk, slot)

    def _release(self, chunk: int, slot: int) -> None:
        self._free[self._map.group_of[chunk]].append(slot)
        self._changed.notify_all()

    def _record(self, chunk: int, slot: int) -> Bytes:
        start = self._map.offset_bytes(chunk, slot)
        return self._data[start : start + self._sizes[chunk]]

    def _values(self, chunk: int, record: Bytes) -> npt.NDArray[Any]:
        spec = self.layout.chunks[chunk]
        values = record[: spec.num_bytes]
        return values.view(np.float32) if spec.role in FP32_ROLES else values

    # --- opening

    def _verify(self, num_threads: int) -> None:
        """Takes for each chunk the newest entry whose record has its hash, and no slot twice."""
        candidates = [self._index.entries(c) if size else [] for c, size in enumerate(self._sizes)]
        with pool_of(min(num_threads, MAX_VERIFYING_THREADS)) as pool:
            intact = each(lambda c: [e for e in candidates[c] if self._intact(c, e)], range(len(candidates)), pool)
        taken: set[int] = set()
        for newest in (True, False):  # what is in force goes before what was
            for chunk, found in enumerate(intact):
                for entry in found:
                    if self._entries[chunk] or (entry is candidates[chunk][0]) is not newest or entry.slot in taken:
                        continue
                    taken.add(entry.slot)
                    self._entries[chunk] = entry
        for chunk, entries in enumerate(candidates):
            found_entry = self._entries[chunk]
            # The next entry goes over the damaged one, never over the one in force.
            self._serials[chunk] = found_entry.serial if found_entry else (entries[0].serial if entries else 0)
            if entries and found_entry is not entries[0]:
                log.warning(
                    "%s: chunk %d of %r is damaged at commit %d; %s",
                    self.folder, chunk, self.layout.name_of(chunk), entries[0].version,
                    f"commit {found_entry.version} is whole" if found_entry else "it must be fetched",
                )  # fmt: skip
            if found_entry is not None:
                self._num_missing -= 1
                if chunk < self.layout.num_sync_chunks:
                    self._at_version[found_entry.version] += 1
        for free in self._free:
            free[:] = [slot for slot in free if slot not in taken]
        self._note_lists(candidates)
        self._note_commit()

    def _note_lists(self, entries: Sequence[Sequence[Entry]]) -> None:
        """Of the commits of which each chunk has an entry, in force or not: the one before is needed in a dispute, and
        by those who fetch it."""
        hashes = [{e.version: e.hash for e in found} for found in entries]
        sync_chunks = [hashes[c] for c in self._sync_chunks]
        if not sync_chunks:
            return
        frozen = range(self.layout.num_sync_chunks, len(entries))
        for commit in sorted(set.intersection(*(set(found) for found in sync_chunks))):
            at = [
                found.get(0 if c in frozen else commit, b"" if size else _EMPTY_HASH)
                for c, (found, size) in enumerate(zip(hashes, self._sizes, strict=True))
            ]
            if all(at):
                self._hash_lists[commit] = at

    def _intact(self, chunk: int, entry: Entry) -> bool:
        return self._map.fits(chunk, entry.slot) and chunk_hash(self._record(chunk, entry.slot).data) == entry.hash


def _meta(layout: Layout, slots: tuple[str, ...], run_id: str) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "run": run_id,
        "manifest": layout.manifest.digest.hex(),
        "slots": list(slots),
        "chunk_elements": layout.chunk_elements,
    }


def state_key(layout: Layout, slots: tuple[str, ...], run_id: str) -> bytes:
    """Ties what is on a disk to one run, model and outer optimizer."""
    digest = Digest("atoll/outer-state/v1").text(run_id).data(layout.manifest.digest).uint(layout.chunk_elements)
    for slot in slots:
        digest.text(slot)
    return digest.finish()


def _locked(path: Path, size_bytes: int) -> int:
    """A descriptor that holds the folder for this process alone, until it is closed or the process ends."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TornState(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StateError(f"{path}: in use by another node; give each node its own --home") from None
    if os.fstat(descriptor).st_size < size_bytes:
        os.close(descriptor)
        raise TornState(f"{path}: truncated")
    return descriptor


def _mapped(path: Path, size_bytes: int) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size < size_bytes:
                raise TornState(f"{path}: truncated")
            return mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise TornState(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise disk_error(error, path) from error
