"""raw: the bytes of elements of any dtype, which are copied and never averaged."""

from __future__ import annotations

import numpy as np

from atoll.protocol.codecs.arithmetic import Arithmetic, Bytes, Floats, Terms
from atoll.protocol.errors import ConfigError


def _encode(terms: Terms, body: Bytes) -> bool:
    body[:] = terms.values
    return True


def _decode(body: Bytes, out: Bytes) -> None:
    out[:] = body


def _accumulate(body: Bytes, weight: np.float32, acc: Floats) -> float:
    raise ConfigError("codec raw carries bytes, which cannot be averaged")


def _check(body: Bytes, below: float) -> None:
    """Any bytes are right."""


ARITHMETIC = Arithmetic(encode=_encode, decode=_decode, accumulate=_accumulate, check=_check)
