"""Which record of a chunk counts: after damage, and for a process that reads while another one writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.dataplane.chunk_index import ENTRY_BYTES, ChunkIndex, Entry

KEY = b"key"
CHUNK = 1


class Watched:
    """The buffer of an index; `event` happens before each byte that is read, or after each write."""

    def __init__(self) -> None:
        self.data = bytearray(ChunkIndex.size_bytes(2))
        self.before_read: Callable[[int], None] = lambda offset: None
        self.after_write: Callable[[], None] = lambda: None

    def __getitem__(self, where: slice) -> bytes:
        found = bytearray()
        for offset in range(where.start, where.stop):
            self.before_read(offset)
            found.append(self.data[offset])
        return bytes(found)

    def __setitem__(self, where: slice, data: bytes) -> None:
        self.data[where] = data
        self.after_write()


def entry(serial: int) -> Entry:
    return Entry(version=10 * serial, serial=serial, place=serial % 3, hash=bytes([serial]) * 32)


def with_entries(*serials: int) -> tuple[Watched, ChunkIndex, ChunkIndex]:
    """The buffer, and the index as another process sees it and as its writer does."""
    watched = Watched()
    writer = ChunkIndex(memoryview(watched.data), KEY)
    for serial in serials:
        writer.write(CHUNK, entry(serial))
    return watched, ChunkIndex(cast(memoryview, watched), KEY), writer


@given(st.integers(0, ENTRY_BYTES - 1), st.integers(1, 255))
def test_a_damaged_entry_is_not_valid(place: int, flip: int) -> None:
    watched, index, _ = with_entries(1, 2)
    assert index.entries(CHUNK) == [entry(2), entry(1)]
    assert index.entries(0) == []
    watched.data[2 * ENTRY_BYTES + place] ^= flip  # the even side of chunk 1
    assert index.entries(CHUNK) == [entry(1)]


WRITES: dict[str, list[int | None]] = {
    "a chunk is forgotten": [None],
    "a chunk is forgotten and put again": [None, 12],
    "one record": [12],
    "two records": [12, 13],
    "three records": [12, 13, 14],
}


@pytest.mark.parametrize("name", WRITES)
def test_what_a_reader_takes_for_in_force_was_so_at_one_moment_of_its_look(name: str) -> None:
    """Though the writer goes on while the reader is between any two bytes."""
    for place in range(2 * ENTRY_BYTES):
        found, was_in_force = look_during(WRITES[name], 2 * CHUNK * ENTRY_BYTES + place)
        assert found in was_in_force, place


def look_during(writes: list[int | None], place: int) -> tuple[int, list[int]]:
    """The serial that a reader takes for the one in force, and those that were so while it looked; 0 for none."""
    watched, reader, writer = with_entries(10, 11)
    in_force = [11]

    def goes_on(offset: int) -> None:
        if offset == place and len(in_force) == 1:
            for serial in writes:
                in_force.append(serial or 0)
                if serial:
                    writer.write(CHUNK, entry(serial))
                else:
                    writer.clear(CHUNK)

    watched.before_read = goes_on
    found = reader.entries(CHUNK)
    assert len(in_force) > 1
    return found[0].serial if found else 0, in_force


@pytest.mark.parametrize("serial", [11, 12])
def test_a_chunk_that_is_being_forgotten_never_has_the_record_before(serial: int) -> None:
    """Another chunk may lie in its place."""
    watched, index, _ = with_entries(serial - 1, serial)
    reader = ChunkIndex(memoryview(watched.data), KEY)
    seen: list[list[int]] = []
    watched.after_write = lambda: seen.append([found.serial for found in reader.entries(CHUNK)])
    index.clear(CHUNK)
    assert seen == [[serial], []]


def test_what_is_cleared_but_for_an_entry_leaves_that_one() -> None:
    _, reader, writer = with_entries(10, 11)
    writer.clear(CHUNK, [entry(10)])
    assert reader.entries(CHUNK) == [entry(10)]
