"""Writes all frames of all interfaces of a host, but of its own loopback, to a file: `sniffer.py FILE`. Needs root."""

from __future__ import annotations

import socket
import sys

ALL_PROTOCOLS = 3


def main(path: str) -> None:
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as listening,
        open(path, "wb", buffering=0) as file,
    ):
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        while True:
            frame, (interface, *_) = listening.recvfrom(1 << 17)
            if interface != "lo":
                file.write(frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
