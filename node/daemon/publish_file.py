"""PUBLISH in a file of the disk, for ranks that read the outer values where they lie (`dataplane/in_place.py`).

It is in memory only as far as something was written there. It has no name, and goes with its last holder.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.local_protocol import table_bytes, values_bytes
from atoll.protocol.disk import Disk, disk_error
from atoll.protocol.layout import Layout


class PublishFile(SharedBuffer):
    """With the table behind the values. Raises HostError if the disk has no room."""

    def __init__(self, layout: Layout, folder: Path, outer_folder: Path, disk: Disk) -> None:
        self.num_bytes, self.name = values_bytes(layout.buffer_bytes) + table_bytes(len(layout.chunks)), "publish"
        path = folder / self.name
        disk.allocate(path, self.num_bytes)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            path.unlink()
            self._map = mmap.mmap(self._fd, self.num_bytes)
            outer_folder.mkdir(mode=0o700, exist_ok=True)
            self._outer_folder = os.open(outer_folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise disk_error(error, path) from error
        self.view = memoryview(self._map)

    @property
    def fds(self) -> tuple[int, ...]:
        """The second one is of the folder of the outer file, by which ranks open it."""
        return (self.fd, self._outer_folder)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._outer_folder)
        super().close()
