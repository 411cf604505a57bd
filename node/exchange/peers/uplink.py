"""Who sends from this site: an exchange goes before those that catch up, so that a joiner does not delay a sync.

While an exchange is in flight, one frame at a time goes to those that catch up. While it sends, that frame also waits
until the exchange has sent `EXCHANGE_BYTES_PER_DONOR_BYTE` times as much as the frames before it. No frame waits for
longer than its limit: whoever catches up takes a donor that gives nothing for a stalled one. A frame that takes long to
write waits for its receiver and no longer has this site's link: others may go.

Where the owner gives a part of the link alone, all frames wait for that cap too, in the order of asking: of those of
exchanges as many at a time as are one large frame, and as many of those to sites that catch up, which are small then
(`DonorServer`). So at a small cap an exchange that sends has half of it or more, and each request that a donor serves
sees bytes before its site takes this one for stalled, however many streams exchanges have.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

from atoll.node.exchange.peers.frames import FRAME_BYTES
from atoll.node.exchange.peers.upload_cap import UploadCap

EXCHANGE_BYTES_PER_DONOR_BYTE = 8
"""So catching up takes at most a ninth of the link from a sync that is sending."""
MAX_CREDIT_BYTES = 1 << 20
"""What those that catch up did not use is not theirs for ever; it does not make a burst of many frames."""

SLOW_IF_LIMITS = 1 / 8
"""A frame is slow when it is being written for this part of its limit."""


class _Room:
    """At the cap, for frames of exchanges or for those to sites that catch up: as many bytes as one large frame."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._entry = asyncio.Lock()
        self._left = asyncio.Event()

    @asynccontextmanager
    async def place(self, num_bytes: int) -> AsyncGenerator[None]:
        """In the order of asking."""
        async with self._entry:
            while self._num_bytes and self._num_bytes + num_bytes > FRAME_BYTES:
                self._left.clear()
                await self._left.wait()
            self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes
            self._left.set()


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
        self._exchanges_at_cap, self._donors_at_cap = _Room(), _Room()

    async def within_cap(self, num_bytes: int) -> None:
        """By an exchange; returns when a frame of so many bytes may be sent, if it were alone on the link."""
        await self._pass_cap(self._exchanges_at_cap, num_bytes)

    async def _pass_cap(self, room: _Room, num_bytes: int) -> None:
        if (cap := self.cap) is None:
            return
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        async with room.place(num_bytes), self._cap_turn:
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
            await self._pass_cap(self._donors_at_cap, num_bytes)
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
