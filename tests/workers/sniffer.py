"""Writes all frames of a network interface to a file: `sniffer.py INTERFACE FILE`. Needs root."""

from __future__ import annotations

import socket
import sys

ALL_PROTOCOLS = 3


def main(interface: str, path: str) -> None:
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as listening,
        open(path, "wb", buffering=0) as file,
    ):
        listening.bind((interface, 0))
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        while True:
            file.write(listening.recv(1 << 17))


if __name__ == "__main__":
    main(*sys.argv[1:])
