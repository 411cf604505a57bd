"""bf16: the upper halves of fp32 values, rounded to nearest, ties to even."""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.protocol.codecs import arithmetic, scratch
from atoll.protocol.codecs.arithmetic import Arithmetic, Bytes, Floats, Golden
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


def _encode(values: Floats, minus: Floats | None, body: Bytes) -> bool:
    if minus is not None:
        values = arithmetic.difference(values, minus)
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
    golden=(
        Golden(
            "01020001000000001000000000000000803f803f823fabbe00000080c63facbf833fe4bf64bf623f69bf33be59bd1c3f",
            "4254a33f064c493f1ce95f3fef3dc43e1132f93fe485543e866b90bf67757dbfe82831bdf69680bf0148263fccfda23f"
            "03c381bf9ad5473f759cb0bf2c200fbf",
        ),
        Golden(
            "01020001000000001000000000000000fe034000c0002001c080fc83800000000000008040000f000f80000000000000",
            "64672703a75741005b461a8051e337003382da80d5aa2a8343ff35006a37090042431f00cd2a09805f1a07803c0bbf00"
            "8ab058810b3fa58049a30481cf339780",
        ),
        Golden(
            "01020001000000001000000000000000fc83da83b98397836b832883ca8206820602ca0228036b039703b903da03fc03",
            "acb42283df8f0f8354c1ed8228adcc82a392918274f562827a6f0b82118b9f80429734013cd803025ad063025ff99002"
            "e891d00230850103a956120390902503",
        ),
    ),
)
