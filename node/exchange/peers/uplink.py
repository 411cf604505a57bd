"""Who sends from this site: an exchange goes before those that catch up, so that a joiner does not delay a sync.

While an exchange is in flight, one frame at a time goes to those that catch up. While it sends, that frame also waits
until the exchange has sent `EXCHANGE_BYTES_PER_DONOR_BYTE` times as much as the frames before it. No frame waits for
longer than its limit: whoever catches up takes a donor that gives nothing for a stalled one. A frame that takes long to
write waits for its receiver and no longer has this site's link: others may go.

Where the owner gives a part of the link alone, all frames wait for that cap too, in the order of asking. Of frames to
sites that catch up one at a time waits there. So at a small cap an exchange that sends has at least every second frame,
however many sites catch up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

from atoll.node.exchange.peers.upload_cap import UploadCap

EXCHANGE_BYTES_PER_DONOR_BYTE = 8
"""So catching up takes at most a ninth of the link from a sync that is sending."""
MAX_CREDIT_BYTES = 1 << 20
"""What those that catch up did not use is not theirs for ever; it does not make a burst of many frames."""

SLOW_IF_LIMITS = 1 / 8
"""A frame is slow when it is being written for this part of its limit."""


class Uplink:
    """Lives in one event loop."""

    def __init__(self) -> None:
        self.num_given = 0
        """Frames to those that catch up that are being written now, and are not slow."""
        self._num_exchanges = 0
        self._num_sending = 0
        self._credit_bytes = 0  # negative: the exchange has to send first
        self.waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self.cap: UploadCap | None = None
        self._cap_turn = asyncio.Lock()
        self._place_at_cap = asyncio.Lock()  # for those that catch up

    async def within_cap(self, num_bytes: int) -> None:
        """Returns when a frame of so many bytes may be sent, if it were alone on the link."""
        if (cap := self.cap) is None:
            return
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        async with self._cap_turn:
            await asyncio.sleep(cap.delay_s(loop.time()))
            cap.send(num_bytes, loop.time())
        cap.waited_s += loop.time() - asked_at

    def charge(self, num_bytes: int) -> None:
        """Of a small message that waits for nothing: frames do, until what is given has made up for it."""
        if self.cap is not None:
            self.cap.send(num_bytes, asyncio.get_running_loop().time())

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """An exchange is in flight here, or payloads of it may still be asked for."""
        self._num_exchanges += 1
        try:
            yield
        finally:
            self._num_exchanges -= 1
            self._grant()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Of an exchange: it has something to send now, and would have the whole link."""
        self._num_sending += 1
        try:
            yield
        finally:
            self._num_sending -= 1
            self._grant()

    def sent(self, num_bytes: int) -> None:
        """By an exchange."""
        self._credit_bytes = min(self._credit_bytes + num_bytes // EXCHANGE_BYTES_PER_DONOR_BYTE, MAX_CREDIT_BYTES)
        self._grant()

    @asynccontextmanager
    async def give(self, num_bytes: int, limit_s: float) -> AsyncGenerator[None]:
        """Around the writing of one frame to somebody who catches up, within the cap."""
        await self._turn(num_bytes, limit_s)
        with ExitStack() as has_link:
            has_link.callback(self._end)
            async with self._place_at_cap:
                await self.within_cap(num_bytes)
            slow = asyncio.get_running_loop().call_later(SLOW_IF_LIMITS * limit_s, has_link.close)
            try:
                yield
            finally:
                slow.cancel()

    async def _turn(self, num_bytes: int, limit_s: float) -> None:
        if not self.waiting and self._may_give():
            self._begin(num_bytes)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (turn, num_bytes)
        self.waiting.append(place)
        try:
            async with asyncio.timeout(limit_s):
                await turn
        except TimeoutError:
            if not _is_granted(turn):
                self._begin(num_bytes)
        except asyncio.CancelledError:
            if _is_granted(turn):
                self._end()
            raise
        finally:
            if place in self.waiting:
                self.waiting.remove(place)

    def _may_give(self) -> bool:
        if not self._num_exchanges:
            return True
        return self.num_given == 0 and (not self._num_sending or self._credit_bytes >= 0)

    def _begin(self, num_bytes: int) -> None:
        self.num_given += 1
        if self._num_sending:
            self._credit_bytes = max(self._credit_bytes - num_bytes, -num_bytes)  # no debts of several frames

    def _end(self) -> None:
        self.num_given -= 1
        self._grant()

    def _grant(self) -> None:
        """In the order of asking."""
        while self.waiting and self._may_give():
            turn, num_bytes = self.waiting.popleft()
            if not turn.cancelled():  # else it gives up, or goes without a turn
                self._begin(num_bytes)
                turn.set_result(None)


def _is_granted(turn: asyncio.Future[None]) -> bool:
    return turn.done() and not turn.cancelled()
