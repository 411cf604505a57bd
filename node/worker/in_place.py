"""PUBLISH of a rank whose node copies nothing: pages of the outer file, mapped where PUBLISH has the values of a chunk.

Where a chunk is found, the table behind PUBLISH says (`dataplane/in_place.py`). It may change while a rank reads, as
the node goes on: so a reader brings its pages up to date, reads, and looks whether they still are. No torch, no numpy.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from atoll.node.local_protocol import GONE, HERE, TABLE_HEADER_WORDS, table_bytes, values_bytes, words_of
from atoll.protocol.errors import InvalidMessage, StateError
from atoll.protocol.layout import Layout

_MAP_SHARED, _MAP_FIXED = 0x01, 0x10
_FAILED = ctypes.c_void_p(-1).value
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
MOST_LOOKS = 1000
"""Each finds a chunk moved: a node that goes on in vain moves each of them once."""


class PublishInPlace:
    """`fd` of PUBLISH and `folder` of the outer file are this object's from now on: a script may change its working
    folder, and in a container the file has another path. What it maps stays mapped until the process ends."""

    def __init__(self, fd: int, folder: int, layout: Layout, outer_name: str) -> None:
        self._layout, self._fd, self._folder, self._outer_name = layout, fd, folder, outer_name
        self._outer: tuple[int, int, int] | None = None  # device and number of the file that is open, its descriptor
        # Shared and writable, as PUBLISH is that tensors are made of; nobody writes there. A private page that is
        # locked in memory (mlockall) would never change again.
        self._map = mmap.mmap(fd, layout.buffer_bytes)
        self.view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        table = mmap.mmap(
            fd,
            table_bytes(len(layout.chunks)),
            flags=mmap.MAP_SHARED,
            prot=mmap.PROT_READ,
            offset=values_bytes(layout.buffer_bytes),
        )
        self._table = memoryview(table).cast("q")
        self._mapped = [0, 0, *(HERE for _ in layout.chunks)]

    def refresh(self) -> None:
        """What is read from now on is what the node has published. Raises StateError if it has let go of that."""
        for _ in range(MOST_LOOKS):
            if (wanted := self._table.tolist()) == self._mapped:
                return
            self._open(wanted[0], wanted[1])
            for chunk, entry in enumerate(wanted[TABLE_HEADER_WORDS:]):
                before = self._mapped[TABLE_HEADER_WORDS + chunk]
                if entry == GONE:
                    raise StateError("the node has gone on from the outer values that this rank reads")
                if entry != before or (
                    entry != HERE and wanted[:TABLE_HEADER_WORDS] != self._mapped[:TABLE_HEADER_WORDS]
                ):
                    self._place(chunk, entry)
            self._mapped = wanted
        raise StateError(f"the node has moved what this rank reads {MOST_LOOKS} times")

    @property
    def is_current(self) -> bool:
        """Whether all that was read since `refresh` is what was published."""
        return self._table.tolist() == self._mapped

    def _open(self, device: int, number: int) -> None:
        """The outer file, which a rollback makes anew."""
        if self._outer is not None and self._outer[:2] == (device, number):
            return
        if not number:
            return  # nothing is there yet
        if self._outer is not None:
            os.close(self._outer[2])
            self._outer = None
        fd = os.open(self._outer_name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder)
        found = os.fstat(fd)
        if words_of(found.st_dev, found.st_ino) != (device, number):
            os.close(fd)
            raise StateError(f"{self._outer_name} of the node is another file than the node has published")
        self._outer = device, number, fd

    def _place(self, chunk: int, entry: int) -> None:
        spec = self._layout.chunks[chunk]
        if entry == HERE:
            prot, fd, offset = mmap.PROT_READ | mmap.PROT_WRITE, self._fd, spec.offset_bytes
        elif self._outer is not None:
            prot, fd, offset = mmap.PROT_READ, self._outer[2], (entry - 1) * mmap.PAGESIZE
        else:
            raise InvalidMessage(f"the node names a place of chunk {chunk} in a file that it does not name")
        at = self._address + spec.offset_bytes
        if _mmap(at, spec.num_bytes, prot, _MAP_SHARED | _MAP_FIXED, fd, offset) == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)} (chunk {chunk} of PUBLISH, {spec.num_bytes} bytes)")
