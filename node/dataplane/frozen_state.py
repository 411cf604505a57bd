"""The outer state as it was at one commit, for whoever reads it slowly while later commits are applied.

Records stay where they are, pinned. One that is about to lose its place to a later commit is copied to a file without
a name first, by the thread that applies: a few spare places serve all chunks, so none of them may be held for long.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from atoll.protocol.disk import disk_error, write_at
from atoll.protocol.errors import HostError

Bytes = npt.NDArray[np.uint8]


@dataclass(eq=False, kw_only=True)
class FrozenState:
    """Made by `OuterState.freeze`; `close` it."""

    run_id: str
    commit: int
    state_hash: bytes
    hashes: Sequence[bytes]
    records: InitVar[Mapping[int, Bytes]]
    """Of each chunk that has bytes, a view of its place."""
    folder: Path
    release: Callable[[int], None]

    def __post_init__(self, records: Mapping[int, Bytes]) -> None:
        self._pinned = dict(records)
        self._offsets: dict[int, int] = {}
        self._end = 0
        for chunk, record in records.items():
            self._offsets[chunk] = self._end
            self._end += record.size
        self._lock = threading.Lock()  # around all that follows
        self._file: int | None = None
        self._failure: HostError | None = None
        self._is_closed = False

    def read(self, chunk: int, first_byte: int, num_bytes: int) -> bytes:
        """Of the record. Raises HostError if it could not be kept, for want of disk space."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            record = self._pinned.get(chunk)
            if record is not None:
                return record[first_byte : first_byte + num_bytes].tobytes()
            if chunk not in self._offsets:
                return b""  # without elements
            assert self._file is not None
            return os.pread(self._file, num_bytes, self._offsets[chunk] + first_byte)

    def move_away(self, chunk: int) -> None:
        """Its place is wanted. Never raises: it is the reader who fails if there is no room for the copy."""
        with self._lock:
            record = self._pinned.pop(chunk, None)
            if record is None:
                return
            if self._failure is None:
                try:
                    self._copy(record, self._offsets[chunk])
                except OSError as error:
                    self._failure = disk_error(error, self.folder, self._end)
        self.release(chunk)

    @property
    def is_over(self) -> bool:
        with self._lock:
            return self._is_closed

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            pinned, self._pinned = self._pinned, {}
            file, self._file = self._file, None
            if file is not None:
                os.close(file)
        for chunk in pinned:
            self.release(chunk)

    def _copy(self, record: Bytes, offset: int) -> None:
        if self._file is None:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                self._file = os.dup(file.fileno())
        write_at(self._file, record.data, offset)
