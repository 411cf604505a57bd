"""Which TCP addresses processes listen on, read from /proc; and one on which none does."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import os
import random
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path

Address = tuple[str, int]
LISTEN = "0A"
FIRST_PORT = 10_000
_ANY = random.SystemRandom()  # tests that run side by side, with one seed each, are to find different ones
_CLAIMED: set[int] = set()


def free_address() -> str:
    """On loopback, for what is to listen there later, or again. No connection is given such a port by the system
    meanwhile: it is below those that the system gives by itself. No other test is given it: not in this process, and
    in no other one of this user as long as this process lives."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = _ANY.randrange(FIRST_PORT, first_given)
        if port in _CLAIMED:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            fcntl.lockf(_claims(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            _CLAIMED.add(port)
            return f"127.0.0.1:{port}"


@functools.cache
def _claims() -> int:
    """A file whose n-th byte is locked by the process whose tests have port n."""
    return os.open(f"{tempfile.gettempdir()}/atoll-tests-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600)


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
