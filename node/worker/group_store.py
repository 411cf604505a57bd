"""The store in which the ranks of a site of one host meet: `python -m atoll.node.worker.group_store FD`.

torch's own way is a store in rank 0 or in torchrun, on all interfaces. This one serves the listening socket FD, which
the node opened on loopback, until it is ended.
"""

from __future__ import annotations

import signal
import socket
import sys

from atoll.protocol.loading import nothing_is_garbage

with nothing_is_garbage():
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main(fd: int) -> None:
    listening = socket.socket(fileno=fd)
    host, port = listening.getsockname()
    # A thread of its own serves, as long as the object is there; it owns the socket from here on.
    _store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    while True:
        signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]))
