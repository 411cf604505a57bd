"""bf16: the upper halves of fp32 values, rounded to nearest, ties to even."""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.protocol.codecs import arithmetic, scratch
from atoll.protocol.codecs.arithmetic import Arithmetic, Bytes, Floats, Terms
from atoll.protocol.codecs.blocks import PIECE, largest_in, load, writing
from atoll.protocol.codecs.jit import f32_out, kernel, u16_in, u16_out

_OVERFLOW = np.uint32(0x7F7F8000)  # from here on, rounding gives infinity
_MAGNITUDE = np.uint16(0x7FFF)
_HALF_BELOW = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_SIXTEEN = np.uint32(16)


@writing(u16_out)
def _bf16_write(values: Any, minus: Any, error: Any, beta: Any, out: Any) -> Any:
    block = np.empty(PIECE, np.float32)
    bits = block.view(np.uint32)
    for piece in range(-(-out.size // PIECE)):
        first = piece * PIECE
        count = min(PIECE, out.size - first)
        load(values, minus, error, beta, first, count, block)
        if largest_in(block) >= _OVERFLOW:
            return False
        for i in range(count):
            word = bits[i]
            out[first + i] = np.uint16(np.uint32(word + _HALF_BELOW + ((word >> _SIXTEEN) & _ONE)) >> _SIXTEEN)
    return True


@kernel(u16_in, f32_out)
def _bf16_decode(halves: Any, out: Any) -> None:
    bits = out.view(np.uint32)
    for i in range(out.size):
        bits[i] = np.uint32(halves[i]) << _SIXTEEN


def _encode(terms: Terms, body: Bytes) -> bool:
    return bool(_bf16_write(*terms, body.view(np.uint16)))


def _decode(body: Bytes, out: Floats) -> None:
    _bf16_decode(body.view(np.uint16), out)


def _accumulate(body: Bytes, weight: np.float32, acc: Floats) -> float:
    values = scratch.floats("decoded", acc.size)
    _decode(body, values)
    return arithmetic.add_with_norm(values, weight, acc)


def _check(body: Bytes, below: float) -> None:
    arithmetic.refuse_if(
        body.size and np.max(body.view(np.uint16) & _MAGNITUDE) >= arithmetic.bits_of(below) >> _SIXTEEN, below
    )


ARITHMETIC = Arithmetic(
    encode=_encode,
    decode=_decode,
    accumulate=_accumulate,
    check=_check,
    kernels=(_bf16_write, _bf16_decode),
    golden="fae56c7ca56ba1e164cc95e4d27b70f91b35d4b9a197d32d82b86233f0ed5135",
)
