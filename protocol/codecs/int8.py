"""int8: blocks of values that share a scale, so that the largest one is 127 or -127 of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.protocol.codecs.arithmetic import INFINITE
from atoll.protocol.codecs.blocks import (
    SMALLEST_NORMAL,
    arithmetic_of,
    largest_in,
    load,
    packing,
    put,
    unpacking,
)
from atoll.protocol.codecs.table import INT8

_BLOCK = INT8.block
_QUANTUM = np.float32(127.0)
_MOST = 128.0  # what a byte can say
_SCALE_OVERFLOW = np.float32(2.0**121)  # below it, any quant of 8 bits times the scale is finite
_ZERO = np.float32(0.0)


@packing
def _int8_pack(values: Any, minus: Any, error: Any, beta: Any, scales: Any, packed: Any) -> Any:  # noqa: PLR0917
    block, top = np.empty(_BLOCK, np.float32), np.empty(1, np.uint32)
    quants = packed.view(np.int8)
    for index in range(scales.size):
        first = index * _BLOCK
        count = min(_BLOCK, values.size - first)
        load(values, minus, error, beta, first, count, block)
        top[0] = largest_in(block)
        scale = np.float32(top.view(np.float32)[0] / _QUANTUM)
        if top[0] >= INFINITE or scale >= _SCALE_OVERFLOW:
            return False
        if scale < SMALLEST_NORMAL:
            scales[index] = _ZERO
            for i in range(count):
                quants[first + i] = np.int8(0)
        else:
            scales[index] = scale
            for i in range(count):
                quants[first + i] = np.int8(np.rint(block[i] / scale))
    return True


@unpacking
def _int8_unpack(scales: Any, packed: Any, weight: Any, is_added: Any, out: Any) -> Any:
    block = np.zeros(_BLOCK, np.float32)
    quants = packed.view(np.int8)
    squares = np.float64(0.0)
    for index in range(scales.size):
        first = index * _BLOCK
        count = min(_BLOCK, out.size - first)
        scale = scales[index]
        for i in range(count):
            block[i] = scale * np.float32(quants[first + i])
        for i in range(count, _BLOCK):
            block[i] = _ZERO
        squares += put(block, first, count, weight, is_added, out)
    return squares


ARITHMETIC = arithmetic_of(
    INT8,
    _int8_pack,
    _int8_unpack,
    most=_MOST,
    golden="469ee9d0b00dbbeeec1ccca5493311af569f3a6757d6c6a3c7838b0da0f3f34a",
)
