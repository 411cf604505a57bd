"""Sockets of this process through which gRPC comes to sites behind relays: a channel dials one as it dials an address,
and each of its connections becomes a call."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable

from atoll.node.relay import accepting, outgoing
from atoll.node.relay.outgoing import Route
from atoll.node.relay.splice import Splice
from atoll.protocol.addresses import HERE, Relayed
from atoll.protocol.errors import PeerError, RefusedError
from atoll.protocol.machine import Machine
from atoll.protocol.trust.security import MutualTls

log = logging.getLogger("atoll.node")

MAX_CALLS = 64
"""Of one forwarder, that are being made."""
NAME_BYTES = 16


class Forwarder:
    """To one site by one relay, until `close`."""

    def __init__(self, tls: MutualTls, to: Relayed, machine: Machine, reached: Callable[[str], None]) -> None:
        """Listens at once; `run` answers. `reached` hears of a relay that was one. Raises OSError."""
        name = machine.token_bytes(NAME_BYTES).hex()
        self.address = HERE + name
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.setblocking(False)
        self._listening.bind("\0" + name)
        self._listening.listen(MAX_CALLS)
        self._tls = tls
        self._to = to
        self._route = Route(to.relay, machine.proxy)
        self._reached = reached
        self._problem = ""
        self._calls: set[asyncio.Task[None]] = set()
        self._splices: set[Splice] = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            async for connection in accepting.connections(self._listening):
                if _process_of(connection) != os.getpid() or len(self._calls) >= MAX_CALLS:
                    connection.close()
                    continue
                task = accepting.begin(self._call, connection)
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
        finally:
            self._listening.close()
            for task in self._calls:
                task.cancel()
            for splice in list(self._splices):
                splice.abort()

    async def _call(self, inner: socket.socket) -> None:
        is_ours, has_answered, problem = True, False, ""
        try:
            outer = await outgoing.called(self._tls, self._route, self._to.name)
            is_ours, has_answered = False, True
            splice = Splice(inner, outer, ended=lambda: self._splices.discard(splice))
            self._splices.add(splice)
        except (PeerError, RefusedError, OSError) as error:
            has_answered = has_answered or isinstance(error, RefusedError)
            problem = f"site {self._to}: {error}"
        finally:
            if is_ours:
                inner.close()  # grpc says no more of it than that it was closed
        if has_answered:
            self._reached(self._to.relay)
        if problem and problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem


def _process_of(connection: socket.socket) -> int:
    """At the other end, by the kernel's knowledge."""
    size = struct.calcsize("3i")
    process, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(process)
