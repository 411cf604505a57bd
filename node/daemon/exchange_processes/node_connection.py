"""An exchange process's end of the connection to its node: frames, descriptors, and lines of its log."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque

from atoll.node import process_protocol as processes
from atoll.node.daemon.rank_connection import RankConnection

MAX_LINE_CHARACTERS = 1 << 14


class NodeConnection(RankConnection):
    """The process's end, which takes descriptors too."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.descriptors: deque[int] = deque()

    async def _read_exactly(self, num_bytes: int) -> bytearray:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < num_bytes:
            try:
                part, descriptors, _, _ = socket.recv_fds(self.socket, min(num_bytes - len(data), 1 << 20), 1)
            except BlockingIOError:
                readable = asyncio.Event()
                loop.add_reader(self.socket, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(self.socket)
                continue
            self.descriptors += descriptors
            if not part:
                break
            data += part
        return data


class LinesToNode(logging.Handler):
    """Lines of this process's log, to the node's."""

    def __init__(self, connection: NodeConnection) -> None:
        super().__init__()
        self._connection = connection
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)[:MAX_LINE_CHARACTERS].encode(errors="backslashreplace").decode()
        line = processes.said(processes.ProcessLog(level=record.levelno, text=text))
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._connection.send_frame, line)
