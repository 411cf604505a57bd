"""The site's one log file, bounded in size; the output of ranks is in it with their prefix."""

from __future__ import annotations

import logging
import logging.handlers
from pathlib import Path

from atoll.protocol.errors import HostError
from atoll.protocol.text import CleanFormatter

MAX_LOG_BYTES = 16 << 20
NUM_OLD_LOGS = 3
OUTPUT_LOGGER = "atoll.workers"
"""Lines of ranks, `[rank 0] ...`, at INFO."""


def site_log_handler(path: Path, max_bytes: int = MAX_LOG_BYTES) -> logging.Handler:
    """A handler that writes `path` and keeps up to three older files beside it. Raises HostError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=max_bytes, backupCount=NUM_OLD_LOGS, encoding="utf-8", errors="replace"
        )
    except OSError as error:
        raise HostError(f"log file {path}: {error.strerror}") from None
    handler.setFormatter(CleanFormatter("%(asctime)s %(levelname).1s %(message)s"))
    return handler
