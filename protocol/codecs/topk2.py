"""topk2: of each 4096 values, which are a tile of 64 rows and columns, the 64 largest, each as one of four levels.

The levels are those of int2, over what is sent: values above a threshold, and the others, each by their mean magnitude,
and the sign. The threshold lies 1.6 times as far above the smallest as the mean does, near the best one of a tail that
falls off exponentially, 1.594. A zero is never sent.

Source: SparseLoCo, arXiv 2508.15706. There an entry has 12 bits of place; Elias-Fano (1974) needs 8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from atoll.protocol.codecs.blocks import SMALLEST_NORMAL, sum_of_magnitudes
from atoll.protocol.codecs.jit import f32, f32_in, f32_out, kernel, u8_in, u8_out
from atoll.protocol.codecs.picking import BLOCK, is_set, load_block, pick, segment_start
from atoll.protocol.codecs.sparse import TOPK2
from atoll.protocol.codecs.sparse_arithmetic import arithmetic_of

_ROOM = TOPK2.block_entries
_SPREAD = np.float32(1.6)
_LARGEST = np.finfo(np.float32).max
_ZERO = np.float32(0.0)
_SIGN_BIT = np.uint32(31)


@kernel(f32_in, f32_in, f32_in, f32, types.int64, f32_out, u8_out, u8_out)
def _topk2_pack(  # noqa: PLR0917
    values: Any, minus: Any, error: Any, beta: Any, columns: Any, scales: Any, entries: Any, buckets: Any
) -> Any:
    """False if a value is not finite, or would not be when it is decoded."""
    block, above = np.empty(BLOCK, np.float32), np.empty(_ROOM, np.float32)
    picked, places = np.empty(_ROOM, np.float32), np.empty(_ROOM, np.uint8)
    bits, packed = picked.view(np.uint32), np.empty(_ROOM // 4, np.uint8)
    for index in range(scales.size // 2):
        first = index * _ROOM
        room = min(_ROOM, entries.size - first)
        load_block((values, minus, error), beta, columns, first, room, block)
        number = pick(block, 64, room, room, picked, places, packed)
        total = sum_of_magnitudes(picked)
        if number < 0 or total > _LARGEST:
            return False
        smallest = total
        for i in range(number):
            smallest = min(smallest, abs(picked[i]))
        mean = np.float32(total / np.float32(max(number, 1)))
        threshold = np.float32(smallest + np.float32(_SPREAD * np.float32(mean - smallest)))
        num_above = 0
        for i in range(_ROOM):
            is_above = abs(picked[i]) > threshold
            above[i] = picked[i] if is_above else _ZERO
            num_above += int(is_above)
            code = np.uint32(is_above) | np.uint32(bits[i] >> _SIGN_BIT) << np.uint32(1)
            if i < room:
                entries[first + i] = places[i] | np.uint8(code << np.uint32(6)) if i < number else np.uint8(0)
        sum_above = sum_of_magnitudes(above)
        low = np.float32(np.float32(total - sum_above) / np.float32(max(number - num_above, 1)))
        high = np.float32(sum_above / np.float32(max(num_above, 1)))
        scales[2 * index] = low if low >= SMALLEST_NORMAL else _ZERO
        scales[2 * index + 1] = high if high >= SMALLEST_NORMAL else _ZERO
        for i in range((room + 3) // 4):
            buckets[first // 4 + i] = packed[i]
    return True


@kernel(f32_in, u8_in, u8_in, types.int64, types.int64, f32, f32, f32_out, f32_out)
def _topk2_scatter(  # noqa: PLR0917
    scales: Any,
    entries: Any,
    buckets: Any,
    num_elements: Any,
    columns: Any,
    weight: Any,
    of_site: Any,
    acc: Any,
    weights: Any,
) -> Any:
    """The sum of the values' squares, one after the other; -1 if an entry has no such element, those before it
    count."""
    squares = np.float64(0.0)
    for index in range(scales.size // 2):
        first = index * _ROOM
        room = min(_ROOM, entries.size - first)
        low, high = scales[2 * index], scales[2 * index + 1]
        number = segment = 0
        start, bits = segment_start(first, columns, num_elements), buckets[first // 4 :]
        while number < room and segment < room:
            if is_set(bits, number + segment):
                byte = entries[first + number]
                number += 1
                at = start + np.int64(byte & np.uint8(63))
                level = high if byte & np.uint8(64) else low
                value = -level if byte & np.uint8(128) else level
                if at >= num_elements:
                    return np.float64(-1.0)
                if acc.size:
                    acc[at] = acc[at] + weight * value
                squares += np.float64(value) * np.float64(value)
                if weights.size:
                    weights[at] = weights[at] + of_site
            else:
                segment += 1
                if segment < room:
                    start = segment_start(first + segment, columns, num_elements)
    return squares


ARITHMETIC = arithmetic_of(
    TOPK2,
    _topk2_pack,
    _topk2_scatter,
    kernels=(_topk2_pack, _topk2_scatter),
    golden="673a46c1db9f63bc30e0778fc6cdcad5e3a864d26cec0ee46178449cefe1af06",
)
