"""topk2: of each 4096 values, which are a tile of 64 rows and columns, the 64 largest, each as one of four levels.

The levels are those of int2, over what is sent: values above a threshold, and the others, each by their mean magnitude,
and the sign. The threshold lies 1.6 times as far above the smallest as the mean does, near the best one of a tail that
falls off exponentially, 1.594. A zero is never sent.

Source: SparseLoCo, arXiv 2508.15706. There an entry has 12 bits of place; Elias-Fano (1974) needs 8.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from atoll.protocol.codecs.arithmetic import INFINITE, MAGNITUDE, NOTHING, Bytes, Floats, SparseArithmetic, Terms
from atoll.protocol.codecs.blocks import SMALLEST_NORMAL, check_scales, inlined, load, sum_of_magnitudes
from atoll.protocol.codecs.jit import f32, f32_in, f32_out, kernel, u8_in, u8_out
from atoll.protocol.codecs.sparse import BEYOND, TOPK2
from atoll.protocol.errors import InvalidMessage

_EDGE, _BLOCK = TOPK2.edge, TOPK2.block
_SPREAD = np.float32(1.6)
_LARGEST = np.finfo(np.float32).max
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_INFINITE = np.int32(INFINITE)
_SIGN_BIT = np.uint32(31)


@inlined
def _start(segment: Any, columns: Any, num_elements: Any) -> Any:
    """`Sparse.segment_start`."""
    tiles = columns // _EDGE
    strip = segment // (tiles * _EDGE)
    place = segment - strip * tiles * _EDGE
    height = min(_EDGE, num_elements // columns - strip * _EDGE)
    tile = place // height if tiles > 1 else 0
    return (strip * _EDGE + place - tile * height) * columns + tile * _EDGE


@inlined
def _load(terms: Any, beta: Any, columns: Any, first: Any, room: Any, block: Any) -> Any:  # noqa: PLR0917
    """A block, segment by segment; the bits of its largest magnitude, and of the smallest of those of its segments: at
    least as many as have room are as large as that."""
    values, minus, error = terms
    segment = np.empty(_EDGE, np.float32)
    bits = segment.view(np.uint32)
    most, least = np.uint32(0), INFINITE
    for j in range(_EDGE):
        start = _start(first + j, columns, values.size) if j < room else values.size
        if start + _EDGE <= values.size:  # so that the compiler knows how many there are
            load(values[start:], minus[start:], error[start:], beta, 0, _EDGE, segment)
        else:
            load(values, minus, error, beta, start, values.size - start, segment)
        top = np.uint32(0)
        for i in range(_EDGE):
            block[j * _EDGE + i] = segment[i]
            top = max(top, np.uint32(bits[i] & MAGNITUDE))
        most = max(most, top)
        if j < room:
            least = min(least, top)
    return np.int32(most), np.int32(least)


@inlined
def _candidates(block: Any, least: Any, magnitudes: Any, places: Any) -> Any:
    """The magnitudes that are not below `least`, with their places, in order."""
    bits, number = block.view(np.uint32), 0
    for i in range(_BLOCK):
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


@kernel(f32_in, f32_in, f32_in, f32, types.int64, f32_out, u8_out, u8_out)
def _topk2_pack(  # noqa: PLR0917
    values: Any, minus: Any, error: Any, beta: Any, columns: Any, scales: Any, entries: Any, segments: Any
) -> Any:
    """False if a value is not finite, or would not be when it is decoded."""
    block, magnitudes, found = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.int32), np.empty(_BLOCK, np.int32)
    picked, above, places = np.empty(_EDGE, np.float32), np.empty(_EDGE, np.float32), np.empty(_EDGE, np.uint8)
    bits, packed = picked.view(np.uint32), np.empty(_EDGE // 4, np.uint8)
    for index in range(scales.size // 2):
        first = index * _EDGE
        room = min(_EDGE, entries.size - first)
        most, least = _load((values, minus, error), beta, columns, first, room, block)
        if most >= _INFINITE:
            return False
        least = max(least, np.int32(1))
        number = _candidates(block, least, magnitudes, found)
        least = _smallest_of(magnitudes, number, least, most, room)
        num_equal = room - _num_at_least(magnitudes, number, np.int32(least + 1))  # of equal ones the first
        picked[:], places[:], packed[:] = _ZERO, np.uint8(0), np.uint8(0)
        candidates, number = number, 0
        for i in range(candidates):
            if magnitudes[i] > least or (magnitudes[i] == least and num_equal > 0):
                num_equal -= int(magnitudes[i] == least)
                picked[number] = block[found[i]]
                places[number] = np.uint8(found[i] % _EDGE)
                bit = number + found[i] // _EDGE
                packed[bit // 8] |= np.uint8(1 << (bit % 8))
                number += 1
        total = sum_of_magnitudes(picked)
        if total > _LARGEST:
            return False
        smallest = total
        for i in range(number):
            smallest = min(smallest, abs(picked[i]))
        mean = np.float32(total / np.float32(max(number, 1)))
        threshold = np.float32(smallest + np.float32(_SPREAD * np.float32(mean - smallest)))
        num_above = 0
        for i in range(_EDGE):
            is_above = abs(picked[i]) > threshold
            above[i] = picked[i] if is_above else _ZERO
            num_above += int(is_above)
            entries_code = np.uint32(is_above) | np.uint32(bits[i] >> _SIGN_BIT) << np.uint32(1)
            if i < room:
                entries[first + i] = places[i] | np.uint8(entries_code << np.uint32(6)) if i < number else np.uint8(0)
        sum_above = sum_of_magnitudes(above)
        low = np.float32(np.float32(total - sum_above) / np.float32(max(number - num_above, 1)))
        high = np.float32(sum_above / np.float32(max(num_above, 1)))
        scales[2 * index] = low if low >= SMALLEST_NORMAL else _ZERO
        scales[2 * index + 1] = high if high >= SMALLEST_NORMAL else _ZERO
        for i in range((room + 3) // 4):
            segments[first // 4 + i] = packed[i]
    return True


@kernel(f32_in, u8_in, u8_in, types.int64, f32, f32_out, f32_out)
def _topk2_scatter(  # noqa: PLR0917
    scales: Any, entries: Any, segments: Any, columns: Any, weight: Any, acc: Any, weights: Any
) -> Any:
    """The sum of the values' squares, which is a measure; -1 if there is no such element, and nothing is written."""
    squares = np.float64(0.0)
    for index in range(scales.size // 2):
        first = index * _EDGE
        room = min(_EDGE, entries.size - first)
        low, high = scales[2 * index], scales[2 * index + 1]
        number = segment = 0
        start = _start(first, columns, acc.size)
        while number < room and segment < room:
            place = number + segment
            if segments[first // 4 + place // 8] >> np.uint8(place % 8) & np.uint8(1):
                byte = entries[first + number]
                number += 1
                at = start + np.int64(byte & np.uint8(63))
                level = high if byte & np.uint8(64) else low
                value = -level if byte & np.uint8(128) else level
                if at >= acc.size:
                    return np.float64(-1.0)
                acc[at] = acc[at] + weight * value
                squares += np.float64(value) * np.float64(value)
                if weights.size:
                    weights[at] = weights[at] + weight
            else:
                segment += 1
                if segment < room:
                    start = _start(first + segment, columns, acc.size)
    return squares


@kernel(u8_in, u8_in, types.int64)
def _topk2_is_right(entries: Any, segments: Any, rest: Any) -> Any:
    """Whether places ascend within their segments and chunk, of whose last segment `rest` elements are there, and all
    that is beyond the last entry is zero."""
    for first in range(0, entries.size, _EDGE):
        room = min(_EDGE, entries.size - first)
        number = segment = 0
        last = np.int64(-1)
        for place in range((room + 3) // 4 * 8):
            if segments[first // 4 + place // 8] >> np.uint8(place % 8) & np.uint8(1):
                if number >= room or segment >= room:
                    return False
                at = np.int64(entries[first + number] & np.uint8(63))
                if at <= last or (first + segment == entries.size - 1 and at >= rest):
                    return False
                number, last = number + 1, at
            else:
                segment, last = segment + 1, np.int64(-1)
        for i in range(number, room):
            if entries[first + i]:
                return False
    return True


def _split(body: Bytes, num_elements: int) -> tuple[Floats, Bytes, Bytes]:
    scales, entries, _ = TOPK2.parts_bytes(num_elements)
    return body[:scales].view(np.float32), body[scales : scales + entries], body[scales + entries :]


def _encode(terms: Terms, columns: int, body: Bytes) -> bool:
    return bool(_topk2_pack(*terms, columns, *_split(body, terms.values.size)))


def _scatter(body: Bytes, columns: int, weight: np.float32, acc: Floats, weights: Floats = NOTHING) -> float:
    squares = _topk2_scatter(*_split(body, acc.size), columns, weight, acc, weights)
    if squares < 0:
        raise InvalidMessage(BEYOND)
    return math.sqrt(squares)


def _check(body: Bytes, num_elements: int, below: float) -> None:
    scales, entries, segments = _split(body, num_elements)
    check_scales(scales, below)
    if not _topk2_is_right(entries, segments, num_elements - (entries.size - 1) * _EDGE):
        raise InvalidMessage("encoded chunk: entries that are out of order or beyond its end")


ARITHMETIC = SparseArithmetic(
    encode=_encode,
    scatter=_scatter,
    check=_check,
    kernels=(_topk2_pack, _topk2_scatter, _topk2_is_right),
    golden="8152f69c82650a871917e6487acc16ed73b2013e9d25f12ca7120b4ddadff8fa",
)
