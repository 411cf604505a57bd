"""PUBLISH without a copy: what the ranks take of the outer values is read in the outer file, where it lies.

Its buffer is a file of the disk with a table behind the values, which says of each chunk where the ranks find it: in
this buffer, in the outer file, or nowhere, because no rank reads it any more. A record that is to be read is pinned.
One that loses its place is copied to the buffer first, by the thread that replaces it; the table changes, and only then
is the place given away. So a rank that looks at the table before and after it reads knows that what it read was whole.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from atoll.node.dataplane.blocks import scatter
from atoll.node.dataplane.chunk_store import Pin
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.pages import PAGE_BYTES, has_pages
from atoll.node.local_protocol import GONE, HERE, TABLE_HEADER_WORDS, table_bytes, values_bytes, words_of
from atoll.protocol.layout import Layout

MOST_CHUNKS = 30_000
"""In place at once: a process may have 65,530 mappings (`vm.max_map_count`), and one may be between two chunks."""


class InPlace:
    """Over a buffer of `values_bytes` and `table_bytes`. `publish`, `move_all` and `let_go` come one at a time, and
    not while records are replaced; `move_away` from any thread that replaces one."""

    def __init__(self, layout: Layout, buffer: memoryview, outer_path: Path) -> None:
        self._layout = layout
        assert isinstance(buffer.obj, mmap.mmap)
        self._map = buffer.obj
        self._values = np.frombuffer(buffer, np.uint8, layout.buffer_bytes)
        num_words = table_bytes(len(layout.chunks)) // 8
        self._table = np.frombuffer(buffer, np.int64, num_words, values_bytes(layout.buffer_bytes))
        self._table[:] = HERE
        self._outer_path = outer_path
        self._outer: OuterState | None = None
        self._pins: dict[int, Pin] = {}
        self._lock = threading.Lock()  # around the pins and their entries

    @property
    def is_over(self) -> bool:
        """As of a state that is frozen: it is read until the node ends."""
        return False

    @property
    def num_chunks(self) -> int:
        """That are read in place now."""
        return len(self._pins)

    def publish(self, outer: OuterState, chunks: Iterable[int]) -> list[int]:
        """From now on the ranks, none of which reads now, find these as they are. Those that are to be copied."""
        self._release()
        if outer is not self._outer:
            found = self._outer_path.stat()
            self._table[0], self._table[1] = words_of(found.st_dev, found.st_ino)
            outer.read_by(self)
            self._outer = outer
        rest = []
        for chunk in chunks:
            if len(self._pins) < MOST_CHUNKS and has_pages(self._layout.chunks[chunk]):
                pin = outer.store.pin(chunk)
                offset_bytes = outer.store.offset_bytes(chunk, pin)
                if offset_bytes % PAGE_BYTES == 0:
                    with self._lock:
                        self._pins[chunk] = pin
                        self._enter(chunk, 1 + offset_bytes // PAGE_BYTES)
                    continue
                outer.store.unpin(chunk, pin)
            self._enter(chunk, HERE)
            rest.append(chunk)
        return rest

    def move_away(self, chunk: int) -> None:
        """To the buffer: its place is wanted."""
        with self._lock:
            if (pin := self._pins.pop(chunk, None)) is None:
                return
        spec = self._layout.chunks[chunk]
        scatter(pin.data[: spec.num_bytes], self._values, spec)
        # The node seldom needs it again: it is the kernel's to write and to drop, and no memory of this process.
        self._map.madvise(mmap.MADV_DONTNEED, spec.offset_bytes, spec.num_bytes)
        self._enter(chunk, HERE)
        assert self._outer is not None
        self._outer.store.unpin(chunk, pin)

    def unmap(self) -> None:
        """What this process has mapped of the values in the buffer, which the file keeps."""
        self._map.madvise(mmap.MADV_DONTNEED, 0, values_bytes(self._layout.buffer_bytes))

    def move_all(self) -> None:
        """What is still read in place."""
        for chunk in list(self._pins):
            self.move_away(chunk)

    def leave(self) -> None:
        """The outer file, which is to be made anew."""
        self.move_all()
        self._outer = None

    def let_go(self) -> None:
        """No rank reads before the next `publish`."""
        with self._lock:
            for chunk in self._pins:
                self._enter(chunk, GONE)
        self._release()

    def _release(self) -> None:
        with self._lock:
            pins, self._pins = self._pins, {}
        for chunk, pin in pins.items():
            assert self._outer is not None
            self._outer.store.unpin(chunk, pin)

    def _enter(self, chunk: int, entry: int) -> None:
        self._table[TABLE_HEADER_WORDS + chunk] = entry
