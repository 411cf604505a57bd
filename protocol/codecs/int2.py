"""int2: four levels a block: values above 1.25 times the mean magnitude, and the others, each by their mean magnitude,
and the sign. 1.25 is near the best threshold of normal numbers, 1.23.

Source: bin means as in SparseLoCo, arXiv 2508.15706.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.protocol.codecs.arithmetic import INFINITE
from atoll.protocol.codecs.blocks import (
    SMALLEST_NORMAL,
    arithmetic_of,
    inlined,
    largest_in,
    load,
    packing,
    put,
    sum_of_magnitudes,
    unpacking,
)
from atoll.protocol.codecs.table import INT2

_BLOCK = INT2.block
_THRESHOLD = np.float32(1.25)
_LARGEST = np.finfo(np.float32).max
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_SIGN_BIT = np.uint32(31)


@inlined
def _sum_above(block: Any, threshold: Any, num_above: Any) -> Any:
    """Of the magnitudes above it, in lanes as `sum_of_magnitudes`; their number into `num_above`."""
    above, number = np.empty(_BLOCK, np.float32), np.uint32(0)
    for i in range(_BLOCK):
        magnitude = abs(block[i])
        is_above = magnitude > threshold
        above[i] = magnitude if is_above else _ZERO
        number += np.uint32(is_above)
    num_above[0] = np.float32(np.int32(number))
    return sum_of_magnitudes(above)


@packing
def _int2_pack(values: Any, minus: Any, error: Any, beta: Any, scales: Any, packed: Any) -> Any:  # noqa: PLR0917
    block, num_above = np.empty(_BLOCK, np.float32), np.empty(1, np.float32)
    bits, codes = block.view(np.uint32), np.empty(_BLOCK, np.uint8)
    for index in range(scales.size // 2):
        first = index * _BLOCK
        count = min(_BLOCK, values.size - first)
        load(values, minus, error, beta, first, count, block)
        total = sum_of_magnitudes(block)
        if largest_in(block) >= INFINITE or total > _LARGEST:
            return False
        threshold = np.float32(_THRESHOLD * np.float32(total / np.float32(count)))
        above = _sum_above(block, threshold, num_above)
        high = np.float32(above / max(num_above[0], _ONE))
        low = np.float32(np.float32(total - above) / np.float32(np.float32(count) - num_above[0]))
        scales[2 * index] = low if low >= SMALLEST_NORMAL else _ZERO
        scales[2 * index + 1] = high if high >= SMALLEST_NORMAL else _ZERO
        for i in range(_BLOCK):
            is_above = np.uint32(abs(block[i]) > threshold)
            codes[i] = np.uint8(is_above | np.uint32(bits[i] >> _SIGN_BIT) << np.uint32(1))
        stride = (count + 3) // 4
        for j in range(stride):
            lower = codes[j] | codes[stride + j] << np.uint8(2)
            packed[first // 4 + j] = lower | codes[2 * stride + j] << np.uint8(4) | codes[3 * stride + j] << np.uint8(6)
    return True


@unpacking
def _int2_unpack(scales: Any, packed: Any, weight: Any, is_added: Any, out: Any) -> Any:
    block = np.zeros(_BLOCK, np.float32)
    squares = np.float64(0.0)
    for index in range(scales.size // 2):
        first = index * _BLOCK
        count = min(_BLOCK, out.size - first)
        low, high, stride = scales[2 * index], scales[2 * index + 1], (count + 3) // 4
        for plane in range(4):
            for j in range(stride):
                code = packed[first // 4 + j] >> np.uint8(2 * plane)
                level = high if code & np.uint8(1) else low
                block[plane * stride + j] = -level if code & np.uint8(2) else level
        for i in range(count, _BLOCK):
            block[i] = _ZERO
        squares += put(block, first, count, weight, is_added, out)
    return squares


ARITHMETIC = arithmetic_of(
    INT2, _int2_pack, _int2_unpack, golden="4377a3fa259872ff8b27507859b6127bf29f7158df605a876298e135b6f55a37"
)
