"""Where the records of chunks lie in a file that has a few more places than records. Pure.

A record is replaced by writing the new one into a spare place. Places are grouped by size, so that few spares serve
many chunks: sizes are rounded up to eighths of a power of two, which bounds the spares of all groups by a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.protocol.layout import Layout, Role

ALIGNMENT_BYTES = 64
SPARES = 4
"""Of each size, at the least: so many chunks of one size can be replaced at once."""
MAX_SPARES = 1024


def spares_for(num_threads: int) -> int:
    """Of each size, for so many threads that replace chunks."""
    return min(MAX_SPARES, max(SPARES, num_threads))


def place_bytes(record_bytes: int) -> int:
    """Size of the place for a record: a multiple of ALIGNMENT_BYTES, at most an eighth above the record's (or 64)."""
    step = max(ALIGNMENT_BYTES, (1 << max(0, record_bytes - 1).bit_length()) // 16)
    return max(1, -(-record_bytes // step)) * step


def error_sizes(layout: Layout) -> list[int]:
    """Bytes of what a codec lost of each chunk: none for those that are not trained."""
    return [chunk.num_bytes if chunk.role is Role.TRAINABLE else 0 for chunk in layout.chunks]


@dataclass(frozen=True, slots=True)
class Group:
    first_place: int
    num_places: int
    offset_bytes: int
    place_bytes: int


class PlaceMap:
    """Places 0..num_places-1 of a file for records of these sizes; size 0 has no place (and group -1)."""

    def __init__(self, record_bytes: Sequence[int], num_spares: int = SPARES) -> None:
        self.num_spares = num_spares
        counts: dict[int, int] = {}
        for size in record_bytes:
            if size:
                counts[place_bytes(size)] = counts.get(place_bytes(size), 0) + 1
        self.groups: list[Group] = []
        index: dict[int, int] = {}
        place = offset = 0
        for size, count in sorted(counts.items(), reverse=True):
            num_places = count + min(count, num_spares)
            index[size] = len(self.groups)
            self.groups.append(Group(place, num_places, offset, size))
            place += num_places
            offset += num_places * size
        self.num_places = place
        self.file_bytes = offset
        self.group_of = [index[place_bytes(size)] if size else -1 for size in record_bytes]

    def fits(self, chunk: int, place: int) -> bool:
        group = self.groups[self.group_of[chunk]]
        return group.first_place <= place < group.first_place + group.num_places

    def offset_bytes(self, chunk: int, place: int) -> int:
        group = self.groups[self.group_of[chunk]]
        return group.offset_bytes + (place - group.first_place) * group.place_bytes
