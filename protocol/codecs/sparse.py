"""The form of a codec that carries the largest values alone, and what it stands for without numpy."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from atoll.protocol.errors import InvalidMessage

BEYOND = "encoded chunk: an entry beyond its end"


@dataclass(frozen=True, slots=True)
class Sparse:
    """One value of `edge` has room: bodies are the scales of all blocks, fp32, then the entries of all blocks, then
    the segments of all.

    Elements are cut into segments of `edge`, and these into blocks of `edge`; the last ones may be shorter. A block of
    `m` segments has room for `m` entries, in the order of their elements. The byte of an entry has its place in its
    segment, 6 bits, and a code of 2. Then `2 m` bits say which segment each is in (Elias-Fano): a 1 for an entry, a 0
    where a segment ends. What is beyond the last entry is zero.
    """

    edge: int = 64
    scales: int = 2
    """Of a block."""

    @property
    def block(self) -> int:
        """Elements."""
        return self.edge * self.edge

    def num_segments(self, num_elements: int) -> int:
        return -(-num_elements // self.edge)

    def parts_bytes(self, num_elements: int) -> tuple[int, int, int]:
        """Of the scales, the entries and the segments."""
        blocks, rest = divmod(self.num_segments(num_elements), self.edge)
        segments = blocks * self.edge // 4 + -(-rest // 4)
        return 4 * self.scales * (blocks + (rest > 0)), blocks * self.edge + rest, segments

    def body_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        return sum(self.parts_bytes(num_elements))

    def fits(self, columns: int, num_elements: int) -> bool:
        """Whether the header of a chunk of so many elements may say that it is so wide."""
        if columns == self.edge:
            return True
        return 0 < columns <= num_elements and not columns % self.edge and not num_elements % columns

    def columns_of(self, width: int, num_elements: int) -> int:
        """What the header says of a chunk with rows of that width: its own, where there are tiles; else `edge`."""
        return width if self.fits(width, num_elements) and width < num_elements else self.edge

    def segment_start(self, segment: int, columns: int, num_elements: int) -> int:
        """Its first element. Segments are the rows of tiles of `edge` columns and up to `edge` rows: tile by tile, and
        strip by strip."""
        tiles = columns // self.edge
        if tiles == 1:
            return segment * self.edge
        strip, place = divmod(segment, tiles * self.edge)
        tile, row = divmod(place, min(self.edge, num_elements // columns - strip * self.edge))
        return (strip * self.edge + row) * columns + tile * self.edge

    def entries(self, body: bytes, columns: int, num_elements: int) -> Iterator[tuple[int, float]]:
        """Element and value of each. Raises InvalidMessage if there is no such element."""
        scales_bytes, entries_bytes, _ = self.parts_bytes(num_elements)
        scales = struct.unpack(f"<{scales_bytes // 4}f", body[:scales_bytes])
        for first in range(0, entries_bytes, self.edge):
            low, high = scales[first // self.edge * 2 :][:2]
            levels = low, high, -low, -high
            room, number, segment = min(self.edge, entries_bytes - first), 0, 0
            start = scales_bytes + entries_bytes + first // 4
            bits = int.from_bytes(body[start : start + -(-room // 4)], "little")
            while number < room and segment < room:
                if not bits >> number + segment & 1:
                    segment += 1
                    continue
                byte = body[scales_bytes + first + number]
                element = self.segment_start(first + segment, columns, num_elements) + byte % self.edge
                if element >= num_elements:
                    raise InvalidMessage(BEYOND)
                yield element, levels[byte // self.edge]
                number += 1


TOPK2 = Sparse()
