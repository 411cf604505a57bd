"""Event files of TensorBoard, a folder for each series.

A file is a sequence of records: the length of the data (uint64), its masked CRC-32C, the data, the data's masked
CRC-32C, all little-endian (TensorFlow, tensorflow/core/lib/io/record_writer.h). The data is an `Event` as protobuf
(tensorflow/core/util/event.proto): 1 wall_time (double), 2 step (int64), 3 file_version (string), 5 summary; in that 1
value; in that 1 tag (string), 2 simple_value (float).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.coordinator.tracking.tracker import Point
from atoll.protocol.disk import PRIVATE_FILE, disk_error, make_folder

POLYNOMIAL = 0x82F63B78  # of CRC-32C (Castagnoli), reflected
MASK_DELTA = 0xA282EAD8
FILE_VERSION = "brain.Event:2"


def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return tuple(found)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Castagnoli's."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + MASK_DELTA) & 0xFFFFFFFF)


def record(data: bytes) -> bytes:
    """As it stands in a file."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def scalar(tag: str, step: int, time_s: float, value: float) -> bytes:
    """An Event with one value."""
    of_value = _bytes(1, tag.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", value)
    at = _varint(1 << 3 | 1) + struct.pack("<d", time_s) + _varint(2 << 3) + _varint(step)
    return at + _bytes(5, _bytes(1, of_value))


class TensorBoard:
    """A file of this start of the coordinator in each folder."""

    def __init__(self, folder: Path, name: str, now_s: Callable[[], float]) -> None:
        """`name`: of the files, such that no other start has the same."""
        self._folder, self._name, self._now_s = folder, name, now_s
        self._begun: set[str] = set()
        self._num_broken = 0  # a record may have been cut off: no other one can be read behind it

    def write(self, points: Sequence[Point]) -> None:
        """To the files. After an error the next values go into other files. Raises HostError."""
        waiting: dict[str, bytearray] = {}
        for point in points:
            data = waiting.setdefault(point.series, bytearray())
            if point.series not in self._begun:
                self._begun.add(point.series)
                begins = _varint(1 << 3 | 1) + struct.pack("<d", self._now_s()) + _bytes(3, FILE_VERSION.encode())
                data += record(begins)
            data += record(scalar(point.tag, point.step, point.time_s, point.value))
        for series, data in waiting.items():
            path = self._folder / series / f"{self._name}.{self._num_broken}"
            try:
                make_folder(path.parent)
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE), "wb") as file:
                    file.write(data)
            except OSError as error:
                self._num_broken += 1
                self._begun.clear()
                raise disk_error(error, path, len(data)) from error

    def close(self) -> None:
        """Files are closed as they are written."""
