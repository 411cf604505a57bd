"""fp32: the values as they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.protocol.codecs import arithmetic
from atoll.protocol.codecs.arithmetic import INFINITE, Arithmetic, Bytes, Floats, Terms
from atoll.protocol.codecs.blocks import PIECE, largest_in, load, writing
from atoll.protocol.codecs.jit import f32_out


@writing(f32_out)
def _fp32_write(values: Any, minus: Any, error: Any, beta: Any, out: Any) -> Any:
    block = np.empty(PIECE, np.float32)
    for piece in range(-(-out.size // PIECE)):
        first = piece * PIECE
        count = min(PIECE, out.size - first)
        load(values, minus, error, beta, first, count, block)
        if largest_in(block) >= INFINITE:
            return False
        for i in range(count):
            out[first + i] = block[i]
    return True


def _encode(terms: Terms, body: Bytes) -> bool:
    return bool(_fp32_write(*terms, body.view(np.float32)))


def _decode(body: Bytes, out: Floats) -> None:
    out[:] = body.view(np.float32)


def _accumulate(body: Bytes, weight: np.float32, acc: Floats) -> float:
    return arithmetic.add_with_norm(body.view(np.float32), weight, acc)


def _check(body: Bytes, below: float) -> None:
    arithmetic.refuse_if(arithmetic.largest(body.view(np.float32)) >= arithmetic.bits_of(below), below)


ARITHMETIC = Arithmetic(
    encode=_encode,
    decode=_decode,
    accumulate=_accumulate,
    check=_check,
    kernels=(_fp32_write,),
    golden="c9f54944128e7da11fadd2e2d9b12568888989ec48ccfce6e6c209d9fdf15bff",
)
