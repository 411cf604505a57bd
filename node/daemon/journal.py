"""The site's journal: one JSON object a line, for losses and events. In the file as soon as it is written.

Some nine lines are written at each commit, so each is one write and nothing else: a handler of `logging` asks the file
system twice more, a tenth of the event loop's time in a run that commits at every step.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from atoll.protocol.disk import PRIVATE_FILE, disk_error

MAX_JOURNAL_BYTES = 16 << 20


class Journal:
    """Appends to `path`. A file of `max_bytes` becomes `path` with `.1`, in the place of the one before: a run of any
    length has at most two. Raises HostError."""

    def __init__(self, path: Path, max_bytes: int = MAX_JOURNAL_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        try:
            self._open()
        except OSError as error:
            raise disk_error(error, path) from error

    def _open(self) -> None:
        self._file = FileIO(self._path, "a")
        os.fchmod(self._file.fileno(), PRIVATE_FILE)
        self._num_bytes = os.fstat(self._file.fileno()).st_size

    def write(self, kind: str, **values: Any) -> None:
        """`time_s` is this machine's own wall clock; it is not compared with others."""
        text = json.dumps({"time_s": round(time.time(), 4), "kind": kind, **values}, allow_nan=False)
        line = memoryview(f"{text}\n".encode())
        try:
            if self._num_bytes and self._num_bytes + len(line) > self._max_bytes:
                self._file.close()
                os.replace(self._path, f"{self._path}.1")
                self._open()
            while line:  # less than all is written as a disk fills
                num_written = self._file.write(line)
                self._num_bytes += num_written
                line = line[num_written:]
        except OSError as error:
            raise disk_error(error, self._path, len(line)) from error

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()
