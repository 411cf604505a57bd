"""Connections of a listening socket, taken at a pace. Those beyond the pace of all addresses stay in the kernel's
queue. Those beyond that of their address are closed before anything is made for them; of an address that goes on all
the same the kernel drops the next ones, so that others do not stand behind it in the queue."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable

from atoll.protocol.addresses import source_of
from atoll.protocol.shut_out import shut_out

BACKLOG = 1024
ACCEPTED_AT_ONCE = 64
LOOK_EVERY_S = 0.25
"""For addresses that may come again, and while no connection is taken."""
MAX_TURNED_AWAY = 64
"""Of one address, between two looks: after that the kernel is asked to drop what it sends to open another one."""
SHUT_S = 5.0
MAX_SHUT = 64
"""Addresses, of which the kernel is asked."""


class Accepting:
    """Lives in one event loop, from when it is made to `close`."""

    def __init__(
        self,
        listening: socket.socket,
        take: Callable[[socket.socket, str], bool],
        may_come: Callable[[], bool],
        log: logging.Logger,
    ) -> None:
        """`take` gets a connection and its address; False: it is closed, as that address opens too many. `may_come`,
        after each: whether others may be taken now."""
        self._listening = listening
        self._take = take
        self._may_come = may_come
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._too_fast: Counter[str] = Counter()  # by address, since the last look
        self._shut: dict[str, float] = {}  # until when
        self._timer: asyncio.TimerHandle | None = None  # where there is something to look for
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._listening)
        self._listening.close()
        if self._timer is not None:
            self._timer.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:
                self._log.warning("no connection is taken for a moment: %s", error.strerror)
                break
            if not self._take(accepted, address[0]):
                self._hurry(source_of(address[0]))
            if not self._may_come():
                break
        else:
            return  # others have their turn
        self._loop.remove_reader(self._listening)  # until `_look`
        self._look_later()

    def _hurry(self, source: str) -> None:
        self._too_fast[source] += 1
        is_flood = self._too_fast[source] > MAX_TURNED_AWAY and source not in self._shut
        if is_flood and len(self._shut) < MAX_SHUT:
            self._shut[source] = self._loop.time() + SHUT_S
            self._log.warning("%s opens connections too fast: its next ones are dropped for %g s", source, SHUT_S)
            self._shut_out()
        self._look_later()

    def _shut_out(self) -> None:
        try:
            shut_out(self._listening, tuple(self._shut))
        except OSError as error:
            self._log.warning("the kernel drops nobody's connections: %s", error.strerror)

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        """Who may come again."""
        self._timer = None
        self._loop.add_reader(self._listening, self._accept)
        self._too_fast.clear()
        again = [source for source, until_s in self._shut.items() if until_s <= self._loop.time()]
        for source in again:
            del self._shut[source]
        if again:
            self._shut_out()
        if self._shut:
            self._look_later()
