"""Ranks of another host, as the leader serves them: their frames come and go through the stream of their host."""

from __future__ import annotations

import asyncio

from atoll.node import host_protocol as hosts
from atoll.node.daemon.hosts.link import Outbox
from atoll.node.daemon.rank_connection import FLUSH_S, Connection
from atoll.node.local_protocol import LENGTH_BYTES
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.v1 import hosts_pb2

MAX_FRAMES = 1024
"""Of one rank, that wait to be read."""

Ranks = dict[int, "RankElsewhere"]
"""Of a host, by the number of the connection."""


class RankElsewhere(Connection):
    """A rank of another host."""

    def __init__(self, number: int, may_be: range, outbox: Outbox[hosts_pb2.AttachResponse], of: Ranks) -> None:
        """`of`: those of its host, by their numbers, of which it is one until it is closed."""
        super().__init__(may_be)
        self._number, self._of = number, of
        self._outbox = outbox
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()

    def came(self, frame: bytes) -> None:
        """From the rank. Raises InvalidMessage where it says more than this node can read."""
        if self._frames.qsize() >= MAX_FRAMES:
            raise InvalidMessage(f"{MAX_FRAMES} messages of a rank wait to be read")
        self._frames.put_nowait(frame)

    def ended(self) -> None:
        """At the rank's end."""
        self._frames.put_nowait(None)

    def send_frame(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        """Its host has buffers of its own to pass on."""
        self._outbox.say(hosts.RankFrame(connection=self._number, data=frame[LENGTH_BYTES:]))

    async def read_frame(self) -> bytes | None:
        return await self._frames.get()

    async def write_all(self) -> None:
        await asyncio.get_running_loop().create_future()  # the host's stream does

    async def flush(self) -> None:
        await self._outbox.flush(FLUSH_S)

    def shut(self) -> None:
        self._outbox.say(hosts.RankClosed(connection=self._number))
        self.ended()

    def close(self) -> None:
        self._of.pop(self._number, None)
        self._outbox.say(hosts.RankClosed(connection=self._number))
