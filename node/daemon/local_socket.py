"""The Unix socket at which the ranks of a host find their node, in a folder of its own."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from atoll.node.daemon.home import SOCKET_FOLDER_PREFIX
from atoll.node.daemon.rank_connection import RankConnection
from atoll.protocol.errors import HostError

MAX_SOCKET_PATH_BYTES = 107


class LocalSocket:
    """Between `open` and `close` each connection is given to `accepted`, in the event loop."""

    def __init__(self, accepted: Callable[[RankConnection], None]) -> None:
        self._accepted = accepted
        self._folder: Path | None = None
        self._listener: socket.socket | None = None

    @property
    def path(self) -> str:
        """Goes to workers as ATOLL_SOCKET."""
        if self._folder is None:
            raise RuntimeError("the local socket is not open")
        return str(self._folder / "node.sock")

    def open(self) -> None:
        """Raises HostError."""
        # In a folder of its own, open to this user only, and short: a socket's path has at most 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix=SOCKET_FOLDER_PREFIX))
        if len(self.path.encode()) > MAX_SOCKET_PATH_BYTES:
            path = self.path
            self._folder.rmdir()
            self._folder = None
            raise HostError(f"{path} is too long for a socket's path; set TMPDIR to a shorter folder")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(self.path)
        self._listener.listen(128)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def stop(self) -> bool:
        """Accepting more; whether it was open."""
        if self._listener is None:
            return False
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        return True

    def close(self) -> None:
        """Idempotent."""
        self.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _accept(self, listener: socket.socket) -> None:
        # Not by a task: a cancelled `sock_accept` may drop a connection that it has.
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        sock.setblocking(False)
        self._accepted(RankConnection(sock))
