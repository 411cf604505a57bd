"""The form of a codec that carries the largest values alone, and what it stands for without numpy."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from atoll.protocol.codecs import cosines
from atoll.protocol.errors import InvalidMessage

BEYOND = "encoded chunk: an entry beyond its end"
EDGE = 64
"""Rows and columns of a tile."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """One value of a bucket has room, or of several. Bodies are the scales of all blocks, fp32, then the entries of all
    blocks, then the buckets of all.

    Elements are cut into segments of 64, and these into blocks of 64; the last ones may be shorter. With `is_cosine`
    the values of a block are those of its cosine transform, and the last segment counts as whole. A block of `m`
    buckets has room for `r` entries, one for each `share` of them, in the order of their values. The byte of an entry
    has its place in its bucket, and above that its code. Then `r + m` bits say which bucket each is in (Elias-Fano): a
    1 for an entry, a 0 where a bucket ends; they begin with a byte. What is beyond the last entry is zero.
    """

    bucket: int
    """Values: 64 or 128."""
    scales: int
    """Of a block."""
    is_cosine: bool = False
    share: int = 1

    @property
    def block_buckets(self) -> int:
        return EDGE * EDGE // self.bucket

    @property
    def block_entries(self) -> int:
        return self.block_buckets // self.share

    def num_buckets(self, num_elements: int) -> int:
        return -(-self.num_segments(num_elements) * EDGE // self.bucket)

    def num_segments(self, num_elements: int) -> int:
        return -(-num_elements // EDGE)

    def num_values(self, num_elements: int) -> int:
        return EDGE * self.num_segments(num_elements) if self.is_cosine else num_elements

    def parts_bytes(self, num_elements: int) -> tuple[int, int, int]:
        """Of the scales, the entries and the buckets."""
        blocks, rest = divmod(self.num_buckets(num_elements), self.block_buckets)
        entries = -(-rest // self.share)
        buckets = blocks * bytes_for(self.block_entries + self.block_buckets) + bytes_for(entries + rest)
        return 4 * self.scales * (blocks + (rest > 0)), blocks * self.block_entries + entries, buckets

    def body_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        return sum(self.parts_bytes(num_elements))

    def fits(self, columns: int, num_elements: int) -> bool:
        """Whether the header of a chunk of so many elements may say that it is so wide."""
        if columns == EDGE:
            return True
        return 0 < columns <= num_elements and not columns % EDGE and not num_elements % columns

    def columns_of(self, width: int, num_elements: int) -> int:
        """What the header says of a chunk with rows of that width: its own, where there are tiles; else 64."""
        return width if self.fits(width, num_elements) and width < num_elements else EDGE

    def segment_start(self, segment: int, columns: int, num_elements: int) -> int:
        """Its first element. Segments are the rows of tiles of 64 columns and up to 64 rows: tile by tile, and strip by
        strip."""
        tiles = columns // EDGE
        if tiles == 1:
            return segment * EDGE
        strip, place = divmod(segment, tiles * EDGE)
        tile, row = divmod(place, min(EDGE, num_elements // columns - strip * EDGE))
        return (strip * EDGE + row) * columns + tile * EDGE

    def entries(self, body: bytes, num_elements: int) -> Iterator[tuple[int, float]]:
        """Place, in the order of segments, and value of each. Raises InvalidMessage if there is no such place."""
        scales_bytes, entries_bytes, _ = self.parts_bytes(num_elements)
        scales = struct.unpack(f"<{scales_bytes // 4}f", body[:scales_bytes])
        start = scales_bytes + entries_bytes
        for index, first in enumerate(range(0, self.num_buckets(num_elements), self.block_buckets)):
            mine = scales[index * self.scales :][: self.scales]
            levels = [*mine, *(-scale for scale in mine)]
            num_buckets = min(self.block_buckets, self.num_buckets(num_elements) - first)
            room, number, bucket = -(-num_buckets // self.share), 0, 0
            num_bytes = bytes_for(room + num_buckets)
            bits, start = int.from_bytes(body[start : start + num_bytes], "little"), start + num_bytes
            while number < room and bucket < num_buckets:
                if not bits >> number + bucket & 1:
                    bucket += 1
                    continue
                byte = body[scales_bytes + index * self.block_entries + number]
                place = (first + bucket) * self.bucket + byte % self.bucket
                if place >= self.num_values(num_elements):
                    raise InvalidMessage(BEYOND)
                yield place, levels[byte // self.bucket]
                number += 1

    def finished(self, values: array[float], columns: int, num_elements: int) -> array[float]:
        """The elements, from the values in the order of segments."""
        out = array("f", bytes(4 * num_elements))
        for first in range(0, self.num_segments(num_elements), EDGE):
            block = values[first * EDGE : (first + EDGE) * EDGE]
            if self.is_cosine:
                block = cosines.inverse(block)
            for row, segment in enumerate(range(first, first + -(-len(block) // EDGE))):
                start = self.segment_start(segment, columns, num_elements)
                part = block[row * EDGE : (row + 1) * EDGE][: num_elements - start]
                out[start : start + len(part)] = part
        return out


def bytes_for(bits: int) -> int:
    return -(-bits // 8)


TOPK2 = Sparse(bucket=64, scales=2)
DCT1 = Sparse(bucket=128, scales=1, is_cosine=True)
DCT1K4 = Sparse(bucket=128, scales=1, is_cosine=True, share=8)
