"""SIGINT and SIGTERM of a process with an event loop and threads that no signal stops.

The first asks for a clean end. Each later one ends the process within a limit, whatever its threads are at: a thread in
an fsync on a stuck disk can be neither cancelled nor waited for. What is on the disk must be whole at any instruction.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from atoll.protocol.exit_codes import ENDED_AT_ONCE

FLUSH_S = 1.0
"""How long the last lines of logs may take."""
_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Made in the main thread, in the loop; `close` puts back what was there, unless a signal was heard.

    Handlers of Python, not of the loop: they are heard while the loop is blocked, or closed, and threads are joined.
    Each signal also wakes the loop: the kernel may give it to any thread, and the main one would hear of it much later.
    """

    def __init__(self, first: Callable[[str], None], again: Callable[[str], None], limit_s: float) -> None:
        """`first` and `again` are called in the loop with the signal's name, and may be replaced. The process ends
        `limit_s` after `again`, if it has not by then."""
        self.first = first
        self.again = again
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self.num_heard = 0
        self._before = {number: signal.signal(number, self._heard) for number in _NUMBERS}
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        self._loop.add_reader(self._woken, self._woken.recv, 4096)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        """After a signal the next one is heard still: asyncio's own handler would take it for the first, and the end of
        the loop waits for threads."""
        if self.num_heard:
            self.again = lambda _: end_process(ENDED_AT_ONCE)
            return
        signal.set_wakeup_fd(-1)
        self._loop.remove_reader(self._woken)
        self._woken.close()
        self._wakes.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.num_heard += 1
        if self._loop.is_closed():
            end_process(ENDED_AT_ONCE)
        elif self.num_heard == 1:
            self._loop.call_soon_threadsafe(self.first, name)
        else:
            if self.num_heard == 2:
                threading.Thread(target=self._end_in_time, daemon=True).start()
            self._loop.call_soon_threadsafe(self.again, f"{name} again")

    def _end_in_time(self) -> None:
        threading.Event().wait(self._limit_s)
        end_process(ENDED_AT_ONCE)


def end_process(exit_code: int) -> Any:
    """At once: nothing is closed, and no thread is waited for."""
    flushing = threading.Thread(target=_flush, daemon=True)  # the logs may be on the disk that is stuck
    flushing.start()
    flushing.join(FLUSH_S)
    os._exit(exit_code)


def _flush() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
