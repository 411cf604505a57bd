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
from atoll.protocol.errors import ConfigError, InvalidMessage, StateError
from atoll.protocol.hash_tree import HashTree, check_proof
from atoll.protocol.plans import payload_hash
from atoll.protocol.sync_settings import KEPT_SYNCS, SyncSettings


def check_parts(sync: SyncSettings, num_hosts: int, num_processes: int) -> None:
    """Raises ConfigError if the run wants of a site what one of several hosts or exchange processes cannot do."""
    if sync.audits and num_hosts > 1 and num_processes > 1:
        problem = f"sync.audits = {sync.audits}: one process of a host keeps all that the host contributes"
    elif sync.audits and sync.error_feedback_down and max(num_hosts, num_processes) > 1:
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


def own_places(chunks: Sequence[int], own: range) -> range:
    """Of the chunks that a host has, among those that travel, ascending."""
    return range(bisect_left(chunks, own.start), bisect_left(chunks, own.stop))


class _KeptFile(ChunkFile):
    hashed = staticmethod(payload_hash)


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The contributions to one sync, of this host; the tree is that of the site."""

    file: ChunkFile
    tree: HashTree
    number: int = 0
    """Of those of its node, as they were begun."""

    @property
    def root(self) -> bytes:
        return self.tree.root

    def read(self, chunk: int) -> bytes:
        """Raises StateError if it is not here, or damaged."""
        return self.file.read(chunk)

    def proof(self, chunk: int) -> bytes:
        """Raises StateError if it is not here, or the tree is damaged: a wrong proof would refute an honest site."""
        hash = self.file.hash_of(chunk)
        if hash is None:
            raise StateError(f"{self.file.path.name}: chunk {chunk} is not here")
        place = bisect_left(self.tree.chunks, chunk)
        proof = self.tree.proof(place)
        try:
            check_proof(self.root, len(self.tree.chunks), place, chunk, hash, proof)
        except InvalidMessage:
            what = "its tree of hashes, which is in memory, is damaged"
            raise StateError(f"{self.file.path.name}: chunk {chunk} is not given: {what}") from None
        return proof


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
    num_syncs: int = KEPT_SYNCS + 1
    """That are kept, with those under way, whose exchanges read it."""
    _syncs: dict[int, Kept] = field(default_factory=dict, init=False)  # the newest at the end
    _numbers: itertools.count[int] = field(default_factory=itertools.count, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier start
        try:
            make_folder(self.folder)
        except OSError as error:
            raise disk_error(error, self.folder) from error

    def keep(
        self,
        sync: int,
        chunks: Sequence[int],
        encode: Callable[[int], bytes],
        pool: Executor | None,
        own: range | None = None,
    ) -> Kept:
        """In a thread: encodes all of it, in place of what was kept of that sync, unless that was begun later. `own`:
        the chunks of this host, where others have the rest; nobody is given any of it before the tree is complete.
        Raises what `encode` does; StateError if what was begun later is kept already."""
        number = next(self._numbers)
        path = self.folder / f"{sync}-{number}"
        part = range(len(chunks)) if own is None else own_places(chunks, own)
        here = tuple(chunks[part.start : part.stop])
        file = _KeptFile(path, _key(sync), here, is_new=True, fsync=False)

        def put(chunk: int) -> None:
            data = encode(chunk)
            file.put(chunk, data, payload_hash(data))

        try:
            each(put, here, pool)
            file.seal()  # exchange processes of this host read it
            kept = Kept(file, HashTree(chunks, file.all_hashes(), part), number)
            old = self._replaced(sync, kept)
        except BaseException:
            file.remove()
            raise
        for kept_before in old:
            kept_before.file.remove()
        return kept

    def _replaced(self, sync: int, kept: Kept) -> list[Kept]:
        """What is kept no more. A snapshot that was given up may be encoded after the next one of its sync is, whose
        root the site has said: it would be refuted by its own contribution."""
        with self._lock:
            before = self._syncs.get(sync)
            if before is not None and before.number > kept.number:
                raise StateError(f"what this site contributes to sync {sync} was encoded anew meanwhile")
            old = [self._syncs.pop(sync)] if before is not None else []
            self._syncs[sync] = kept
            return old + [self._syncs.pop(of) for of in list(self._syncs)[: -self.num_syncs]]

    def of(self, sync: int) -> Kept | None:
        """None if it is not here, or not any more, or what other hosts keep of it is not known."""
        kept = self._syncs.get(sync)
        return kept if kept is not None and kept.root else None

    def close(self) -> None:
        """All of it goes, as far as possible; the next start removes what does not."""
        shutil.rmtree(self.folder, ignore_errors=True)
