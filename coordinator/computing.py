"""What the core wants to have computed, in threads, while other events are handled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from atoll.coordinator.core import events as e
from atoll.coordinator.core.log import evidence
from atoll.coordinator.core.sites import manifests

log = logging.getLogger("atoll.coordinator")


class Computing:
    """Each result is an event for the core. What a computation raises is a fault of this program, after which the core
    would wait for ever: `failed` is told, and `raise_fault` raises it."""

    def __init__(self, hear: Callable[[e.Event], None], failed: Callable[[], None]) -> None:
        self._hear = hear
        self._failed = failed
        self._fault: BaseException | None = None

    def begin(self, wanted: e.ReadManifest | e.Recompute) -> None:
        """One manifest at a time; another sum is of a later dispute."""
        loop = asyncio.get_running_loop()
        if isinstance(wanted, e.ReadManifest):
            loop.run_in_executor(None, manifests.read, wanted).add_done_callback(self._ended)
        else:
            loop.run_in_executor(None, evidence.recompute, wanted).add_done_callback(self._ended)

    def _ended(self, done: asyncio.Future[e.ManifestRead] | asyncio.Future[e.Recomputed]) -> None:
        if done.cancelled():
            return
        if (fault := done.exception()) is not None:
            self._fault = fault
            self._failed()
            return
        found = done.result()
        if isinstance(found, e.ManifestRead) and found.fault is not None:
            log.error("a fault in reading the manifest of a site, which is refused", exc_info=found.fault)
        self._hear(found)

    def raise_fault(self) -> None:
        """If there was one."""
        if self._fault is not None:
            raise self._fault
