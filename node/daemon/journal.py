"""The site's journal: one JSON object a line, for losses and events. Append only, flushed line by line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Journal:
    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def write(self, kind: str, **values: Any) -> None:
        """`time_s` is this machine's own wall clock; it is not compared with others."""
        line = {"time_s": round(time.time(), 4), "kind": kind, **values}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()
