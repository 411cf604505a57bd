"""The site's journal: one JSON object a line, for losses and events. In the file as soon as it is written."""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.node.daemon.site_log import PrivateFiles
from atoll.protocol.disk import disk_error

MAX_JOURNAL_BYTES = 16 << 20


class _Lines(PrivateFiles):
    def handleError(self, record: logging.LogRecord) -> None:
        del record
        raise  # noqa: PLE0704 it is called where one is handled


class Journal:
    """Appends to `path`. A file of `max_bytes` becomes `path` with `.1`, in the place of the one before: a run of any
    length has at most two. Raises HostError."""

    def __init__(self, path: Path, max_bytes: int = MAX_JOURNAL_BYTES) -> None:
        try:
            self._lines = _Lines(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")
        except OSError as error:
            raise disk_error(error, path) from error

    def write(self, kind: str, **values: Any) -> None:
        """`time_s` is this machine's own wall clock; it is not compared with others."""
        text = json.dumps({"time_s": round(time.time(), 4), "kind": kind, **values}, allow_nan=False)
        try:
            self._lines.emit(logging.makeLogRecord({"msg": text}))
        except OSError as error:
            raise disk_error(error, Path(self._lines.baseFilename), len(text)) from error

    def close(self) -> None:
        with suppress(OSError):  # of lines that `write` has failed for
            self._lines.close()
