"""Which TCP addresses processes listen on, read from /proc."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

Address = tuple[str, int]
LISTEN = "0A"


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
