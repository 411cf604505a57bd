"""Wires with a delay: pairs of network devices, where what enters one leaves the other so many milliseconds later.

    python -m benchmarks.long_wire --delay-ms 25 FIRST=SECOND ...

It stands in for `netem` where the kernel has none. Whole frames are delayed, both ways, in their order, with the
kernel's segmentation left to the receiver: TCP sees a long link and starts, grows and loses on it as on a real one.
The devices exist once `ready` is printed, and until standard input ends. Needs root.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TAP, NO_PACKET_INFO, VNET_HEADER = 0x0002, 0x1000, 0x4000
CHECKSUM, TSO4, TSO6, TSO_ECN = 1, 2, 4, 8
MAX_FRAME_BYTES = (64 << 10) + 64
MAX_BUFFER_BYTES = 128 << 20
"""On its way in one direction of a wire: 10 Gbit/s for 100 ms. What comes beyond is left to the device's own queue."""
FRAMES_A_TURN = 32
PRIORITY = -15
"""It is the network: the hosts' processes must not slow it down."""


def open_device(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | NO_PACKET_INFO | VNET_HEADER))
    fcntl.ioctl(descriptor, TUNSETOFFLOAD, CHECKSUM | TSO4 | TSO6 | TSO_ECN)
    return descriptor


class Direction:
    """From one device to another."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self.source, self._target, self._delay_s = source, target, delay_s
        self._frames: deque[tuple[float, bytes]] = deque()  # with the time at which each is due
        self._num_bytes = 0

    @property
    def has_room(self) -> bool:
        return self._num_bytes < MAX_BUFFER_BYTES

    @property
    def due_at(self) -> float:
        return self._frames[0][0] if self._frames else float("inf")

    def take(self, now: float) -> None:
        with suppress(BlockingIOError):
            for _ in range(FRAMES_A_TURN):
                frame = os.read(self.source, MAX_FRAME_BYTES)
                self._frames.append((now + self._delay_s, frame))
                self._num_bytes += len(frame)

    def give(self, now: float) -> None:
        while self._frames and self._frames[0][0] <= now:
            frame = self._frames.popleft()[1]
            self._num_bytes -= len(frame)
            with suppress(OSError):  # a device that is down takes none: the frame is lost
                os.write(self._target, frame)


def carry(directions: list[Direction]) -> None:
    """Until standard input ends."""
    while True:
        wait_s = max(0.0, min(direction.due_at for direction in directions) - time.monotonic())
        readers = {direction.source: direction for direction in directions if direction.has_room}
        readable, _, _ = select.select([sys.stdin, *readers], [], [], min(wait_s, 1.0))
        if sys.stdin in readable:
            return
        now = time.monotonic()
        for source in readable:
            readers[source].take(now)
        for direction in directions:
            direction.give(now)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, required=True, help="of each direction")
    parser.add_argument("wires", nargs="+", metavar="FIRST=SECOND", help="names of the devices at the two ends")
    args = parser.parse_args()
    os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    directions = []
    for wire in args.wires:
        first, second = (open_device(name) for name in wire.split("="))
        directions += [Direction(*ends, args.delay_ms / 1e3) for ends in ((first, second), (second, first))]
    print("ready", flush=True)
    carry(directions)


if __name__ == "__main__":
    _main()
