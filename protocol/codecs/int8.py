"""int8: blocks of values that share a scale, so that the largest one is 127 or -127 of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from atoll.protocol.codecs.arithmetic import INFINITE, MAGNITUDE, Arithmetic, Bytes, Floats
from atoll.protocol.codecs.jit import f32, f32_in, f32_out, i8_in, i8_out, kernel
from atoll.protocol.codecs.table import INT8_BLOCK
from atoll.protocol.errors import InvalidMessage

_QUANTUM = np.float32(127.0)
_QUANTS = 128.0  # the power of two above it
_SMALLEST_NORMAL = np.float32(2.0**-126)
_SCALE_OVERFLOW = np.float32(2.0**121)  # below it, any quant of 8 bits times the scale is finite
_ZERO = np.float32(0.0)
_NOTHING = np.empty(0, np.float32)


@njit(nogil=True, error_model="numpy", inline="always")
def _quantize(values: Any, count: Any, quants: Any, first_out: Any) -> Any:
    """One block: writes its quants and returns its scale; -1 if a value is not finite, or may not be when decoded. The
    largest magnitude is found on the bits, see `arithmetic.largest`."""
    bits = values.view(np.uint32)
    top = np.uint32(0)
    for i in range(count):
        top = max(top, np.uint32(bits[i] & MAGNITUDE))
    if top >= INFINITE:
        return np.float32(-1.0)
    word = np.empty(1, np.uint32)
    word[0] = top
    scale = np.float32(word.view(np.float32)[0] / _QUANTUM)
    if scale >= _SCALE_OVERFLOW:
        return np.float32(-1.0)
    if scale < _SMALLEST_NORMAL:
        for i in range(count):
            quants[first_out + i] = np.int8(0)
        return _ZERO
    for i in range(count):
        quants[first_out + i] = np.int8(np.rint(values[i] / scale))
    return scale


@kernel(f32_in, f32_in, f32_out, i8_out)
def _int8_encode(values: Any, minus: Any, scales: Any, quants: Any) -> Any:
    """`minus` may be empty."""
    difference = np.empty(INT8_BLOCK, np.float32)  # an array of its own: LLVM then knows that nothing overlaps
    for block in range(scales.size):
        first = block * INT8_BLOCK
        count = min(INT8_BLOCK, values.size - first)
        if minus.size:
            for i in range(count):
                difference[i] = values[first + i] - minus[first + i]
        else:
            for i in range(count):
                difference[i] = values[first + i]
        scale = _quantize(difference, count, quants, first)
        if scale < _ZERO:
            return False
        scales[block] = scale
    return True


@kernel(f32_in, i8_in, f32_out)
def _int8_decode(scales: Any, quants: Any, out: Any) -> None:
    for block in range(scales.size):
        scale = scales[block]
        first = block * INT8_BLOCK
        for i in range(min(INT8_BLOCK, out.size - first)):
            out[first + i] = scale * np.float32(quants[first + i])


@kernel(f32_in, i8_in, f32, f32_out)
def _int8_accumulate(scales: Any, quants: Any, weight: Any, acc: Any) -> None:
    for block in range(scales.size):
        scale = scales[block]
        first = block * INT8_BLOCK
        for i in range(min(INT8_BLOCK, acc.size - first)):
            acc[first + i] = acc[first + i] + weight * (scale * np.float32(quants[first + i]))


@kernel(f32_in, i8_in)
def _int8_square_sum(scales: Any, quants: Any) -> Any:
    total = np.float64(0.0)
    for block in range(scales.size):
        first = block * INT8_BLOCK
        squares = np.int32(0)
        for i in range(first, min(first + INT8_BLOCK, quants.size)):
            squares += np.int32(quants[i]) * np.int32(quants[i])
        total += np.float64(scales[block]) * np.float64(scales[block]) * np.float64(squares)
    return total


def _scales_and_quants(body: Bytes) -> tuple[Floats, npt.NDArray[np.int8]]:
    split = 4 * -(-body.size // (4 + INT8_BLOCK))
    return body[:split].view(np.float32), body[split:].view(np.int8)


def _encode(values: Floats, minus: Floats | None, body: Bytes) -> bool:
    return bool(_int8_encode(values, _NOTHING if minus is None else minus, *_scales_and_quants(body)))


def _decode(body: Bytes, out: Floats) -> None:
    _int8_decode(*_scales_and_quants(body), out)


def _accumulate(body: Bytes, weight: np.float32, acc: Floats) -> float:
    scales, quants = _scales_and_quants(body)
    _int8_accumulate(scales, quants, weight, acc)
    return math.sqrt(_int8_square_sum(scales, quants))


def _check(body: Bytes, below: float) -> None:
    scales, _ = _scales_and_quants(body)
    largest_scale = min(_SCALE_OVERFLOW, np.float32(below / _QUANTS))
    if not np.all((scales == _ZERO) | ((scales >= _SMALLEST_NORMAL) & (scales < largest_scale))):
        raise InvalidMessage("encoded chunk: a scale that is not finite, negative, too small or too large")


ARITHMETIC = Arithmetic(
    encode=_encode,
    decode=_decode,
    accumulate=_accumulate,
    check=_check,
    kernels=(_int8_encode, _int8_decode, _int8_accumulate, _int8_square_sum),
    golden="8cef43ec258ca13f646ece33b856aa0f0fe308fb1ad0dab253bf53f14c6b32da",
)
