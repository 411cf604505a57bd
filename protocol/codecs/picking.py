"""What the kernels of sparse codecs have in common, compiled into each of them: a block of 64 segments is loaded, its
largest values are picked, and entries are looked up again. See `sparse.py` for the form."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from atoll.protocol.codecs.arithmetic import INFINITE, MAGNITUDE
from atoll.protocol.codecs.blocks import inlined, load
from atoll.protocol.codecs.jit import kernel, u8_in
from atoll.protocol.codecs.sparse import EDGE

BLOCK = EDGE * EDGE
NOT_FINITE = -1
_ZERO = np.float32(0.0)


@inlined
def segment_start(segment: Any, columns: Any, num_elements: Any) -> Any:
    """`Sparse.segment_start`."""
    tiles = columns // EDGE
    strip = segment // (tiles * EDGE)
    place = segment - strip * tiles * EDGE
    height = min(EDGE, num_elements // columns - strip * EDGE)
    tile = place // height if tiles > 1 else 0
    return (strip * EDGE + place - tile * height) * columns + tile * EDGE


@inlined
def load_block(terms: Any, beta: Any, columns: Any, first: Any, num_segments: Any, block: Any) -> None:  # noqa: PLR0917
    """Of `num_segments` from `first` on; zero beyond."""
    values, minus, error = terms
    segment = np.empty(EDGE, np.float32)
    for j in range(EDGE):
        start = segment_start(first + j, columns, values.size) if j < num_segments else values.size
        if start + EDGE <= values.size:  # so that the compiler knows how many there are
            load(values[start:], minus[start:], error[start:], beta, 0, EDGE, segment)
        else:
            load(values, minus, error, beta, start, values.size - start, segment)
        for i in range(EDGE):
            block[j * EDGE + i] = segment[i]


@inlined
def _bounds(block: Any, num_buckets: Any, bucket: Any) -> Any:
    """The bits of the largest magnitude, and of the smallest of those of the buckets: at least as many values as there
    are buckets, so as have room, are as large as that."""
    bits = block.view(np.uint32)
    most, least = np.uint32(0), INFINITE
    for j in range(num_buckets):
        top = np.uint32(0)
        for i in range(bucket):
            top = max(top, np.uint32(bits[j * bucket + i] & MAGNITUDE))
        most, least = max(most, top), min(least, top)
    return np.int32(most), np.int32(least)


@inlined
def _candidates(block: Any, least: Any, magnitudes: Any, places: Any) -> Any:
    """The magnitudes that are not below `least`, with their places, in order."""
    bits, number = block.view(np.uint32), 0
    for i in range(BLOCK):
        magnitude = np.int32(bits[i] & MAGNITUDE)
        magnitudes[number] = magnitude
        places[number] = np.int32(i)
        number += int(magnitude >= least)
    return number


@inlined
def _num_at_least(magnitudes: Any, number: Any, least: Any) -> Any:
    found = np.int32(0)
    for i in range(number):
        found += np.int32(magnitudes[i] >= least)
    return found


@inlined
def _smallest_of(magnitudes: Any, number: Any, least: Any, most: Any, room: Any) -> Any:
    """The bits of the smallest magnitude that has room, by halving; `least` if there are no more than have."""
    above = np.int32(most + np.int32(1))
    while above - least > 1:
        middle = np.int32(least + (above - least) // 2)
        found = _num_at_least(magnitudes, number, middle)
        if found >= room:
            least = middle
        else:
            above = middle
        if found == room:
            break
    return least


@inlined
def pick(  # noqa: PLR0917
    block: Any, bucket: Any, num_buckets: Any, room: Any, picked: Any, places: Any, packed: Any
) -> Any:
    """The largest values that are not zero, as many as have room, in order, of equal ones the first; their places in
    their buckets, and the bits of the buckets. Their number; NOT_FINITE if one is not."""
    magnitudes, found = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    most, least = _bounds(block, num_buckets, bucket)
    if most >= np.int32(INFINITE):
        return NOT_FINITE
    least = max(least, np.int32(1))
    candidates = _candidates(block, least, magnitudes, found)
    least = _smallest_of(magnitudes, candidates, least, most, room)
    num_equal = room - _num_at_least(magnitudes, candidates, np.int32(least + 1))
    picked[:], places[:], packed[:] = _ZERO, np.uint8(0), np.uint8(0)
    number = 0
    for i in range(candidates):
        if magnitudes[i] > least or (magnitudes[i] == least and num_equal > 0):
            num_equal -= int(magnitudes[i] == least)
            picked[number] = block[found[i]]
            places[number] = np.uint8(found[i] % bucket)
            bit = number + found[i] // bucket
            packed[bit // 8] |= np.uint8(1 << (bit % 8))
            number += 1
    return number


@inlined
def is_set(bits: Any, place: Any) -> Any:
    return bits[place // 8] >> np.uint8(place % 8) & np.uint8(1)


@kernel(u8_in, u8_in, types.int64, types.int64, types.int64, types.int64, types.int64)
def entries_are_right(  # noqa: PLR0917
    entries: Any, buckets: Any, block_entries: Any, block_buckets: Any, num_buckets: Any, bucket: Any, rest: Any
) -> Any:
    """Whether places ascend within their buckets and chunk, of whose last bucket `rest` values are there, and all that
    is beyond the last entry is zero."""
    block_bytes = (block_entries + block_buckets + 7) // 8
    for index in range((num_buckets + block_buckets - 1) // block_buckets):
        first, before = index * block_entries, index * block_buckets
        room, here = min(block_entries, entries.size - first), min(block_buckets, num_buckets - before)
        number = at_bucket = 0
        last = np.int64(-1)
        bits = buckets[index * block_bytes :]
        for place in range((room + here + 7) // 8 * 8):
            if is_set(bits, place):
                if number >= room or at_bucket >= here:
                    return False
                at = np.int64(entries[first + number]) % bucket
                if at <= last or (before + at_bucket == num_buckets - 1 and at >= rest):
                    return False
                number, last = number + 1, at
            else:
                at_bucket, last = at_bucket + 1, np.int64(-1)
        for i in range(number, room):
            if entries[first + i]:
                return False
    return True
