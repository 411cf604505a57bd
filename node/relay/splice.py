"""Two sockets joined both ways: what one receives the other one sends. The kernel moves the bytes (splice(2)); they
never come into this process.

A direction reads again once all that it read is written, so a slow reader slows the writer, and what waits is bounded.
The end of what one side says is passed on as such, and a reset as a reset.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

ROOM_BYTES = 1 << 18
"""Of the pipe of a direction, if this user may have that much."""
RESET = struct.pack("ii", 1, 0)
DESCRIPTORS = 6
"""Of a splice: two sockets, and a pipe for each direction."""


class Splice:
    """Owns both sockets, which do not block, from its start on. Lives in one event loop."""

    def __init__(
        self,
        one: socket.socket,
        other: socket.socket,
        *,
        moved: Callable[[int], None] = lambda num_bytes: None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`moved` hears of bytes as they are passed on, `ended` once of the end. Raises OSError if there are no
        descriptors, without `ended`; the sockets are closed then."""
        self._sockets = one, other
        self._moved = moved
        self._ended: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self.moved_at = self._loop.time()
        self._directions: list[_Direction] = []
        self.is_open = True
        try:
            for source, sink in ((one, other), (other, one)):
                if source.family != socket.AF_UNIX:
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._directions.append(_Direction(self, source, sink))
        except OSError:
            self.abort()
            raise
        self._ended = ended
        for direction in self._directions:
            direction.start()

    def abort(self) -> None:
        """Both sides see a reset."""
        for connection in self._sockets:
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._close()

    def moved(self, num_bytes: int) -> None:
        self.moved_at = self._loop.time()
        self._moved(num_bytes)

    def direction_ended(self) -> None:
        if all(direction.is_over for direction in self._directions):
            self._close()

    def _close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        for direction in self._directions:
            direction.close()
        for connection in self._sockets:
            connection.close()
        self._ended()


class _Direction:
    def __init__(self, splice: Splice, source: socket.socket, sink: socket.socket) -> None:
        self._splice = splice
        self._source, self._sink = source.fileno(), sink.fileno()
        self._sink_socket = sink
        self._loop = asyncio.get_running_loop()
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # beyond what this user may have: the default of the kernel
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, ROOM_BYTES)
        self._waiting_bytes = 0
        self.is_over = False

    def start(self) -> None:
        self._loop.add_reader(self._source, self._read)

    def close(self) -> None:
        self._loop.remove_reader(self._source)
        self._loop.remove_writer(self._sink)
        os.close(self._out)
        os.close(self._in)

    def _read(self) -> None:
        try:
            num_bytes = os.splice(self._source, self._in, ROOM_BYTES)
            if num_bytes == 0:
                self._loop.remove_reader(self._source)
                self._sink_socket.shutdown(socket.SHUT_WR)
                self.is_over = True
                self._splice.direction_ended()
                return
        except BlockingIOError:
            return
        except OSError:
            self._splice.abort()
            return
        self._waiting_bytes = num_bytes
        if not self._write_some() and self._splice.is_open:
            self._loop.remove_reader(self._source)
            self._loop.add_writer(self._sink, self._write)

    def _write(self) -> None:
        if self._write_some():
            self._loop.remove_writer(self._sink)
            self._loop.add_reader(self._source, self._read)

    def _write_some(self) -> bool:
        """Whether the pipe is empty, and the splice goes on."""
        try:
            while self._waiting_bytes:
                num_bytes = os.splice(self._out, self._sink, self._waiting_bytes)
                self._waiting_bytes -= num_bytes
                self._splice.moved(num_bytes)
                if not self._splice.is_open:
                    return False
        except BlockingIOError:
            return False
        except OSError:
            self._splice.abort()
            return False
        return True
