"""What the codec has lost of the averages that this site made: added, times beta, to its next average of the chunk.

    a = average + beta * e        payload = encode(a)        e' = a - decode(payload)

`e` is the error that the average before has left; none at first. (Two-sided error feedback, arXiv 2102.02888, section
3.) An error is of one attempt. It counts in the next sync of the chunk if that attempt became the last commit that
touched it; else another site has averaged it since, or the run has gone back. Errors live as long as the node.
docs/decisions/0049-errors-of-averages.md says why.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.dataplane.payload_log import AttemptLog
from atoll.node.exchange.peers.errors_given import Given
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.sync.audited_errors import AuditedErrors
from atoll.node.exchange.sync.retained import free
from atoll.node.exchange.sync.spill import Spill, Spilled
from atoll.protocol.codecs.arithmetic import NOTHING, Floats
from atoll.protocol.errors import HostError, StateError
from atoll.protocol.plans import payload_hash

log = logging.getLogger("atoll.node")


def _read(item: Encoded | Spilled) -> bytes:
    """Raises HostError."""
    return item.read() if isinstance(item, Spilled) else item.data


@dataclass(eq=False)
class AverageErrors:
    """Of one node, for all its syncs. `of` and `keep` are called in threads."""

    pool: Executor
    spill: Spill | None = None
    """Of errors alone. Without one all stays in memory."""
    audited: AuditedErrors | None = None
    """In a run with audits."""
    num_dropped: int = 0
    """Errors of chunks that counted, and were not followed by one of a later commit."""
    num_bytes: int = 0
    _kept: dict[AttemptKey, dict[int, Encoded | Spilled]] = field(default_factory=dict)
    _counting: set[AttemptKey] = field(default_factory=set)
    """Of those kept, the attempts that are the last commit of some fragment."""
    _said_of: deque[AttemptKey] = field(default_factory=partial(deque, maxlen=64))
    """The last attempts for whose errors there was no room."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, chunk: int, attempt: AttemptKey | None) -> Floats:
        """What that attempt has left of the chunk, if it was averaged here; else nothing, and nothing of what the disk
        does not give back, which is said."""
        with self._lock:
            found = self._kept.get(attempt, {}).get(chunk) if attempt is not None else None
        if found is None:
            return NOTHING
        try:
            data = _read(found)
        except HostError as error:
            log.warning("error feedback of averages: the error of chunk %d is dropped: %s", chunk, error)
            return NOTHING
        return np.frombuffer(data, np.float32)

    def added(self, attempt: AttemptKey, chunk: int) -> Given:
        """For an auditor: what was added to that average, which this site has signed. Raises StateError if that is not
        here any more, HostError for the disk."""
        if self.audited is None:
            raise StateError("nobody audits in this run what reducers add")
        earlier, error = self.audited.earlier(attempt, chunk), b""
        if earlier is not None:
            with self._lock:
                found = self._kept.get(earlier, {}).get(chunk)
            if (found := found or self.audited.past(earlier, chunk)) is None:
                raise StateError(f"the error that was added to chunk {chunk} in sync {attempt.sync} is gone")
            error = _read(found)
        return self.audited.given(attempt, chunk, error)

    def keep(self, attempt: AttemptKey, chunk: int, left: Floats) -> None:
        """In place of that of earlier attempts at the sync, which become no commit any more. Without room for it on
        the disk the next average has no error, and that is said."""
        data = left.tobytes()
        encoded = Encoded(chunk, data, payload_hash(data))
        try:
            item = encoded if self.spill is None else self.spill.keep(encoded)
        except HostError as error:
            if attempt not in self._said_of:  # once for all its chunks: the log may be on that disk
                self._said_of.append(attempt)
                log.warning("error feedback of averages: there is no room for the error of chunk %d: %s", chunk, error)
            return
        with self._lock:
            before = [k for key, k in self._kept.items() if chunk in k and key.sync == attempt.sync and key <= attempt]
            void = [kept.pop(chunk) for kept in before]
            self._kept.setdefault(attempt, {})[chunk] = item
            self.num_bytes += item.num_bytes - sum(old.num_bytes for old in void)
        self._free(void)

    def forget_void(self, payloads: AttemptLog, in_flight: Collection[int]) -> None:
        """A thread forgets what is neither the last commit of some fragment nor of a sync in flight: `in_flight` is
        looked at there."""
        if self._kept:
            with suppress(RuntimeError):  # the pool is closed, and all of the spill's folder goes
                self.pool.submit(self._forget_void, payloads, in_flight)

    def _forget_void(self, payloads: AttemptLog, in_flight: Collection[int]) -> None:
        with self._lock:
            under_way = set(in_flight)  # first: what is over by now and was committed is in force below
            in_force = payloads.attempts_in_force()
            over = [key for key in self._kept if key not in in_force and key.sync not in under_way]
            void = {key: self._kept.pop(key) for key in over}
            renewed = {chunk for key in in_force for chunk in self._kept.get(key, ())}
            lost = {chunk for key, items in void.items() if key in self._counting for chunk in items} - renewed
            self._counting = in_force.intersection(self._kept)
            self.num_dropped += len(lost)
            items = [item for kept in void.values() for item in kept.values()]
            if self.audited is not None:
                newest = max((key.sync for key in in_force), default=0)
                items = self.audited.expired(void, self._kept.keys(), newest)
            self.num_bytes -= sum(item.num_bytes for item in items)
        self._free(items)
        if lost:
            text = "their last average was made by another site, or is void"
            log.info("error feedback of averages: the errors of %d chunks are dropped; %s", len(lost), text)

    def _free(self, items: list[Encoded | Spilled]) -> None:
        free(items, self.pool, None if self.spill is None else self.spill.release)
