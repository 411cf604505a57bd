"""bf16: the upper halves of fp32 values, rounded to nearest, ties to even."""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.protocol.codecs import arithmetic, scratch
from atoll.protocol.codecs.arithmetic import Arithmetic, Bytes, Floats, Terms
from atoll.protocol.codecs.jit import f32_in, f32_out, kernel, u16_in, u16_out

_OVERFLOW = np.uint32(0x7F7F8000)  # from here on, rounding gives infinity
_MAGNITUDE = np.uint16(0x7FFF)
_HALF_BELOW = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_SIXTEEN = np.uint32(16)


@kernel(f32_in, u16_out)
def _bf16_encode(values: Any, out: Any) -> None:
    bits = values.view(np.uint32)
    for i in range(out.size):
        word = bits[i]
        out[i] = np.uint16(np.uint32(word + _HALF_BELOW + ((word >> _SIXTEEN) & _ONE)) >> _SIXTEEN)


@kernel(u16_in, f32_out)
def _bf16_decode(halves: Any, out: Any) -> None:
    bits = out.view(np.uint32)
    for i in range(out.size):
        bits[i] = np.uint32(halves[i]) << _SIXTEEN


def _encode(terms: Terms, body: Bytes) -> bool:
    values = terms.result()
    _bf16_encode(values, body.view(np.uint16))
    return bool(arithmetic.largest(values) < _OVERFLOW)


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
    kernels=(_bf16_encode, _bf16_decode),
    golden="39d282097e997689459ef80c706449646dc4de714f1bc40162df1bba1bb4ca27",
)
