"""The payloads of one attempt that this site has collected in its log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.node.dataplane.payload_file import PayloadFile
from atoll.node.dataplane.payload_log import AttemptLog
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.sync.attempt import Attempt
from atoll.protocol.errors import StaleError
from atoll.protocol.messages import Plan


@dataclass(eq=False)
class Collection:
    attempt: Attempt
    log: AttemptLog
    changed: Callable[[], None]
    """Called in the event loop when more are there."""
    file: PayloadFile = field(init=False)
    """From `begin` on."""
    _stored: set[int] = field(default_factory=set, init=False)
    _order: list[int] = field(default_factory=list, init=False)  # in which they were stored, once it is open
    _is_open: bool = field(default=False, init=False)
    _early: list[int] = field(default_factory=list, init=False)  # noted before it was open
    _arrived: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def begin(self) -> None:
        """In a thread: what an earlier run of this attempt left in the log is there again.

        Raises StaleError, and leaves nothing in the log, if the attempt was cancelled before its turn came."""
        plan = self.attempt.plan
        self.file = self.log.begin(
            plan.sync, plan.term, plan.attempt, plan.fragment, is_over=self.attempt.finished.cancelled
        )
        self._stored = set(self.attempt.data.chunks).difference(self.file.missing())

    def open(self) -> None:
        """It has begun."""
        self._stored.update(self._early)
        self._order, self._is_open = sorted(self._stored), True
        self._arrived.set()

    def close(self) -> None:
        """The attempt is over: nobody waits for payloads of it any more."""
        self._arrived.set()

    async def arrived(self, num_seen: int, *, or_open: bool = False) -> list[int]:
        """Chunks whose payloads are here, in the order in which they came, but for those that were seen already; at
        least one, or as soon as it has begun. Raises StaleError when the attempt is over."""
        while len(self._order) <= num_seen and not (or_open and self._is_open):
            if self.attempt.closed is not None:
                raise StaleError(f"{self.attempt.where} is over here: {self.attempt.closed}")
            self._arrived.clear()
            await self._arrived.wait()
        return self._order[num_seen:]

    @property
    def is_complete(self) -> bool:
        return len(self._stored) == len(self.attempt.data.chunks)

    def has(self, chunk: int) -> bool:
        return chunk in self._stored

    def num_missing(self, chunks: frozenset[int]) -> int:
        """In a thread: of these payloads."""
        return len(chunks - self._stored) if self._stored else len(chunks)

    async def store(self, items: list[Encoded]) -> int:
        """Payloads of another reducer; how many were missing. Raises DigestMismatch, InvalidMessage."""
        fresh = [item for item in items if item.chunk not in self._stored]

        def work() -> None:
            attempt = self.attempt
            check, number, place = attempt.data.check_payload, attempt.num_contributors, attempt.place
            attempt.verify(fresh, lambda chunk, data: check(chunk, data, number, place))
            for item in fresh:
                self.file.put(item.chunk, item.data, item.hash)

        await self.attempt.in_pool(work)
        return self.note([item.chunk for item in fresh])

    def note(self, chunks: list[int]) -> int:
        """Their payloads are in the file; how many were missing."""
        if not self._is_open:
            self._early += chunks  # what `begin` finds in its thread may be of before
            return 0
        fresh = [chunk for chunk in dict.fromkeys(chunks) if chunk not in self._stored]
        self._stored.update(fresh)
        self._order += fresh
        self._arrived.set()
        self.changed()
        return len(fresh)

    def seal(self, plan: Plan) -> bytes:
        """In a thread: all payloads stay; their digest in `plan`."""
        self.file.seal()
        return self.file.digest(plan)
