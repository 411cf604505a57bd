"""A machine of its own, with loopback as its one wire, of which all that goes over it is kept: a network namespace.
Needs root."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from tests.harness.namespace import CLONE_NEWNET

T = TypeVar("T")
Connection = tuple[bytes, bytes, int]
"""One direction of it: addresses, ports, and how many there were of these before."""

ALL_PROTOCOLS = 3
SIOCSIFFLAGS = 0x8914
IS_UP = 0x1
SO_RCVBUFFORCE = 33
SOL_PACKET, PACKET_STATISTICS = 263, 6
UNREAD_BYTES = 256 << 20
"""That may wait to be read; a machine that is busy reads late."""
MAX_PACKET_BYTES = 1 << 17
TCP, SYN = 6, 0x2
LOOK_EVERY_S = 0.2


def available() -> str:
    """Why it cannot be done here; empty if it can."""
    return "" if os.geteuid() == 0 else "needs root"


class Wires:
    """Use as a context manager; `inside` does something on that machine."""

    def __init__(self) -> None:
        self._there = ThreadPoolExecutor(1)
        self._packets: list[bytes] = []
        self._reader = threading.Thread(target=self._read, name="wires")
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        self._listening = self._there.submit(_alone).result()
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._reader.join()
        self._listening.close()
        self._there.shutdown()

    def inside(self, work: Callable[[], T]) -> T:
        """In a thread there: what it starts is there too."""
        return self._there.submit(work).result()

    def num_lost(self) -> int:
        """Packets that nobody has read in time, since the last question."""
        _, num = struct.unpack("II", self._listening.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        return int(num)

    def said(self) -> list[bytes]:
        """Of each connection what was said in each direction, in its order."""
        streams: dict[Connection, bytearray] = {}
        first: dict[Connection, int] = {}
        num_of: dict[tuple[bytes, bytes], int] = {}
        for packet in list(self._packets):
            if (found := _tcp_of(packet)) is None:
                continue
            addresses, tcp = found
            ports, number, data = tcp[:4], int.from_bytes(tcp[4:8]), tcp[(tcp[12] >> 4) * 4 :]
            if tcp[13] & SYN:
                num_of[addresses, ports] = num_of.get((addresses, ports), 0) + 1
                first[addresses, ports, num_of[addresses, ports]] = number + 1
            key = addresses, ports, num_of[addresses, ports]
            at = (number - first[key]) % (1 << 32)
            if data:
                streams.setdefault(key, bytearray())[at : at + len(data)] = data
        return [bytes(stream) for stream in streams.values()]

    def other_packets(self) -> list[bytes]:
        """That are none of TCP's."""
        return [packet for packet in list(self._packets) if _tcp_of(packet) is None]

    def _read(self) -> None:
        while True:
            try:
                packet, (_, _, kind, *_) = self._listening.recvfrom(MAX_PACKET_BYTES)
            except TimeoutError:
                if self._is_over.is_set():
                    return
                continue
            if kind == socket.PACKET_OUTGOING:  # each is there twice: as it leaves, and as it comes
                self._packets.append(packet)

    def until_read(self, is_there: Callable[[list[bytes]], bool]) -> None:
        """Until what was said has that."""
        while not is_there(self.said()):
            self._is_over.wait(LOOK_EVERY_S)


def _alone() -> socket.socket:
    """This thread has a network of its own from now on; a socket that hears all of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no network namespace of its own")
    listening = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ALL_PROTOCOLS))
    fcntl.ioctl(listening, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IS_UP))
    listening.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, UNREAD_BYTES)
    listening.settimeout(LOOK_EVERY_S)
    return listening


def _tcp_of(packet: bytes) -> tuple[bytes, bytes] | None:
    """Both addresses, and what is in the packet; None if that is not TCP."""
    if packet[0] >> 4 == 4 and packet[9] == TCP:
        return packet[12:20], packet[(packet[0] & 15) * 4 : int.from_bytes(packet[2:4]) or None]
    if packet[0] >> 4 == 6 and packet[6] == TCP:
        return packet[8:40], packet[40:]
    return None


def found(words: Iterable[bytes], parts: Iterable[bytes]) -> set[bytes]:
    """Those that are in one of the parts."""
    left, seen = set(words), set[bytes]()
    for part in parts:
        seen |= {word for word in left - seen if word in part}
    return seen
