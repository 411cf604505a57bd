"""int4: blocks of values that share a scale, so that the largest one is 7 or -7 of it; a code is the quant plus 8."""

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
    unpacking,
)
from atoll.protocol.codecs.table import INT4

_BLOCK = INT4.block
_QUANTUM = np.float32(7.0)
_MOST = 8.0  # what four bits can say
_SCALE_OVERFLOW = np.float32(2.0**125)  # below it, any quant of 4 bits times the scale is finite
_ZERO = np.float32(0.0)
_BIAS = np.int32(8)


@packing
def _int4_pack(values: Any, minus: Any, error: Any, beta: Any, scales: Any, packed: Any) -> Any:  # noqa: PLR0917
    block, top = np.empty(_BLOCK, np.float32), np.empty(1, np.uint32)
    codes = np.empty(_BLOCK, np.uint8)
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
            codes[:] = np.uint8(_BIAS)
        else:
            scales[index] = scale
            for i in range(_BLOCK):
                codes[i] = np.uint8(np.int32(np.rint(block[i] / scale)) + _BIAS)
        stride = (count + 1) // 2
        for j in range(stride):
            packed[first // 2 + j] = codes[j] | codes[stride + j] << np.uint8(4)
    return True


@inlined
def _unpack(scale: Any, packed: Any, start: Any, stride: Any, block: Any) -> None:
    for j in range(stride):
        block[j] = scale * np.float32(np.int32(packed[start + j] & np.uint8(15)) - _BIAS)
    for j in range(stride):
        block[stride + j] = scale * np.float32(np.int32(packed[start + j] >> np.uint8(4)) - _BIAS)


@unpacking
def _int4_unpack(scales: Any, packed: Any, weight: Any, is_added: Any, out: Any) -> Any:
    block = np.zeros(_BLOCK, np.float32)
    squares = np.float64(0.0)
    for index in range(scales.size):
        first = index * _BLOCK
        count = min(_BLOCK, out.size - first)
        _unpack(scales[index], packed, first // 2, (count + 1) // 2, block)
        for i in range(count, _BLOCK):
            block[i] = _ZERO
        squares += put(block, first, count, weight, is_added, out)
    return squares


ARITHMETIC = arithmetic_of(
    INT4,
    _int4_pack,
    _int4_unpack,
    most=_MOST,
    golden="54253ac1d86e92c533066dcf02150a2841dad56a472db21d8b036f0cf0e89252",
)
