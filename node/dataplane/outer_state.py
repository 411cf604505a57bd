"""The outer state on disk: of each chunk its values, then the slots of the outer optimizer, at a commit.

A chunk store (`chunk_store.py`) keeps the records; what is here knows which commit they are at and what may replace
them. Methods may be called from several threads.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from atoll.node.dataplane import outer_update, store_files
from atoll.node.dataplane.chunk_index import Entry
from atoll.node.dataplane.chunk_store import EMPTY, ChunkRecord, ChunkStore, Pin
from atoll.node.dataplane.frozen_state import FrozenState
from atoll.node.dataplane.optim import OuterUpdate
from atoll.node.dataplane.outer_update import Encoded, record_bytes
from atoll.node.dataplane.places import SPARES
from atoll.node.dataplane.store_files import Bytes, StoreKind
from atoll.protocol.digest import Digest
from atoll.protocol.disk import REAL_DISK, Disk
from atoll.protocol.errors import InvalidMessage, StateError
from atoll.protocol.history import History
from atoll.protocol.layout import FP32_ROLES, Chunk, Layout, state_hash

log = logging.getLogger("atoll.node")

LEAST_HASH_LISTS = 2
"""Lists are kept of so many of the last commits, and of two more for each fragment: they settle a dispute over a commit
from which sites may have gone on."""
MOST_HASH_LISTS = 64
"""Of so many where they are small. Donors serve them: whoever fetches checks a chunk by the list of the commit at which
a donor read it, and several commits may be made while the chunk is on its way."""
MOST_KEPT_HASHES = 1 << 16
"""In all lists together, but for the least: some 5 MB."""
_NAME = "outer"
_FORMAT = 2  # 1: tensors were cut into runs of `chunk_elements`


@dataclass(frozen=True, slots=True)
class PinnedChunk:
    """Read-only views. `values` is 1-D: fp32 for trainable chunks and averaged buffers, uint8 bytes otherwise."""

    version: int
    hash: bytes
    values: npt.NDArray[Any]
    data: Bytes


class Reader(Protocol):
    """Of a commit that was, which has pinned its records."""

    @property
    def is_over(self) -> bool: ...

    def move_away(self, chunk: int) -> None:
        """Copies the record elsewhere, if it is read still, and unpins it: its place is wanted."""
        ...


class OuterRecords(Protocol):
    """Of an outer state, to read."""

    def pinned(self, chunk: int) -> AbstractContextManager[PinnedChunk]:
        """See `OuterState.pinned`."""
        ...


def pinned_chunk(chunk: Chunk, pin: Pin) -> PinnedChunk:
    values: npt.NDArray[Any] = pin.data[: chunk.num_bytes]
    if chunk.role in FP32_ROLES:
        values = values.view(np.float32)
    return PinnedChunk(pin.entry.version, pin.entry.hash, values, pin.data)


@dataclass(eq=False)
class OuterState:
    """Made by `create` or `open`. `layout` and `slots` are those of the run."""

    store: ChunkStore
    layout: Layout
    slots: tuple[str, ...]
    run_id: str
    history: Callable[[], History] | None = None
    """Of the commits that are known here; None: no commit is known, which is enough where there is one fragment."""

    def __post_init__(self) -> None:
        self.folder = self.store.folder
        self.store.noted = self._note  # under its lock, like all that reads what follows
        self._readers: list[Reader] = []
        self._at_version: list[Counter[int]] = [Counter() for _ in self.layout.fragments]  # its chunks
        self._hash_lists: OrderedDict[int, list[bytes]] = OrderedDict()

    # --- life

    @staticmethod
    def exists(folder: Path) -> bool:
        return store_files.exists(folder, _NAME)

    @staticmethod
    def path(folder: Path) -> Path:
        """Of the file with its records."""
        return store_files.path_of(folder, _NAME, "chunks")

    @classmethod
    def create(  # noqa: PLR0917
        cls,
        folder: Path,
        layout: Layout,
        slots: tuple[str, ...],
        run_id: str,
        disk: Disk = REAL_DISK,
        num_spares: int = SPARES,
    ) -> OuterState:
        """An empty state in `folder`, instead of what was there. Raises HostError if the disk has no room for it."""
        store = ChunkStore.create(folder, kind_of(layout, slots, run_id), disk, num_spares)
        return cls(store, layout, slots, run_id)

    @classmethod
    def open(
        cls,
        folder: Path,
        layout: Layout,
        slots: tuple[str, ...],
        run_id: str,
        *,
        num_threads: int = 1,
        history: Callable[[], History] | None = None,
    ) -> OuterState:
        """The state that `folder` holds, each chunk checked against its hash; `missing` lists the damaged ones.

        Raises StateError if it belongs to another run, manifest or outer optimizer; TornState if the files are not
        whole.
        """
        state = cls(ChunkStore.open(folder, kind_of(layout, slots, run_id)), layout, slots, run_id, history)
        state._verify(num_threads)
        return state

    @classmethod
    def found(
        cls,
        folder: Path,
        layout: Layout,
        slots: tuple[str, ...],
        run_id: str,
        *,
        num_threads: int = 1,
        history: Callable[[], History] | None = None,
    ) -> OuterState | None:
        """What an earlier start left; None if there is nothing, or only parts of files, which are removed. Raises
        StateError as `open` does for what belongs to others."""
        if not cls.exists(folder):
            return None
        try:
            return cls.open(folder, layout, slots, run_id, num_threads=num_threads, history=history)
        except store_files.TornState as error:
            log.warning("%s; the outer state is put together from snapshots, or fetched", error)
            cls.discard(folder)
            return None

    @staticmethod
    def discard(folder: Path) -> None:
        """Removes it for good: after a power cut it does not come back."""
        store_files.discard(folder, _NAME)

    # --- reading

    @property
    def versions(self) -> list[int | None]:
        """Of each chunk: the last commit that touched it; None where there is no valid record; 0 for empty chunks."""
        return self.store.versions

    @property
    def missing(self) -> list[int]:
        """Chunks without a valid record: never written, or damaged."""
        return [chunk for chunk, version in enumerate(self.versions) if version is None]

    @property
    def commit(self) -> int | None:
        """The commit whose state this is; None while chunks are missing or differ, or if the history tells of none."""
        with self.store.lock:
            if self.store.num_missing or any(len(versions) > 1 for versions in self._at_version):
                return None
            return self._history().commit_of([next(iter(versions), 0) for versions in self._at_version])

    def _history(self) -> History:
        return self.history() if self.history is not None else History((0,) * len(self.layout.fragments))

    def chunk_hashes(self, commit: int) -> list[bytes] | None:
        """The hashes of all chunks at `commit`, in chunk order; None if it is not one of the last few held here."""
        with self.store.lock:
            found = self._hash_lists.get(commit)
            return None if found is None else list(found)

    def hash_of(self, chunk: int) -> bytes | None:
        return self.store.hash_of(chunk)

    def state_hash(self) -> bytes:
        """Raises StateError while `commit` is None."""
        with self.store.lock:
            _, hashes = self._whole()
        return state_hash(self.layout.manifest, self.slots, hashes)

    def _whole(self) -> tuple[int, list[bytes]]:
        self._note_commit()  # it may have been there before the history told of it
        commit = self.commit
        hashes = None if commit is None else self._hash_lists.get(commit)
        if commit is None or hashes is None:
            raise StateError(f"{self.folder}: the outer state is not complete at one commit")
        return commit, hashes

    @contextmanager
    def pinned(self, chunk: int) -> Iterator[PinnedChunk]:
        """The chunk's record in place; it stays as it is inside the block, whatever is applied meanwhile.

        Raises StateError if there is no valid record.
        """
        with self.store.pinned(chunk) as pin:
            yield pinned_chunk(self.layout.chunks[chunk], pin)

    def freeze(self) -> FrozenState:
        """The state as it is now, whatever is applied until the frozen one is closed.

        Raises StateError while `commit` is None.
        """
        with self.store.lock:
            commit, hashes = self._whole()
            pins = self.store.pin_all()
            frozen = FrozenState(
                run_id=self.run_id,
                commit=commit,
                state_hash=state_hash(self.layout.manifest, self.slots, hashes),
                hashes=list(hashes),
                records={chunk: pin.data for chunk, pin in pins.items()},
                folder=self.folder,
                release=lambda chunk: self.store.unpin(chunk, pins[chunk]),
            )
            self._read_by(frozen)
        return frozen

    def read_by(self, reader: Reader) -> None:
        """From now on it is told of each record that loses its place."""
        with self.store.lock:
            self._read_by(reader)

    def _read_by(self, reader: Reader) -> None:
        self._readers = [*(r for r in self._readers if not r.is_over), reader]

    def read(self, chunk: int) -> ChunkRecord:
        """Version, hash and bytes that belong together. Raises StateError if there is no valid record."""
        with self.pinned(chunk) as record:
            return ChunkRecord(record.version, record.hash, record.data.tobytes())

    # --- writing

    def seed(self, chunk: int, data: Encoded | Bytes) -> None:
        """Commit 0 from the bytes of SNAPSHOT; the slots are zero. Raises InvalidMessage for a wrong size."""
        source = np.frombuffer(data, np.uint8)
        expected = self.layout.chunks[chunk].num_bytes
        if source.size != expected:
            raise InvalidMessage(f"first values of chunk {chunk}: {source.size} bytes, {expected} are expected")

        def fill(record: Bytes) -> None:
            record[:expected] = source
            record[expected:] = 0

        self._replace(chunk, 0, fill)

    def put(self, chunk: int, version: int, data: Encoded, hash: bytes | None = None) -> bytes:
        """A whole record as a donor sent it; returns its hash. `hash`: of these bytes, if the caller has computed it.
        Raises InvalidMessage for a wrong size or version."""
        source = np.frombuffer(data, np.uint8)
        expected = record_bytes(self.layout, self.slots, chunk)
        if source.size != expected:
            raise InvalidMessage(f"state of chunk {chunk}: {source.size} bytes, {expected} are expected")
        if chunk >= self.layout.num_sync_chunks and version:
            raise InvalidMessage(f"state of chunk {chunk}: version {version}, a frozen tensor stays at 0")

        def fill(record: Bytes) -> None:
            record[:] = source

        return self._replace(chunk, version, fill, hash)

    def apply(self, chunk: int, payload: Encoded, update: OuterUpdate) -> None:
        """The outer update of one chunk by its payload in that commit, of its fragment; nothing if it is there already.

        Chunks without elements take no payload and need no call. Raises StateError if the chunk is not at the commit
        before of its fragment, InvalidMessage for a payload that is not this chunk's.
        """
        if chunk >= self.layout.num_sync_chunks:
            raise InvalidMessage(f"chunk {chunk} of {self.layout.name_of(chunk)!r} is frozen and takes no payload")
        if not self.layout.chunks[chunk].num_elements:
            return
        with self.pinned(chunk) as old:
            if old.version == update.commit:
                return
            if self._history().following(self.layout.fragment_of[chunk], old.version) != update.commit:
                raise StateError(
                    f"{self.folder}: chunk {chunk} is at commit {old.version}, commit {update.commit} cannot be "
                    "applied to it"
                )

            def fill(new: Bytes) -> None:
                outer_update.apply(self.layout, chunk, old.data, payload, update, new=new)

            self._replace(chunk, update.commit, fill)

    def _replace(self, chunk: int, version: int, fill: Callable[[Bytes], None], hash: bytes | None = None) -> bytes:
        found = self.store.replace(chunk, version, fill, hash)
        self._move_away(chunk)
        return found

    def _move_away(self, chunk: int) -> None:
        """Its former record, where it is kept for a reader of a whole commit. Not under the lock: it takes its time."""
        for reader in self._readers:
            reader.move_away(chunk)

    # --- damage

    def damaged(self) -> list[int]:
        """Chunks whose bytes do not have their hash any more. Nothing may be written meanwhile."""
        return self.store.damaged()

    def forget(self, chunk: int) -> None:
        """The chunk is missing from now on."""
        self.store.forget(chunk)
        self._move_away(chunk)

    # --- which commit it is at

    def _note(self, chunk: int, old: Entry | None, new: Entry | None) -> None:
        if chunk < self.layout.num_sync_chunks:
            versions = self._at_version[self.layout.fragment_of[chunk]]
            if new is not None:
                versions[new.version] += 1
            if old is not None:
                versions[old.version] -= 1
                if not versions[old.version]:
                    del versions[old.version]
        if new is not None:
            self._note_commit()

    def _note_commit(self) -> None:
        commit = self.commit
        if commit is None:
            return
        self._hash_lists.pop(commit, None)
        self._hash_lists[commit] = self.store.hashes()
        least = LEAST_HASH_LISTS + 2 * len(self.layout.fragments)
        most = min(MOST_HASH_LISTS, MOST_KEPT_HASHES // len(self._hash_lists[commit]))
        while len(self._hash_lists) > max(least, most):
            self._hash_lists.popitem(last=False)

    def _verify(self, num_threads: int) -> None:
        self._note_lists(self.store.verify(num_threads))
        self._note_commit()

    def _note_lists(self, entries: Sequence[Sequence[Entry]]) -> None:
        """Of the commits of which each chunk has an entry, in force or not: the one before is needed in a dispute, and
        by those who fetch it."""
        hashes = [{e.version: e.hash for e in found} for found in entries]
        common = [set.intersection(*(set(hashes[c]) for c in chunks)) for chunks in self.layout.fragments if chunks]
        history, fragment_of = self._history(), self.layout.fragment_of
        for commit in sorted(set().union(*common)):
            touched = history.touched(commit)
            if touched is None or not all(n in found for n, found in zip(touched, common, strict=True)):
                continue
            versions = itertools.chain((touched[f] for f in fragment_of), itertools.repeat(0))  # frozen ones last
            wanted = zip(self.layout.chunks, hashes, versions, strict=False)
            at = [found.get(n, b"") if chunk.num_elements else EMPTY.hash for chunk, found, n in wanted]
            if all(at):
                self._hash_lists[commit] = at


def kind_of(layout: Layout, slots: tuple[str, ...], run_id: str) -> StoreKind:
    return StoreKind(
        name=_NAME,
        what="outer state",
        identity={
            "format": _FORMAT,
            "run": run_id,
            "manifest": layout.manifest.digest.hex(),
            "slots": list(slots),
            "chunk_elements": layout.chunk_elements,
        },
        key=state_key(layout, slots, run_id),
        record_bytes=[record_bytes(layout, slots, chunk.index) for chunk in layout.chunks],
        name_of=layout.name_of,
    )


def state_key(layout: Layout, slots: tuple[str, ...], run_id: str) -> bytes:
    """Ties what is on a disk to one run, model and outer optimizer."""
    digest = Digest("atoll/outer-state/v2").text(run_id).data(layout.manifest.digest).uint(layout.chunk_elements)
    for slot in slots:
        digest.text(slot)
    return digest.finish()
