"""fp32: the values as they are."""

from __future__ import annotations

import numpy as np

from atoll.protocol.codecs import arithmetic
from atoll.protocol.codecs.arithmetic import Arithmetic, Bytes, Floats


def _encode(values: Floats, minus: Floats | None, body: Bytes) -> bool:
    out = body.view(np.float32)
    if minus is None:
        out[:] = values
    else:
        arithmetic.subtract(values, minus, out)
    return arithmetic.is_finite(out)


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
    golden="049e8f3a8857dd1071c59001d85a62fd6b23f68400e21a0394c6b26fb10af560",
)
