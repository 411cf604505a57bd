"""One connection through the front door: from its first byte on, what either side says goes to the other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from atoll.coordinator import limits
from atoll.coordinator.door_counts import Turned

TLS_HANDSHAKE = b"\x16"
"""The first byte of whoever speaks TLS."""


class Guest:
    """Until `abort`, or until both sides have ended; `gone` hears of that, with what was wrong with it."""

    def __init__(
        self, accepted: socket.socket, own_name: str, behind: str, gone: Callable[[Turned | None], None]
    ) -> None:
        """`own_name`: of the connection to `behind`, both names of abstract Unix sockets."""
        self._loop = asyncio.get_running_loop()
        self._accepted: socket.socket | None = accepted  # until it has a transport
        self._own_name, self._behind = own_name, behind
        self._gone = gone
        self._is_over = False
        self._entering: asyncio.Task[None] | None = None
        self._ways: tuple[_Way, ...] = ()
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
            self._entering = self._loop.create_task(self._enter(accepted))
        else:
            self.abort(Turned.NO_TLS if first else None)

    async def _enter(self, accepted: socket.socket) -> None:
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            inner.bind(f"\0{self._own_name}")
            inner.connect(f"\0{self._behind}")  # at once, or too many wait to be taken there
        except OSError:
            inner.close()
            self.abort(Turned.FULL)
            return
        inward, outward = self._ways = _Way(self), _Way(self)
        inward.other, outward.other = outward, inward
        await self._loop.connect_accepted_socket(lambda: inward, inner)
        if not self._is_over:  # gRPC says nothing before the client does
            self._accepted = None
            await self._loop.connect_accepted_socket(lambda: outward, accepted)

    def abort(self, why: Turned | None = None) -> None:
        """A second call does nothing."""
        if self._is_over:
            return
        self._is_over = True
        if self._accepted is not None:
            self._loop.remove_reader(self._accepted)
            self._accepted.close()
        for way in self._ways:
            way.abort()
        self._gone(why)

    def one_is_lost(self) -> None:
        """What it said before still gets to the other side, which has a while to read it."""
        if not self._is_over:
            if all(way.is_lost for way in self._ways):
                self.abort()
            else:
                for way in self._ways:
                    way.close()
                self._loop.call_later(limits.LAST_BYTES_S, self.abort)


class _Way(asyncio.Protocol):
    """What one of the two sockets says, written to the other one."""

    other: _Way

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._transport: asyncio.Transport | None = None
        self._has_ended = False
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=limits.BUFFERED_BYTES)

    def data_received(self, data: bytes) -> None:
        if (to := self.other._transport) is not None:
            to.write(data)

    def pause_writing(self) -> None:
        if (of := self.other._transport) is not None:
            of.pause_reading()

    def resume_writing(self) -> None:
        if (of := self.other._transport) is not None:
            of.resume_reading()

    def eof_received(self) -> bool:
        """The other direction stays open until it ends too."""
        self._has_ended = True
        if self.other._has_ended:
            self._guest.one_is_lost()
        elif (to := self.other._transport) is not None and not to.is_closing():
            to.write_eof()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._guest.one_is_lost()

    def close(self) -> None:
        """Once what was to be written is."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
