"""Codecs of blocks of values that share scales: what their kernels have in common, compiled into each of them.

The array of a block is the kernel's own, so that LLVM knows that nothing overlaps; what is beyond the last value is 0.
Kernels that are cached on disk do not notice a change in this file, or in picking.py: remove `__pycache__` after one.
A codec adds two kernels: one packs the blocks of `(values - minus) + beta * error` and returns False if a value is not
finite, or would not be when it is decoded; the other one unpacks them, and sets or adds (`put`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numba import boolean, njit

from atoll.protocol.codecs.arithmetic import MAGNITUDE, Arithmetic, Bytes, Floats, Terms
from atoll.protocol.codecs.jit import Kernel, f32, f32_in, f32_out, kernel, u8_in, u8_out
from atoll.protocol.codecs.table import Packed
from atoll.protocol.errors import InvalidMessage

SMALLEST_NORMAL = np.float32(2.0**-126)
LANES = 16
_ZERO = np.float32(0.0)

inlined = njit(nogil=True, error_model="numpy", inline="always")
PIECE = 1024
"""Elements that a codec without blocks works on at a time: they stay in the first cache."""

writing = partial(kernel, f32_in, f32_in, f32_in, f32)
"""(values, minus, error, beta, what is written); `minus` and `error` may be empty."""
packing = writing(f32_out, u8_out)
"""The same, of a codec of blocks: their scales, and the packed elements."""
unpacking = kernel(f32_in, u8_in, f32, boolean, f32_out)
"""(scales, packed elements, weight, whether it is added, out); the sum of the values' squares, which is a measure."""


@inlined
def load(values: Any, minus: Any, error: Any, beta: Any, first: Any, count: Any, block: Any) -> None:  # noqa: PLR0917
    if minus.size:
        for i in range(count):
            block[i] = values[first + i] - minus[first + i]
    else:
        for i in range(count):
            block[i] = values[first + i]
    if error.size:
        for i in range(count):
            block[i] = block[i] + beta * error[first + i]
    for i in range(count, block.size):
        block[i] = _ZERO


@inlined
def largest_in(block: Any) -> Any:
    """The bits of the largest magnitude, see `arithmetic.largest`."""
    bits = block.view(np.uint32)
    top = np.uint32(0)
    for i in range(bits.size):
        top = max(top, np.uint32(bits[i] & MAGNITUDE))
    return top


@inlined
def folded(lanes: Any) -> Any:
    """The sum of 16 lanes: to each the one 8 further on is added, then 4, 2 and 1."""
    half = LANES // 2
    while half:
        for j in range(half):
            lanes[j] = lanes[j] + lanes[j + half]
        half //= 2
    return lanes[0]


@inlined
def sum_of_magnitudes(block: Any) -> Any:
    """Lane j sums elements j, j + 16, j + 32 and so on."""
    lanes = np.zeros(LANES, np.float32)
    for i in range(0, block.size, LANES):
        for j in range(LANES):
            lanes[j] = lanes[j] + abs(block[i + j])
    return folded(lanes)


@inlined
def put(block: Any, first: Any, count: Any, weight: Any, is_added: Any, out: Any) -> Any:  # noqa: PLR0917
    """`out := block`, or `out := out + weight * block`, from element `first` on."""
    if not is_added:
        for i in range(count):
            out[first + i] = block[i]
        return np.float64(0.0)
    for i in range(count):
        out[first + i] = out[first + i] + weight * block[i]
    squares = np.zeros(LANES, np.float64)
    for i in range(0, block.size, LANES):
        for j in range(LANES):
            squares[j] += np.float64(block[i + j]) * np.float64(block[i + j])
    return folded(squares)


def check_scales(scales: Floats, below: float) -> None:
    """Raises InvalidMessage unless each is 0, or a normal number below that one."""
    limit = np.float32(below if below < 2.0**128 else math.inf)
    if not np.all((scales == _ZERO) | ((scales >= SMALLEST_NORMAL) & (scales < limit))):
        raise InvalidMessage("encoded chunk: a scale that is not finite, negative, too small or too large")


def arithmetic_of(form: Packed, pack: Kernel, unpack: Kernel, *, golden: str, most: float = 1.0) -> Arithmetic:
    """`most`: the largest magnitude of a value whose scale is 1, or a power of two above it."""

    def split(body: Bytes) -> tuple[Floats, Bytes]:
        at = form.scales_bytes(body.size)
        return body[:at].view(np.float32), body[at:]

    def encode(terms: Terms, body: Bytes) -> bool:
        return bool(pack(*terms, *split(body)))

    def decode(body: Bytes, out: Floats) -> None:
        unpack(*split(body), _ZERO, False, out)

    def accumulate(body: Bytes, weight: np.float32, acc: Floats) -> float:
        return math.sqrt(unpack(*split(body), weight, True, acc))

    def check(body: Bytes, below: float) -> None:
        scales, _ = split(body)
        check_scales(scales, min(below, 2.0**128) / most)

    return Arithmetic(
        encode=encode, decode=decode, accumulate=accumulate, check=check, kernels=(pack, unpack), golden=golden
    )
