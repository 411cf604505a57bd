"""An exchange process that goes wrong, for tests: `odd_exchange_process.py HOW FD`."""

from __future__ import annotations

import signal
import socket
import sys

from atoll.node import process_protocol as processes


def main(how: str, node: socket.socket) -> None:
    size = int.from_bytes(node.recv(4, socket.MSG_WAITALL), "little")
    start = processes.heard_of_node(node.recv(size, socket.MSG_WAITALL))
    assert isinstance(start, processes.ProcessStart)
    if how == "ends":
        sys.exit(4)
    if how == "fails":
        node.sendall(processes.said(processes.ProcessFailed(text="no port is left", exit_code=3)))
        sys.exit(1)
    port = int(start.listen_on.rpartition(":")[2]) or 4000 + start.number
    node.sendall(processes.said(processes.ProcessReady(port=port)))
    if how == "ends when it is ready":
        sys.exit(4)
    if how == "makes no sense":
        node.sendall(b"\3\0\0\0abc")
    signal.pause()  # it is silent from now on


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
