"""Snapshots of the outer state: files that, once there, are whole, and from which the payload log leads on.

A snapshot is copied chunk by chunk while commits go on, so its chunks may be at several commits; each has its version
and hash in the file's table, and the payloads of the commits between are in the log (`rebuild.py` puts them together).
Frozen tensors never change and have a file of their own, written once.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path

from atoll.node.dataplane.chunk_file import ChunkFile
from atoll.node.dataplane.chunk_store import ChunkRecord
from atoll.node.dataplane.outer_state import OuterState, state_key
from atoll.protocol.disk import disk_error, make_folder, sync_folder
from atoll.protocol.errors import HostError, StateError
from atoll.protocol.layout import Layout, chunk_hash

log = logging.getLogger(__name__)

_NAME = re.compile(r"commit-(\d{1,20})\.snapshot")
FROZEN = "frozen.snapshot"


class SnapshotFile(ChunkFile):
    """One snapshot; the records are checked as they are read."""

    hashed = staticmethod(chunk_hash)
    fragments: Sequence[Sequence[int]] = ()
    """The chunks of each; none of frozen tensors."""

    @cached_property
    def oldest(self) -> tuple[int, ...]:
        """Of each fragment, the lowest version of a chunk: the log must have its commits after it."""
        found = (map(self.version, chunks) for chunks in self.fragments)
        return tuple(min((version for version in versions if version is not None), default=0) for versions in found)

    @cached_property
    def newest(self) -> int:
        """The highest version of a chunk: the first commit at which the whole state can be."""
        return max(self._versions(), default=0)

    def version(self, chunk: int) -> int | None:
        """None if the chunk is not in this file, or damaged there."""
        with self._lock:
            return self._entry(chunk)[2] if chunk in self._entries else None

    def record(self, chunk: int) -> ChunkRecord:
        """Raises StateError, naming the file, if the record is not the one that was written, or cannot be read."""
        _, _, version, value = self._entry(chunk)
        try:
            return ChunkRecord(version, value, self.read(chunk))
        except HostError as error:
            raise StateError(str(error)) from error


class Snapshots:
    """The snapshots of one run in a folder. Damaged ones are removed, with a warning, when the folder is opened."""

    def __init__(
        self, folder: Path, layout: Layout, slots: tuple[str, ...], run_id: str, sync_log: Callable[[], None]
    ) -> None:
        """`sync_log`: the log is on the disk for good before a snapshot that needs it is there."""
        self._folder = folder
        self._sync_log = sync_log
        self._lock = threading.Lock()
        self.num_cleared = 0
        """How often snapshots were removed by `clear` or `roll_back`, or voided."""
        self.spared: int | None = None
        """The commit of a snapshot that `add` made and `write` leaves, however many younger ones there are."""
        self._key = state_key(layout, slots, run_id)
        self._sync_chunks, self._fragments = layout.sync_chunks, layout.fragments
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
        self._write_frozen(outer, num_cleared)
        self._write("snapshot.new", self._sync_chunks, partial(_checked, outer), num_cleared)
        with self._lock:
            gone = [f for f in self.files[keep:] if f.newest != self.spared]
            self._remove(gone)

    def add(
        self, outer: OuterState, commit: int, read: Callable[[int], ChunkRecord], check: Callable[[], None]
    ) -> None:
        """A snapshot of an older commit than `outer` has, on the disk for good; no younger one takes its place while
        it is `spared`. `read` gives the records at `commit`; `check` raises if they were not what was wanted.

        Raises StateError if snapshots were removed meanwhile, HostError for the disk.
        """
        num_cleared = self.num_cleared
        self._write_frozen(outer, num_cleared)
        if not self._write("rebuilt.new", self._sync_chunks, read, num_cleared, check):
            raise StateError(f"{self._folder}: the snapshots were removed meanwhile")
        self.spared = commit

    def clear(self) -> None:
        """Removes all, for good: what is discarded must not come back."""
        with self._lock:
            self.num_cleared += 1
            self.spared = None
            self._remove(self.files)
            self.frozen = None
            for path in sorted(self._folder.glob("*.snapshot")):  # what is being written goes when its writer is done
                path.unlink(missing_ok=True)
            sync_folder(self._folder)

    def void(self) -> None:
        """Nothing comes of the snapshot that is being written, if one is."""
        with self._lock:
            self.num_cleared += 1

    def roll_back(self, commit: int) -> None:
        """Removes, for good, those with chunks of later commits, and the one that is being written."""
        with self._lock:
            self.num_cleared += 1
            self.spared = None
            self._remove([f for f in self.files if f.newest > commit])
            sync_folder(self._folder)

    def _remove(self, gone: Sequence[SnapshotFile]) -> None:
        self.files = tuple(f for f in self.files if f not in gone)
        for file in gone:
            file.remove()

    # --- writing

    def _write_frozen(self, outer: OuterState, num_cleared: int) -> None:
        if self._frozen_chunks and self.frozen is None:
            self._write("snapshot.new", self._frozen_chunks, partial(_checked, outer), num_cleared)

    def _write(
        self,
        aside: str,
        chunks: Sequence[int],
        read: Callable[[int], ChunkRecord],
        num_cleared: int,
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """A file of these chunks, under another name until it is synced. False, and nothing comes of it, if snapshots
        were removed meanwhile."""
        file = SnapshotFile(self._folder / aside, self._key, chunks, is_new=True, fsync=True)
        is_there = False
        try:
            for chunk in chunks:
                record = read(chunk)
                file.put(chunk, record.data, record.hash, record.version)
            file.seal()
            self._sync_log()
            check()
            is_there = self._put_in_place(file, is_frozen=chunks is self._frozen_chunks, num_cleared=num_cleared)
        finally:
            if not is_there:
                file.remove()
        return is_there

    def _put_in_place(self, file: SnapshotFile, *, is_frozen: bool, num_cleared: int) -> bool:
        path = self._folder / (FROZEN if is_frozen else f"commit-{file.newest}.snapshot")
        with self._lock:
            if num_cleared != self.num_cleared:
                return False
            try:
                os.replace(file.path, path)
                sync_folder(self._folder)
            except OSError as error:
                raise disk_error(error, path) from error
            file.path = path
            self._add(file)
        return True

    def _add(self, file: SnapshotFile) -> None:
        """It takes the place of one with its name."""
        if file.path.name == FROZEN:
            self.frozen = file
        else:
            file.fragments = self._fragments
            others = (f for f in self.files if f.path != file.path)
            self.files = tuple(sorted((file, *others), key=lambda f: -f.newest))

    def _open_all(self) -> None:
        for path in sorted(self._folder.iterdir()):
            if path.name.endswith(".new"):
                path.unlink(missing_ok=True)
            elif path.name == FROZEN or _NAME.fullmatch(path.name):
                chunks = self._frozen_chunks if path.name == FROZEN else self._sync_chunks
                try:
                    self._add(SnapshotFile(path, self._key, chunks, is_new=False, fsync=True))
                except (StateError, HostError) as error:
                    log.warning("removed a snapshot: %s", error)
                    path.unlink(missing_ok=True)


def _checked(outer: OuterState, chunk: int) -> ChunkRecord:
    """Raises StateError if the record's bytes do not have its hash any more."""
    record = outer.read(chunk)
    if chunk_hash(record.data) != record.hash:
        raise StateError(
            f"{outer.folder}: chunk {chunk} of {outer.layout.name_of(chunk)!r} is damaged at commit {record.version}: "
            "its bytes do not have its hash"
        )
    return record
