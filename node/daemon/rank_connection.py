"""The node's end of one rank's local socket: whole frames in, frames and descriptors out."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod

from atoll.node import local_protocol
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.v1 import local_pb2

FLUSH_S = 1.0
"""How long a last word may take to leave."""
ANY_RANK = range(1 << 32)


class Connection(ABC):
    """With one rank, wherever it is. What is sent waits in a queue, so that reading never waits for writing."""

    def __init__(self, may_be: range) -> None:
        self.rank: int | None = None  # known after its hello
        self.may_be = may_be
        """Ranks for which it may speak."""
        self.refused = ""  # why nothing more of it is read

    def send(self, response: local_pb2.LocalResponse) -> None:
        self.send_frame(local_protocol.encode_frame(response))

    @abstractmethod
    def send_frame(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        """With its length, and beside it descriptors of the node's buffers."""

    @abstractmethod
    async def read_frame(self) -> bytearray | bytes | None:
        """None at the end of the stream. Raises InvalidMessage if it ends in the middle of a frame."""

    @abstractmethod
    async def write_all(self) -> None:
        """Until it is cancelled."""

    @abstractmethod
    async def flush(self) -> None:
        """Until everything is sent, or FLUSH_S is over."""

    @abstractmethod
    def shut(self) -> None:
        """The rank ends; what it has sent may still be read."""

    @abstractmethod
    def close(self) -> None:
        """Nothing of it is read any more."""


class RankConnection(Connection):
    """A rank's socket on this host, non-blocking."""

    def __init__(self, sock: socket.socket, may_be: range = ANY_RANK) -> None:
        super().__init__(may_be)
        self.socket = sock
        self._queue: asyncio.Queue[tuple[bytes, tuple[int, ...]]] = asyncio.Queue()

    def send_frame(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        self._queue.put_nowait((frame, fds))

    async def write_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frame, fds = await self._queue.get()
            if fds:
                # Descriptors go with the first bytes of their frame.
                sent = await self._send_fds(frame[: local_protocol.LENGTH_BYTES], fds)
                frame = frame[sent:]
            await loop.sock_sendall(self.socket, frame)
            self._queue.task_done()

    def shut(self) -> None:
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the worker closed first

    def close(self) -> None:
        self.socket.close()

    async def flush(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._queue.join()
        except TimeoutError:
            pass  # the other side does not read; it learns from the closed socket instead

    async def _send_fds(self, data: bytes, fds: tuple[int, ...]) -> int:
        loop = asyncio.get_running_loop()
        while True:
            try:
                return socket.send_fds(self.socket, [data], fds)
            except BlockingIOError:
                writable = asyncio.Event()
                loop.add_writer(self.socket, writable.set)
                try:
                    await writable.wait()
                finally:
                    loop.remove_writer(self.socket)

    async def read_frame(self) -> bytearray | None:
        header = await self._read_exactly(local_protocol.LENGTH_BYTES)
        if not header:
            return None
        size = local_protocol.frame_size(header) if len(header) == local_protocol.LENGTH_BYTES else 1
        body = await self._read_exactly(size)
        if len(body) < size:
            raise InvalidMessage(f"a message ended after {len(body)} of {size} bytes")
        return body

    async def _read_exactly(self, num_bytes: int) -> bytearray:
        """Less at the end of the stream. Memory grows with what arrives, not with what was promised."""
        loop = asyncio.get_running_loop()
        data = bytearray()
        while len(data) < num_bytes:
            part = await loop.sock_recv(self.socket, min(num_bytes - len(data), 1 << 20))
            if not part:
                break
            data += part
        return data
