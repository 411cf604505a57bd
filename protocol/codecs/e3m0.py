"""e3m0: a sign and 3 bits of exponent: blocks of values, each 0 or one of 1, 1/2 ... 1/64 times the block's largest.

Source: arXiv 2501.18512.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.protocol.codecs.arithmetic import INFINITE, MAGNITUDE
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
from atoll.protocol.codecs.table import E3M0

_BLOCK = E3M0.block
_HALF_MANTISSA = np.uint32(0x00400000)
_MANTISSA_BITS = np.uint32(23)
_BELOW_SMALLEST = np.uint32(120)  # the biased exponent of 1/128, from which on values are nearer to 1/64 than to 0
_ONE = np.uint32(1)
_SEVEN = np.uint32(7)
_SIGN = np.uint32(8)
_TO_SIGN = np.uint32(28)  # from bit 31 to bit 3
_ZERO = np.float32(0.0)


@packing
def _e3m0_pack(values: Any, minus: Any, error: Any, beta: Any, scales: Any, packed: Any) -> Any:  # noqa: PLR0917
    block, top = np.empty(_BLOCK, np.float32), np.empty(1, np.uint32)
    bits, codes = block.view(np.uint32), np.empty(_BLOCK, np.uint8)
    for index in range(scales.size):
        first = index * _BLOCK
        count = min(_BLOCK, values.size - first)
        load(values, minus, error, beta, first, count, block)
        top[0] = largest_in(block)
        if top[0] >= INFINITE:
            return False
        scale = top.view(np.float32)[0]
        if scale < SMALLEST_NORMAL:
            scales[index] = _ZERO
            codes[:] = np.uint8(0)
        else:
            scales[index] = scale
            for i in range(_BLOCK):
                block[i] = block[i] / scale
            for i in range(_BLOCK):
                magnitude = np.uint32(bits[i] & MAGNITUDE)
                rounded = np.uint32(magnitude + _HALF_MANTISSA) >> _MANTISSA_BITS  # the exponent of the nearest power
                code = max(np.uint32(rounded), np.uint32(_BELOW_SMALLEST + _ONE)) - _BELOW_SMALLEST
                code = code if magnitude >> _MANTISSA_BITS >= _BELOW_SMALLEST else np.uint32(0)
                codes[i] = np.uint8(np.uint32(code) | np.uint32(bits[i] >> _TO_SIGN) & _SIGN)
        stride = (count + 1) // 2
        for j in range(stride):
            packed[first // 2 + j] = codes[j] | codes[stride + j] << np.uint8(4)
    return True


@inlined
def _power(code: Any) -> Any:
    """The bits of the fp32 number."""
    exponent = np.uint32(code & _SEVEN)
    power = np.uint32(exponent + _BELOW_SMALLEST) << _MANTISSA_BITS if exponent else np.uint32(0)
    return np.uint32(power) | np.uint32(code & _SIGN) << _TO_SIGN


@unpacking
def _e3m0_unpack(scales: Any, packed: Any, weight: Any, is_added: Any, out: Any) -> Any:
    block = np.zeros(_BLOCK, np.float32)
    bits = block.view(np.uint32)
    squares = np.float64(0.0)
    for index in range(scales.size):
        first = index * _BLOCK
        count = min(_BLOCK, out.size - first)
        scale, stride = scales[index], (count + 1) // 2
        for j in range(stride):
            bits[j] = _power(np.uint32(packed[first // 2 + j]))
        for j in range(stride):
            bits[stride + j] = _power(np.uint32(packed[first // 2 + j]) >> np.uint32(4))
        for i in range(count):
            block[i] = scale * block[i]
        for i in range(count, _BLOCK):
            block[i] = _ZERO
        squares += put(block, first, count, weight, is_added, out)
    return squares


ARITHMETIC = arithmetic_of(
    E3M0, _e3m0_pack, _e3m0_unpack, golden="b240dc3f5818b23c5351fe110a1d27423d0e4fa9de29a494b9658cd21750a4a4"
)
