"""The site's one log file, bounded in size; the output of ranks is in it with their prefix."""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from io import TextIOWrapper
from pathlib import Path

from atoll.node.daemon.config import NodeConfig
from atoll.protocol.disk import PRIVATE_FILE, make_folder
from atoll.protocol.errors import HostError
from atoll.protocol.text import CleanFormatter, JsonFormatter

MAX_LOG_BYTES = 16 << 20
NUM_OLD_LOGS = 3
OUTPUT_LOGGER = "atoll.workers"
"""Lines of ranks, `[rank 0] ...`, at INFO."""


class PrivateFiles(logging.handlers.RotatingFileHandler):
    """Bounded: the older ones are beside it, under numbers. A script prints into them what is for its owner only."""

    def _open(self) -> TextIOWrapper:
        file = super()._open()
        os.fchmod(file.fileno(), PRIVATE_FILE)
        return file


def site_log_handler(path: Path, max_bytes: int = MAX_LOG_BYTES) -> logging.Handler:
    """A handler that writes `path` and keeps up to three older files beside it. Raises HostError."""
    try:
        make_folder(path.parent)
        handler = PrivateFiles(path, maxBytes=max_bytes, backupCount=NUM_OLD_LOGS, encoding="utf-8", errors="replace")
    except OSError as error:
        raise HostError(f"log file {path}: {error.strerror}") from None
    return handler


class NewestSync:
    """Of the node, once there is one: lines of the log say it."""

    def __init__(self) -> None:
        self.of_node: Callable[[], int] = lambda: 0

    def sync(self) -> int:
        """0: none yet."""
        return self.of_node()

    def in_words(self, run_id: str, site: str) -> logging.Formatter:
        """Lines of the log as text: whose they are, and of which sync."""
        return CleanFormatter(f"%(asctime)s %(levelname).1s {run_id} {site} %(sync)s %(message)s", self.sync)


def log_to(folder: Path, stack: AsyncExitStack, config: NodeConfig, run_id: str) -> NewestSync:
    """Everything to the site's log file, and what the node itself says to the terminal too."""
    root = logging.getLogger()
    handlers = [site_log_handler(folder / "node.log"), logging.StreamHandler(sys.stderr)]
    newest = NewestSync()
    if config.log_format == "json":
        for handler in handlers:
            handler.setFormatter(JsonFormatter(newest.sync, run=run_id, site=config.name))
    else:
        handlers[0].setFormatter(newest.in_words(run_id, config.name))
        handlers[1].setFormatter(CleanFormatter("%(message)s"))
    handlers[1].addFilter(lambda record: record.name != OUTPUT_LOGGER)
    stack.callback(root.setLevel, root.level)
    root.setLevel(logging.DEBUG if config.debug else logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
        stack.callback(handler.close)
        stack.callback(root.removeHandler, handler)
    return newest
