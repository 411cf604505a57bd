"""Payloads that an exchange process of this host keeps in the log of its node.

The node makes the file of an attempt, and sets aside a region of it for each process. A process puts payloads there and
says where they lie; the node alone has the table, seals the file and makes it a commit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.node.dataplane.chunk_file import ENTRY_BYTES
from atoll.node.dataplane.payload_file import AttemptKey, PayloadFile
from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.errors import InvalidMessage, StaleError, StateError
from atoll.protocol.layout import Layout
from atoll.protocol.messages import Commit, Plan
from atoll.protocol.plans import weights

_CHUNK = struct.Struct("<Q")
STORED_BYTES = _CHUNK.size + ENTRY_BYTES
"""Of what is said of one payload."""


def stored(file: PayloadFile, chunks: Sequence[int]) -> bytes:
    """What is said of those of them that are in the file."""
    entries = ((chunk, file.entry_of(chunk)) for chunk in chunks)
    return b"".join(_CHUNK.pack(chunk) + entry for chunk, entry in entries if entry is not None)


def heard(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The inverse: chunks and their entries. Raises InvalidMessage."""
    if len(data) % STORED_BYTES:
        raise InvalidMessage(f"{len(data)} bytes say where payloads lie: no multiple of {STORED_BYTES}")
    for start in range(0, len(data), STORED_BYTES):
        yield _CHUNK.unpack_from(data, start)[0], data[start + _CHUNK.size : start + STORED_BYTES]


def adopt(file: PayloadFile, data: bytes, regions: Sequence[range], max_bytes: Callable[[int], int]) -> list[int]:
    """Payloads that a process has put within its regions are in the file from now on; their chunks. `max_bytes` raises
    InvalidMessage for a chunk that is not one of the process. Raises InvalidMessage, DigestMismatch."""
    chunks = []
    for chunk, entry in heard(data):
        file.adopt(chunk, entry, regions, max_bytes(chunk))
        chunks.append(chunk)
    return chunks


class PartFile(PayloadFile):
    """The file of an attempt, as one process sees it that has some of its chunks."""

    def __init__(
        self, folder: Path, layout: Layout, run_id: str, attempt: AttemptKey, *, own: Sequence[int], region: range
    ) -> None:
        super().__init__(folder, layout, run_id, attempt, is_new=None, fsync=False)
        self.own = own
        self.put_within(region)

    def missing(self) -> list[int]:
        return [chunk for chunk in self.own if self.entry_of(chunk) is None]

    def seal(self) -> None:
        """The node does. Raises StateError while own chunks are missing."""
        if missing := self.missing():
            raise StateError(f"{self.path.name}: {len(missing)} of {len(self.own)} chunks are missing")

    def digest(self, plan: Plan | Commit) -> bytes:
        """The node's affair: it has all of them."""
        return bytes(DIGEST_BYTES)


class LastPayloads:
    """Of the commits that led to a base, by fragment: read where the node's log has them."""

    def __init__(self, folder: Path, layout: Layout, run_id: str, commits: Mapping[int, Commit]) -> None:
        """In a thread."""
        self._layout = layout
        self._files: dict[int, tuple[PayloadFile, tuple[int, ...]]] = {}
        for fragment, commit in commits.items():
            with suppress(StateError):  # the log has dropped it meanwhile
                file = PayloadFile(folder, layout, run_id, AttemptKey.of(commit), is_new=False, fsync=False)
                self._files[fragment] = file, weights(commit)

    def __call__(self, chunk: int) -> tuple[bytes, tuple[int, ...]] | None:
        """See `SyncData.last_payload`."""
        file, tokens = self._files.get(self._layout.fragment_of[chunk], (None, ()))
        if file is None:
            return None
        try:
            return file.read(chunk), tokens
        except StateError:
            return None  # fetched as a state, or damaged


@dataclass(eq=False)
class PartLog:
    """The log of the node, as far as a process needs it."""

    folder: Path
    layout: Layout
    run_id: str
    in_force: frozenset[AttemptKey] = frozenset()
    """See `PayloadLog.attempts_in_force`."""
    _files: dict[AttemptKey, PartFile] = field(default_factory=dict, init=False)
    _attempts: dict[int, AttemptKey | None] = field(default_factory=dict, init=False)

    def expect(self, attempt: AttemptKey, own: Sequence[int], region: range, held: bytes) -> None:
        """An exchange of that attempt begins soon. `held`: what the node has of these chunks already. Raises
        InvalidMessage."""
        file = PartFile(self.folder, self.layout, self.run_id, attempt, own=own, region=region)
        for chunk, entry in heard(held):
            file.take_over(chunk, entry)
        self._files[attempt] = file

    def keep(self, in_flight: Collection[int]) -> None:
        """All other syncs are over."""
        self._files = {key: file for key, file in self._files.items() if key.sync in in_flight}

    def drop(self, sync: int) -> None:
        self._files = {key: file for key, file in self._files.items() if key.sync != sync}

    def begin(
        self, sync: int, term: int, attempt: int, fragment: int = 0, *, is_over: Callable[[], bool] = lambda: False
    ) -> PayloadFile:
        """See `PayloadLog`. Raises StaleError if it is not expected any more."""
        file = self._files.get(AttemptKey(sync, term, attempt))
        if file is None or is_over():
            raise StaleError(f"sync {sync} attempt {attempt} was over before it began")
        return file

    def led_to_base(self, fragment: int, attempts: Mapping[int, AttemptKey]) -> None:
        """Of each fragment that travels in a sync of this one: the attempt that has left errors of averages, if the
        node's log has it."""
        num = len(self.layout.fragments)
        for travelling in (fragment,) if fragment < num else range(num):
            self._attempts[travelling] = attempts.get(travelling)

    def attempt_of(self, fragment: int, commit: int) -> AttemptKey | None:
        """Of the base that was named last."""
        return self._attempts.get(fragment)

    def attempts_in_force(self) -> set[AttemptKey]:
        return set(self.in_force)
