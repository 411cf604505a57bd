"""What this site has contributed to its last syncs, as it was encoded, with proofs: for sites that audit a reducer.

Each sync has a file, and a tree of hashes in memory. They live no longer than the process: a node that starts again has
no contribution of the start before. See docs/decisions/0069-audited-reducers.md.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

from atoll.node.dataplane.chunk_file import ChunkFile
from atoll.node.threads import each
from atoll.protocol.digest import Digest
from atoll.protocol.disk import disk_error, make_folder
from atoll.protocol.errors import ConfigError, StateError
from atoll.protocol.hash_tree import HashTree
from atoll.protocol.plans import payload_hash
from atoll.protocol.sync_settings import KEPT_SYNCS, SyncSettings


def check_parts(sync: SyncSettings, num_hosts: int, num_processes: int) -> None:
    """Raises ConfigError if the run wants of a site what one of several hosts or exchange processes cannot do."""
    if sync.audits and num_hosts > 1:
        problem = f"sync.audits = {sync.audits}: one machine keeps all that a site contributes"
    elif sync.audits and sync.error_feedback_down and num_processes > 1:
        problem = (
            f"sync.audits = {sync.audits} with sync.error_feedback_down: one process has what auditors ask for, the "
            "errors of all averages that a site makes"
        )
    else:
        return
    raise ConfigError(
        f"{problem}, and this site has {num_hosts} hosts and {num_processes} exchange processes: choose 1 of each, or "
        "a run without it"
    )


class _KeptFile(ChunkFile):
    hashed = staticmethod(payload_hash)


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The contributions to one sync."""

    file: ChunkFile
    tree: HashTree

    @property
    def root(self) -> bytes:
        return self.tree.root

    def read(self, chunk: int) -> bytes:
        """Raises StateError if it is not here, or damaged."""
        return self.file.read(chunk)

    def proof(self, chunk: int) -> bytes:
        """Raises StateError if it is not here."""
        place = bisect_left(self.file.chunks, chunk)
        if self.file.chunks[place : place + 1] != (chunk,):
            raise StateError(f"{self.file.path.name}: chunk {chunk} is not here")
        return self.tree.proof(place)


def _key(sync: int) -> bytes:
    return Digest("atoll/kept/v1").uint(sync).finish()


def kept_by_node(path: Path, sync: int, chunks: Sequence[int]) -> Kept:
    """For an exchange process of its host, in a thread. Raises StateError if that is not what the file is of, or if it
    is gone."""
    file = _KeptFile(path, _key(sync), chunks, is_new=False, fsync=False)
    return Kept(file, HashTree(chunks, file.all_hashes()))


@dataclass(eq=False)
class KeptContributions:
    """Methods may be called from several threads. Raises HostError for the disk."""

    folder: Path
    num_in_flight: int = 1
    """Syncs that may be open at once, whose exchanges read what is kept."""
    _syncs: dict[int, Kept] = field(default_factory=dict, init=False)  # the newest at the end
    _numbers: itertools.count[int] = field(default_factory=itertools.count, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier start
        try:
            make_folder(self.folder)
        except OSError as error:
            raise disk_error(error, self.folder) from error

    def keep(self, sync: int, chunks: Sequence[int], encode: Callable[[int], bytes], pool: Executor | None) -> Kept:
        """In a thread: encodes all of it, in place of what was kept of that sync. Raises what `encode` does."""
        path = self.folder / f"{sync}-{next(self._numbers)}"
        file = _KeptFile(path, _key(sync), tuple(chunks), is_new=True, fsync=False)

        def put(chunk: int) -> None:
            data = encode(chunk)
            file.put(chunk, data, payload_hash(data))

        try:
            each(put, chunks, pool)
            file.seal()  # exchange processes of this host read it
            kept = Kept(file, HashTree(file.chunks, file.all_hashes()))
        except BaseException:
            file.remove()
            raise
        with self._lock:
            old = [self._syncs.pop(sync)] if sync in self._syncs else []
            self._syncs[sync] = kept
            old += [self._syncs.pop(number) for number in list(self._syncs)[: -KEPT_SYNCS - self.num_in_flight]]
        for kept_before in old:
            kept_before.file.remove()
        return kept

    def of(self, sync: int) -> Kept | None:
        """None if it is not here, or not any more."""
        return self._syncs.get(sync)

    def close(self) -> None:
        """All of it goes, as far as possible; the next start removes what does not."""
        shutil.rmtree(self.folder, ignore_errors=True)
