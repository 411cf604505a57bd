"""Which TCP addresses processes listen on, read from /proc; and one on which none does."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
from collections.abc import Iterable
from pathlib import Path

Address = tuple[str, int]
LISTEN = "0A"
FIRST_PORT = 10_000
_ANY = random.SystemRandom()  # tests that run side by side, with one seed each, are to find different ones


def free_address() -> str:
    """On loopback, for what is to listen there later, or again. No connection is given such a port by the system
    meanwhile: it is below those that the system gives by itself."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = _ANY.randrange(FIRST_PORT, first_given)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


def listening(pids: Iterable[int]) -> set[Address]:
    """Of the processes that are still there."""
    by_inode = {inode: address for table in ("tcp", "tcp6") for inode, address in _rows(table)}
    return {by_inode[inode] for pid in pids for inode in _sockets_of(pid) if inode in by_inode}


def outside_loopback(addresses: Iterable[Address]) -> set[Address]:
    return {(host, port) for host, port in addresses if not ipaddress.ip_address(host).is_loopback}


def _rows(table: str) -> list[tuple[str, Address]]:
    rows = []
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTEN:
            host, port = fields[1].split(":")
            rows.append((fields[9], (_host(host), int(port, 16))))
    return rows


def _host(text: str) -> str:
    """Words of 32 bits, each as this machine (little-endian) keeps it."""
    raw = b"".join(bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8))
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _sockets_of(pid: int) -> list[str]:
    inodes = []
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except FileNotFoundError:
                continue  # closed meanwhile
            if target.startswith("socket:["):
                inodes.append(target[len("socket:[") : -1])
    except (FileNotFoundError, ProcessLookupError):
        pass  # ended meanwhile
    return inodes
