"""The index of a chunk store: which record of a chunk counts. Pure, over a writable buffer.

Each chunk has two entries of 64 bytes, written in turn; the valid one with the higher serial counts. So a write that
is torn at any byte leaves the chunk's former entry in force. Another process may read while one writes: no entry comes
back once it was replaced, so what two looks in a row find was there between them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.protocol.digest import Digest

ENTRY_BYTES = 64
_BODY = struct.Struct("<QII32s")
_CHECK_BYTES = ENTRY_BYTES - _BODY.size


@dataclass(frozen=True, slots=True)
class Entry:
    version: int
    serial: int
    place: int
    hash: bytes


class ChunkIndex:
    """`key` ties entries to one run and layout: those of another are not valid."""

    def __init__(self, buffer: memoryview, key: bytes) -> None:
        self._buffer = buffer
        self._key = key

    @staticmethod
    def size_bytes(num_chunks: int) -> int:
        return 2 * ENTRY_BYTES * num_chunks

    def entries(self, chunk: int) -> list[Entry]:
        """The valid entries of a chunk at one moment of this call, the one in force first."""
        start = 2 * chunk * ENTRY_BYTES
        sides = slice(start, start + 2 * ENTRY_BYTES)
        while (both := bytes(self._buffer[sides])) != bytes(self._buffer[sides]):
            pass  # a writer was between the two sides
        found = []
        for side, data in enumerate((both[:ENTRY_BYTES], both[ENTRY_BYTES:])):
            body = data[: _BODY.size]
            version, place, serial, value = _BODY.unpack(body)
            if serial and serial % 2 == side and data[_BODY.size :] == self._check(chunk, body):
                found.append(Entry(version, serial, place, value))
        return sorted(found, key=lambda e: -e.serial)

    def write(self, chunk: int, entry: Entry) -> None:
        """Puts `entry` in force; its serial must be one more than the present one's."""
        start = (2 * chunk + entry.serial % 2) * ENTRY_BYTES
        body = _BODY.pack(entry.version, entry.place, entry.serial, entry.hash)
        self._buffer[start : start + ENTRY_BYTES] = body + self._check(chunk, body)

    def clear(self, chunk: int, but: Sequence[Entry] = ()) -> None:
        """The chunk has no other valid entries than these from now on. What is in force goes last: the record before
        may be gone from its place."""
        in_force = [entry.serial % 2 for entry in self.entries(chunk)[:1]]
        for side in sorted({0, 1}.difference(entry.serial % 2 for entry in but), key=in_force.count):
            start = (2 * chunk + side) * ENTRY_BYTES
            self._buffer[start : start + ENTRY_BYTES] = bytes(ENTRY_BYTES)

    def _check(self, chunk: int, body: bytes) -> bytes:
        return Digest("atoll/chunk-index/v1").data(self._key).uint(chunk).data(body).finish()[:_CHECK_BYTES]
