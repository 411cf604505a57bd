"""fp32: the values as they are."""

from __future__ import annotations

import numpy as np

from atoll.protocol.codecs import arithmetic
from atoll.protocol.codecs.arithmetic import Arithmetic, Bytes, Floats, Terms


def _encode(terms: Terms, body: Bytes) -> bool:
    return arithmetic.is_finite(terms.result(body.view(np.float32)))


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
    golden="72771c0cbcc3e7ca9eeea379f8de64a7dfbb705c9e4e40933b1dd4aa568351ad",
)
