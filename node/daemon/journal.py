"""The site's journal: one JSON object a line, for losses and events. In the file as soon as it is written."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from atoll.protocol.disk import PRIVATE_FILE, disk_error

MAX_JOURNAL_BYTES = 16 << 20


class Journal:
    """Appends to `path`. A file of `max_bytes` becomes `path` with `.1`, in the place of the one before: a run of any
    length has at most two. Raises HostError."""

    def __init__(self, path: Path, max_bytes: int = MAX_JOURNAL_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._descriptor = -1
        self._open()

    def write(self, kind: str, **values: Any) -> None:
        """`time_s` is this machine's own wall clock; it is not compared with others."""
        text = json.dumps({"time_s": round(time.time(), 4), "kind": kind, **values}, allow_nan=False)
        line = text.encode() + b"\n"
        try:
            if self._num_bytes and self._num_bytes + len(line) > self._max_bytes:
                os.replace(self._path, self._path.with_name(self._path.name + ".1"))
                os.close(self._descriptor)
                self._open()
            while line:
                written = os.write(self._descriptor, line)
                self._num_bytes += written
                line = line[written:]
        except OSError as error:
            raise disk_error(error, self._path, len(line)) from error

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> None:
        try:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE_FILE)
            os.fchmod(self._descriptor, PRIVATE_FILE)  # an older version's was open to others
            self._num_bytes = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise disk_error(error, self._path) from error
