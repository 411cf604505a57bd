"""Where a reducer keeps contributions: in its memory up to a bound, beyond it on its disk.

On the disk each has a file: what is not wanted any more frees its space at once. Files live no longer than the process;
a node that starts again is another incarnation, and nobody sends it less for what it held before.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

from atoll.node.exchange.peers.frames import Encoded
from atoll.protocol.disk import REAL_DISK, Disk, disk_error, make_folder
from atoll.protocol.errors import HostError, StaleError
from atoll.protocol.plans import payload_hash

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Spilled:
    """A contribution on the disk."""

    chunk: int
    hash: bytes
    num_bytes: int
    path: Path
    is_dropped: bool = False
    """Its sync is over, or it is in the way of a newer attempt. Set before its file is removed."""

    def read(self) -> bytes:
        """In a thread. Raises StaleError if it was dropped meanwhile, HostError for the disk, also for other bytes than
        were written."""
        try:
            with self.path.open("rb") as file:
                data = file.read(self.num_bytes + 1)
        except OSError as error:
            if self.is_dropped:
                raise StaleError(f"the file of chunk {self.chunk} was dropped while it was read") from None
            raise disk_error(error, self.path) from error
        if payload_hash(data) != self.hash:
            raise HostError(f"{self.path}: what was written there has changed on this disk; look after it")
        return data


class Spill:
    """Of one node, for all its syncs."""

    def __init__(self, folder: Path, memory_limit_bytes: int = 0, disk: Disk = REAL_DISK) -> None:
        """Removes what an earlier start left in `folder`. Raises HostError."""
        self.folder = folder
        self._disk = disk
        self.memory_limit_bytes = memory_limit_bytes
        self.memory_bytes = 0
        """Of contributions that are kept in memory."""
        self.disk_bytes = 0
        """Of files that are written and not removed yet."""
        self._has_told = False
        self._lock = threading.Lock()  # around these three
        self._numbers = itertools.count()
        self.clear()
        try:
            make_folder(folder)
            if left := next(folder.iterdir(), None):
                raise HostError(f"{left}: an earlier start left it, and it cannot be removed; remove {folder}")
        except OSError as error:
            raise disk_error(error, folder) from error

    def clear(self) -> None:
        """In a thread: all of it goes, as far as possible."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def free_bytes(self) -> int:
        """Raises HostError."""
        return self._disk.free_bytes(self.folder)

    def keep(self, item: Encoded) -> Encoded | Spilled:
        """In a thread: the item, if there is room in memory; else a file has it. Raises HostError, and leaves no file
        then."""
        with self._lock:
            if self.memory_bytes + item.num_bytes <= self.memory_limit_bytes:
                self.memory_bytes += item.num_bytes
                return item
            is_first, self._has_told = not self._has_told, True
        if is_first:
            log.info("what a reducer holds beyond %d bytes in memory is in %s", self.memory_limit_bytes, self.folder)
        path = self.folder / str(next(self._numbers))
        self._disk.write_whole(path, item.data)
        with self._lock:
            self.disk_bytes += item.num_bytes
        return Spilled(item.chunk, item.hash, item.num_bytes, path)

    def release(self, item: Encoded | Spilled) -> None:
        """In a thread: it is not wanted any more."""
        if isinstance(item, Spilled):
            item.is_dropped = True
            try:
                item.path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s: %s; the next start removes it", item.path, error.strerror)
                return
        with self._lock:
            if isinstance(item, Spilled):
                self.disk_bytes -= item.num_bytes
            else:
                self.memory_bytes -= item.num_bytes
