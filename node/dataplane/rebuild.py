"""After a crash or a power cut: the newest whole state that this disk can give back.

A chunk may be in the outer state (at one version) and in snapshots (at others), and the payload log leads from each of
them to the commits of its fragment after it, as far as the log is whole. The state goes to the newest commit that every
chunk reaches.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from atoll.node.dataplane.chunk_store import ChunkRecord
from atoll.node.dataplane.optim import OuterOptimizer
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.outer_update import updated
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.dataplane.snapshot import SnapshotFile, Snapshots
from atoll.protocol.errors import InvalidMessage, StateError
from atoll.protocol.layout import chunk_hash, state_hash

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Source:
    """A record of one chunk at `version`. With the log, it is in the state of every commit up to `reaches`."""

    version: int
    reaches: int
    snapshot: SnapshotFile | None  # None: the outer state itself


@dataclass(eq=False)
class Rebuilder:
    """Of what this disk holds of a run."""

    outer: OuterState
    log: PayloadLog
    snapshots: Snapshots
    optimizer: OuterOptimizer

    def __post_init__(self) -> None:
        self._layout = self.outer.layout
        known = (*(c.commit for c in self.log.commits()), *(file.newest for file in self.snapshots.files))
        self._newest = max(known, default=0)
        self._readable: dict[tuple[int, int], bool] = {}  # (commit, chunk)
        self._num_restored = 0

    # --- an older commit, beside the newest

    def oldest(self) -> int | None:
        """The oldest commit whose state can be put together here, as far as one can tell without reading it; None if
        there is none."""
        found = [] if self.outer.commit is None else [self.outer.commit]
        history = self.log.history
        for file in self.snapshots.files:
            try:
                needed = [history.between(f, oldest, file.newest) for f, oldest in enumerate(file.oldest)]
            except StateError:
                continue  # not known any more
            if all(self.log.has(number) for commits in needed for number in commits):
                found.append(file.newest)
        return min(found, default=None)

    def put_aside(self, commit: int, expected: bytes) -> bytes:
        """Makes a snapshot of an older commit than the outer state has, from older snapshots and the log; its state
        hash. Nothing else changes, so that the newest state is still there if the run does not go back.

        Raises StateError if that commit cannot be put together, or does not have the hash `expected` (if it is known),
        HostError for the disk.
        """
        outer = self.outer
        hashes = [outer.hash_of(chunk.index) for chunk in self._layout.chunks]

        def read(chunk: int) -> ChunkRecord:
            record = self.record_at(chunk, commit)
            hashes[chunk] = record.hash
            return record

        def found() -> bytes:
            whole = [value for value in hashes if value is not None]
            if len(whole) != len(hashes):
                raise StateError(f"{outer.folder}: chunks of frozen tensors are missing; fetch the state again")
            return state_hash(self._layout.manifest, outer.slots, whole)

        def check() -> None:
            if expected and found() != expected:
                raise StateError(
                    f"commit {commit}, put together from snapshots and the payload log, has the hash "
                    f"{found().hex()[:12]}; in the run it had {expected.hex()[:12]}"
                )

        self.snapshots.add(outer, commit, read, check)
        return found()

    def record_at(self, chunk: int, commit: int) -> ChunkRecord:
        """The chunk as it was at `commit`. Raises StateError if nothing here leads to that."""
        problem: Exception | None = None
        history, fragment = self.log.history, self._layout.fragment_of[chunk]
        last = history.touch(fragment, commit)
        try:
            with self.outer.pinned(chunk) as held:
                if held.version == last:  # whatever the other chunks are at: commits go on meanwhile
                    data = held.data.tobytes()
                    if chunk_hash(data) == held.hash:
                        return ChunkRecord(last, held.hash, data)
                    problem = StateError(f"{self.outer.folder}: chunk {chunk} is damaged at commit {last}")
        except StateError as error:
            problem = error
        for file in self.snapshots.files:
            version = file.version(chunk)
            if version is None or version > last:
                continue
            try:
                data = file.record(chunk).data
                for number in history.between(fragment, version, last):
                    update = self.optimizer.at(self.log.record(number))
                    data = updated(self._layout, chunk, data, self.log.read(number, chunk), update)
            except (StateError, InvalidMessage) as error:
                problem = error  # an older one may do
                continue
            return ChunkRecord(last, chunk_hash(data), data)
        raise StateError(str(problem) if problem else f"no snapshot here is as old as commit {commit}")

    # --- the newest commit

    def rebuild(self) -> int | None:
        """Brings the outer state to the newest commit that can be had here; that commit, or None if there is none.

        In that case chunks that can be restored at all are; what is left is `missing`, and must be fetched.
        """
        before = self.outer.commit
        self._restore_frozen()
        if before is None or before < self._newest:
            while not self._bring_all():
                pass  # a record turned out to be damaged: once more without it
        self._report(before)
        return self.outer.commit

    def _report(self, before: int | None) -> None:
        commit, where = self.outer.commit, self.outer.folder
        restored = f", {self._num_restored} chunks from snapshots" if self._num_restored else ""
        if commit is None:
            missing = len(self.outer.missing)
            log.warning("%s: no whole state can be put together here (%d chunks are missing)", where, missing)
        elif commit < self._newest:
            log.warning(
                "%s: the state is whole at commit %d%s; commit %d, which was here, cannot be put together any more",
                where, commit, restored, self._newest,
            )  # fmt: skip
        elif commit != before:
            log.info("%s: put together at commit %d%s", where, commit, restored)

    def _restore_frozen(self) -> None:
        frozen = self.snapshots.frozen
        for chunk in self.outer.missing if frozen is not None else ():
            if frozen is not None and frozen.version(chunk) is not None:
                self._put(chunk, frozen)

    def _bring_all(self) -> bool:
        """False if it has to be tried again."""
        held = self.outer.versions  # of all chunks: once, not for each of a hundred thousand
        chunks = self._layout.sync_chunks
        sources = {chunk: self._sources(chunk, held[chunk], with_snapshots=False) for chunk in chunks}
        target = _newest_common(list(sources.values()))
        if target is None or target < self._newest:
            sources = {chunk: self._sources(chunk, held[chunk], with_snapshots=True) for chunk in chunks}
            target = _newest_common(list(sources.values()))
        for chunk, found in sources.items():
            if target is not None:
                source = next(s for s in found if s.version <= target <= s.reaches)
                if not self._bring(chunk, source, target):
                    return False
            elif found and self.outer.hash_of(chunk) is None and not self._bring(chunk, found[0], found[0].version):
                return False
        return True

    def _sources(self, chunk: int, held: int | None, *, with_snapshots: bool) -> list[_Source]:
        """The newest first. `held`: its version in the outer state."""
        records = [(held, None), *((f.version(chunk), f) for f in (self.snapshots.files if with_snapshots else ()))]
        found = [_Source(v, self._reach(chunk, v), file) for v, file in records if v is not None]
        return sorted(found, key=lambda s: (-s.version, s.snapshot is not None))

    def _reach(self, chunk: int, version: int) -> int:
        """Before `version` if the history here does not tell of it."""
        history, fragment = self.log.history, self._layout.fragment_of[chunk]
        try:
            following = history.following(fragment, version)
            while self._is_readable(following, chunk):
                following = history.following(fragment, following)
        except StateError:
            return version - 1
        return following - 1

    def _is_readable(self, commit: int, chunk: int) -> bool:
        if not self.log.has(commit):
            return False
        if (commit, chunk) not in self._readable:
            try:
                self.log.read(commit, chunk)
                self._readable[commit, chunk] = True
            except StateError as error:
                log.warning("%s", error)
                self._readable[commit, chunk] = False
        return self._readable[commit, chunk]

    def _bring(self, chunk: int, source: _Source, target: int) -> bool:
        """False if the source or a payload was not what it seemed to be."""
        if source.snapshot is not None and not self._put(chunk, source.snapshot):
            return False
        fragment = self._layout.fragment_of[chunk]
        for commit in self.log.history.between(fragment, source.version, target):
            try:
                update = self.optimizer.at(self.log.record(commit))
                self.outer.apply(chunk, self.log.read(commit, chunk), update)
            except (StateError, InvalidMessage) as error:
                log.warning("%s", error)
                self._readable[commit, chunk] = False
                return False
        return True

    def _put(self, chunk: int, file: SnapshotFile) -> bool:
        try:
            record = file.record(chunk)
            self.outer.put(chunk, record.version, record.data, record.hash)
        except StateError as error:
            log.warning("%s", error)
            file.lose(chunk)
            return False
        self._num_restored += 1
        return True


def _newest_common(sources: list[list[_Source]]) -> int | None:
    """The newest commit that every chunk reaches from one of its sources."""
    ends = sorted({s.reaches for found in sources for s in found}, reverse=True)
    return next((end for end in ends if all(any(s.version <= end <= s.reaches for s in f) for f in sources)), None)
