"""fp16: IEEE binary16, rounded to nearest, ties to even."""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.protocol.codecs import arithmetic, scratch
from atoll.protocol.codecs.arithmetic import MAGNITUDE, Arithmetic, Bytes, Floats, Terms
from atoll.protocol.codecs.blocks import PIECE, largest_in, load, writing
from atoll.protocol.codecs.jit import f32_out, kernel, u16_in, u16_out

_OVERFLOW = np.uint32(0x477FF000)  # 65520: from here on, rounding gives infinity
_SMALLEST_NORMAL = np.uint32(0x38800000)  # 2^-14
_EXPONENTS = np.uint32((127 - 15) << 23)  # between the biases
_HALF_BELOW = np.uint32(0xFFF)
_ONE = np.uint32(1)
_THIRTEEN = np.uint32(13)
_SIXTEEN = np.uint32(16)
_SIGN = np.uint32(0x8000)
_INFINITE = np.uint16(0x7C00)
_MAGNITUDE = np.uint16(0x7FFF)
_HALF = np.float32(0.5)  # its last bit is 2^-24, the smallest subnormal number of binary16
_HALF_BITS = np.uint32(0x3F000000)
_SUBNORMAL_UNIT = np.float32(2.0**-24)
_HALF_EXPONENT = np.uint32(0x0F800000)  # the exponent bits of binary16 at those of binary32
_HALF_MANTISSA = np.uint32(0x3FF)


@writing(u16_out)
def _fp16_write(values: Any, minus: Any, error: Any, beta: Any, out: Any) -> Any:
    block, shifted = np.empty(PIECE, np.float32), np.empty(PIECE, np.float32)
    bits, shifted_bits = block.view(np.uint32), shifted.view(np.uint32)
    for piece in range(-(-out.size // PIECE)):
        first = piece * PIECE
        count = min(PIECE, out.size - first)
        load(values, minus, error, beta, first, count, block)
        if largest_in(block) >= _OVERFLOW:
            return False
        for i in range(PIECE):
            shifted[i] = abs(block[i]) + _HALF
        for i in range(count):
            word = np.uint32(bits[i] & MAGNITUDE)
            odd = (word >> _THIRTEEN) & _ONE
            normal = np.uint32(word - _EXPONENTS + _HALF_BELOW + odd) >> _THIRTEEN
            subnormal = np.uint32(shifted_bits[i] - _HALF_BITS)
            half = normal if word >= _SMALLEST_NORMAL else subnormal
            out[first + i] = np.uint16(np.uint32(half) | np.uint32(bits[i] >> _SIXTEEN) & _SIGN)
    return True


@kernel(u16_in, f32_out)
def _fp16_decode(halves: Any, out: Any) -> None:
    bits = out.view(np.uint32)
    subnormals = np.empty(PIECE, np.float32)
    subnormal_bits = subnormals.view(np.uint32)
    for piece in range(-(-out.size // PIECE)):
        first = piece * PIECE
        count = min(PIECE, out.size - first)
        for i in range(count):
            subnormals[i] = np.float32(np.int32(np.uint32(halves[first + i]) & _HALF_MANTISSA)) * _SUBNORMAL_UNIT
        for i in range(count):
            half = np.uint32(halves[first + i])
            word = np.uint32(half & np.uint32(_MAGNITUDE)) << _THIRTEEN
            is_normal = word & _HALF_EXPONENT
            magnitude = np.uint32(word + _EXPONENTS) if is_normal else subnormal_bits[i]
            bits[first + i] = np.uint32(magnitude) | np.uint32(half & _SIGN) << _SIXTEEN


def _encode(terms: Terms, body: Bytes) -> bool:
    return bool(_fp16_write(*terms, body.view(np.uint16)))


def _decode(body: Bytes, out: Floats) -> None:
    _fp16_decode(body.view(np.uint16), out)


def _accumulate(body: Bytes, weight: np.float32, acc: Floats) -> float:
    values = scratch.floats("decoded", acc.size)
    _decode(body, values)
    return arithmetic.add_with_norm(values, weight, acc)


def _check(body: Bytes, below: float) -> None:
    """2^16 and more are not finite."""
    limit = np.uint16(np.float16(below).view(np.uint16)) if below < 2.0**16 else _INFINITE
    arithmetic.refuse_if(body.size and np.max(body.view(np.uint16) & _MAGNITUDE) >= limit, below)


ARITHMETIC = Arithmetic(
    encode=_encode,
    decode=_decode,
    accumulate=_accumulate,
    check=_check,
    kernels=(_fp16_write, _fp16_decode),
    golden="d9672b3b7f5710f7d02c7799cb8d233024b86669fcc8e88885a8c8a1011e6c21",
)
