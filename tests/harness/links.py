"""Links that spoil what they carry: relays in a thread of their own in front of nodes or the coordinator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.harness.relay import Relay

LIMIT_S = 60.0
LARGE_BYTES = 900
"""Of a read that holds part of a chunk; smaller ones are mostly the transport's own frames."""


@contextmanager
def relays_in_front(targets: Sequence[str], spoil: Callable[[Relay], None]) -> Iterator[list[str]]:
    """The addresses of relays, all in one thread of their own; `spoil` says what each does to what it carries."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    relays = [Relay(target) for target in targets]
    for relay in relays:
        spoil(relay)
        asyncio.run_coroutine_threadsafe(relay.start(), loop).result(LIMIT_S)
    try:
        yield [relay.address for relay in relays]
    finally:
        for relay in relays:
            asyncio.run_coroutine_threadsafe(relay.stop(), loop).result(LIMIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT_S)
        loop.close()


@contextmanager
def relay_in_front(target: str, spoil: Callable[[Relay], None]) -> Iterator[str]:
    """The address of a single one."""
    with relays_in_front([target], spoil) as (address,):
        yield address


class Spoiler:
    """Spoils every n-th read of at least `large_bytes`, at most `limit` times."""

    def __init__(self, *, every: int, limit: int, large_bytes: int = LARGE_BYTES) -> None:
        self.every = every
        self.limit = limit
        self.large_bytes = large_bytes
        self.num_spoiled = 0
        self._num_large = 0

    def __call__(self, relay: Relay) -> None:
        relay.change = self._change

    def _change(self, data: bytes) -> bytes:
        if len(data) < self.large_bytes or self.num_spoiled >= self.limit:
            return data
        self._num_large += 1
        if self._num_large % self.every:
            return data
        self.num_spoiled += 1
        return self.spoil(data)

    def spoil(self, data: bytes) -> bytes:
        raise NotImplementedError


class FlipBit(Spoiler):
    """One bit in the middle."""

    def spoil(self, data: bytes) -> bytes:
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


class CutShort(Spoiler):
    """The second half is lost; what comes next follows as if nothing were missing."""

    def spoil(self, data: bytes) -> bytes:
        return data[: len(data) // 2]
