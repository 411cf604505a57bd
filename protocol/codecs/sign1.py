"""sign1: the sign of each value, and one scale a block: the mean of the magnitudes.

Source: arXiv 1901.09847. The root mean square in place of the mean would make sparse blocks larger than
they are.
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
from atoll.protocol.codecs.table import SIGN1

_BLOCK = SIGN1.block
_LARGEST = np.finfo(np.float32).max
_ZERO = np.float32(0.0)
_SIGN_BIT = np.uint32(31)


@packing
def _sign1_pack(values: Any, minus: Any, error: Any, beta: Any, scales: Any, packed: Any) -> Any:  # noqa: PLR0917
    block = np.empty(_BLOCK, np.float32)
    bits = block.view(np.uint32)
    for index in range(scales.size):
        first = index * _BLOCK
        count = min(_BLOCK, values.size - first)
        load(values, minus, error, beta, first, count, block)
        scale = np.float32(sum_of_magnitudes(block) / np.float32(count))
        if largest_in(block) >= INFINITE or scale > _LARGEST:
            return False
        stride = (count + 7) // 8
        if scale < SMALLEST_NORMAL:
            scale = _ZERO
            for i in range(count):
                block[i] = _ZERO
        scales[index] = scale
        for j in range(stride):
            byte = np.uint32(0)
            for plane in range(8):
                byte |= np.uint32(bits[plane * stride + j] >> _SIGN_BIT) << np.uint32(plane)
            packed[first // 8 + j] = np.uint8(byte)
    return True


@inlined
def _unpack(scale: Any, packed: Any, start: Any, stride: Any, block: Any) -> None:
    bits = block.view(np.uint32)
    word = np.empty(1, np.float32)
    word[0] = scale
    magnitude = word.view(np.uint32)[0]
    for plane in range(8):
        shift = np.uint32(plane)
        for j in range(stride):
            sign = np.uint32(packed[start + j]) >> shift & np.uint32(1)
            bits[plane * stride + j] = magnitude ^ sign << _SIGN_BIT


@unpacking
def _sign1_unpack(scales: Any, packed: Any, weight: Any, is_added: Any, out: Any) -> Any:
    block = np.zeros(_BLOCK, np.float32)
    squares = np.float64(0.0)
    for index in range(scales.size):
        first = index * _BLOCK
        count = min(_BLOCK, out.size - first)
        stride = (count + 7) // 8
        _unpack(scales[index], packed, first // 8, stride, block)
        for i in range(count, _BLOCK):
            block[i] = _ZERO
        squares += put(block, first, count, weight, is_added, out)
    return squares


ARITHMETIC = arithmetic_of(
    SIGN1, _sign1_pack, _sign1_unpack, golden="118b97deba49cf54b48fb32ae04955811feb4d0cc551c1f41139f5aabccc6e5f"
)
