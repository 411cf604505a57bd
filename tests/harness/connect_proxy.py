"""An HTTP proxy that takes CONNECT, and alone knows where names that end in .invalid are: on this machine."""

from __future__ import annotations

import socket
import socketserver
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, Self


class ConnectProxy:
    def __init__(self) -> None:
        self.asked: list[str] = []
        """HOST:PORT of each request."""
        self.refuses = False
        serve: Any = self._serve  # any callable will do
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), serve)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, near: socket.socket, address: Any, server: Any) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            if not (some := near.recv(1)):
                return
            head += some
        verb, target, _ = head.decode().split(" ", 2)
        host, _, port = target.rpartition(":")
        self.asked.append(target)
        if verb != "CONNECT" or self.refuses or not host.endswith(".invalid"):
            near.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            return
        with socket.create_connection(("127.0.0.1", int(port))) as far:
            near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=_pump, args=(far, near), daemon=True)
            back.start()
            _pump(near, far)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for connection in (source, sink):
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
