"""What the codec has lost of the averages that this site made: added, times beta, to its next average of the chunk.

    a = average + beta * e        payload = encode(a)        e' = a - decode(payload)

(Two-sided error feedback, arXiv 2102.02888, section 3.) An error is of one attempt. It counts in the next sync of the
chunk if that attempt became the last commit that touched it; else another site has averaged it since, or the run has
gone back. Errors live as long as the node. docs/decisions/0049-errors-of-averages.md says why.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.sync.retained import free
from atoll.node.exchange.sync.spill import Spill, Spilled
from atoll.protocol.codecs.arithmetic import NOTHING, Floats
from atoll.protocol.plans import payload_hash

log = logging.getLogger("atoll.node")


@dataclass(eq=False)
class AverageErrors:
    """Of one node, for all its syncs. `keep` and `of` are called in threads."""

    pool: Executor
    spill: Spill | None = None
    """Without one all stays in memory."""
    num_dropped: int = 0
    """Errors of chunks that counted, and that another site's average, or a rollback, has made void."""
    _kept: dict[AttemptKey, dict[int, Encoded | Spilled]] = field(default_factory=dict)
    _counting: set[AttemptKey] = field(default_factory=set)
    """Of those kept, the attempts that became commits."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, chunk: int, attempt: AttemptKey | None) -> Floats:
        """What that attempt has left of the chunk, if it was averaged here; else nothing. Raises HostError for the
        disk."""
        with self._lock:
            found = self._kept.get(attempt, {}).get(chunk) if attempt is not None else None
        if found is None:
            return NOTHING
        return np.frombuffer(found.read() if isinstance(found, Spilled) else found.data, np.float32)

    def keep(self, attempt: AttemptKey, chunk: int, left: Floats) -> None:
        """Raises HostError for the disk."""
        data = left.tobytes()
        encoded = Encoded(chunk, data, payload_hash(data))
        item = encoded if self.spill is None else self.spill.keep(encoded)
        with self._lock:
            before = self._kept.setdefault(attempt, {}).get(chunk)
            self._kept[attempt][chunk] = item
        self._free([] if before is None else [before])

    def forget_void(self, payloads: PayloadLog, over: int) -> None:
        """A thread forgets, of that sync and of commits before it, what is not the last commit of some fragment."""
        with suppress(RuntimeError):  # the pool is closed, and all of the spill's folder goes
            self.pool.submit(self._forget_void, payloads, over)

    def _forget_void(self, payloads: PayloadLog, over: int) -> None:
        in_force = payloads.attempts_in_force()
        with self._lock:
            keys = [key for key in self._kept if key not in in_force and (key.sync == over or key in self._counting)]
            void = {key: self._kept.pop(key) for key in keys}
            renewed = {chunk for key in in_force for chunk in self._kept.get(key, ())}
            lost = {chunk for key, items in void.items() if key in self._counting for chunk in items} - renewed
            self._counting = in_force.intersection(self._kept)
            self.num_dropped += len(lost)
        for items in void.values():
            self._free(list(items.values()))
        if lost:
            log.info("error feedback of averages: of %d chunks it is dropped: another site averages them", len(lost))

    def _free(self, items: list[Encoded | Spilled]) -> None:
        free(items, self.pool, None if self.spill is None else self.spill.release)
