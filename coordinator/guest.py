"""One connection through the front door: from its first byte on, what either side says goes to the other.

Plain sockets and one buffer for all, as every message of every site comes this way.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from atoll.coordinator import limits
from atoll.coordinator.door_counts import Turned

TLS_HANDSHAKE = b"\x16"
"""The first byte of whoever speaks TLS."""
LEAST_FLIGHT_BYTES = 256
"""Of what a server says in TLS 1.3 before the client shows a certificate; to ask for another ClientHello it says
less."""
MOST_ALERT_BYTES = 63
"""Of what it says to a client that it does not know. To another one it says more: settings of HTTP/2."""
_BUFFER = memoryview(bytearray(limits.BUFFERED_BYTES))
"""Of the one that reads just now."""


class Guest:
    """Until `abort`, or until both sides have ended; `gone` hears of that, with what was wrong with it.

    It `waits` once it has begun to speak TLS, and does not go on before `enter`. When it gets `through` its handshake,
    the run's root has signed its certificate; whose it is, is not known yet. `own_name`: of the connection to
    `behind`, both names of abstract Unix sockets."""

    def __init__(
        self,
        accepted: socket.socket,
        *,
        address: str,
        own_name: str,
        behind: str,
        waits: Callable[[], None],
        through: Callable[[], None],
        gone: Callable[[Turned | None], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.address = address
        self._own_name, self._behind = own_name, behind
        self._waits, self._through, self._gone = waits, through, gone
        self._num_said_behind = 0  # bytes, since the client spoke last
        self._has_answered = False  # to the server's first flight
        self._is_through = False
        self._is_over = False
        self._sockets = [accepted]
        self._num_ended = 0  # of its two ways
        # Whoever says nothing has no buffer, and nothing behind the door.
        self._loop.add_reader(accepted, self._first_byte, accepted)

    def _first_byte(self, accepted: socket.socket) -> None:
        try:
            first = accepted.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        if first == TLS_HANDSHAKE:
            self._loop.remove_reader(accepted)
            self._waits()
        else:
            self.abort(Turned.NO_TLS if first else None)

    def enter(self) -> None:
        accepted = self._sockets[0]
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._sockets.append(inner)
        try:
            inner.bind(f"\0{self._own_name}")
            inner.connect(f"\0{self._behind}")  # at once, or too many wait to be taken there
        except OSError:
            self.abort(Turned.FULL)
            return
        self._loop.add_reader(accepted, _Way(self, accepted, inner, self._outside_says).read)
        self._loop.add_reader(inner, _Way(self, inner, accepted, self._behind_says).read)

    def _outside_says(self, num_bytes: int) -> None:
        self._has_answered |= self._num_said_behind >= LEAST_FLIGHT_BYTES
        self._num_said_behind = 0

    def _behind_says(self, num_bytes: int) -> None:
        self._num_said_behind += num_bytes
        if self._has_answered and not self._is_through and self._num_said_behind > MOST_ALERT_BYTES:
            self._is_through = True
            self._through()

    def way_ended(self) -> None:
        """What the other side still says gets through, for a while."""
        self._num_ended += 1
        if self._num_ended == 2:
            self.abort()
        elif not self._is_over:
            self._loop.call_later(limits.LAST_BYTES_S, self.abort)

    def abort(self, why: Turned | None = None) -> None:
        """A second call does nothing."""
        if self._is_over:
            return
        self._is_over = True
        for found in self._sockets:
            self._loop.remove_reader(found)
            self._loop.remove_writer(found)
            found.close()
        self._gone(why)


class _Way:
    """What one of the two sockets says, written to the other one."""

    def __init__(self, guest: Guest, source: socket.socket, target: socket.socket, says: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._guest = guest
        self._source, self._target = source, target
        self._says = says
        self._left = b""  # to be written before more is read

    def read(self) -> None:
        try:
            num_bytes = self._source.recv_into(_BUFFER)
        except BlockingIOError:
            return
        except OSError:
            num_bytes = 0
        if num_bytes:
            self._says(num_bytes)
            self._write(_BUFFER[:num_bytes])
            return
        self._loop.remove_reader(self._source)
        try:
            self._target.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has gone
        self._guest.way_ended()

    def _write(self, data: memoryview) -> None:
        try:
            num_sent = self._target.send(data)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            self._guest.abort()
            return
        if num_sent < len(data):
            if not self._left:
                self._loop.remove_reader(self._source)
                self._loop.add_writer(self._target, self._go_on)
            self._left = bytes(data[num_sent:])
        elif self._left:
            self._left = b""
            self._loop.remove_writer(self._target)
            self._loop.add_reader(self._source, self.read)

    def _go_on(self) -> None:
        self._write(memoryview(self._left))
