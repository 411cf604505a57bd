"""Where the ranks of a site meet: a listening socket, served by a process with torch once it is needed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from atoll.protocol.addresses import join_address
from atoll.protocol.errors import HostError


class StoreSocket:
    """Ranks find its port in MASTER_PORT. The first of them that connects has the store started, which takes the
    socket over: a site whose ranks form no group needs no such process. Who connects earlier waits in the backlog.
    """

    def __init__(self, host: str, start: Callable[[int], None]) -> None:
        """`start` is called in the event loop, at most once, with a file descriptor that it has to pass on at once.
        Raises HostError if this machine does not have the address."""
        self._start = start
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise HostError(f"the ranks' store cannot listen on {host}: {error.strerror}") from None
        self.address = join_address(host, self._socket.getsockname()[1])
        asyncio.get_running_loop().add_reader(self._socket, self._connected)

    def _connected(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        try:
            self._start(self._socket.fileno())
        finally:
            self._socket.close()

    def close(self) -> None:
        """From then on nothing is started. Idempotent."""
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
