"""What the module of a codec has to offer, and the arithmetic that several of them share.

fp32, each operation rounded by itself, without the interpreter lock. Formulas and test vectors are in docs/protocol.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from atoll.protocol.codecs.jit import Kernel, f32, f32_in, f32_out, kernel
from atoll.protocol.errors import InvalidMessage

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)
NOTHING = np.empty(0, np.float32)
ONE = np.float32(1.0)


class Terms(NamedTuple):
    """What is encoded: `(values - minus) + beta * error`, each operation rounded by itself. 1-D fp32, contiguous."""

    values: npt.NDArray[Any]
    """Bytes for raw."""
    minus: Floats = NOTHING
    """Empty: nothing is subtracted."""
    error: Floats = NOTHING
    """What earlier contributions left over; empty: nothing."""
    beta: np.float32 = ONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Of one codec, over bodies that have the right size and are aligned to 4 bytes."""

    encode: Callable[[Terms, Bytes], bool]
    """Writes the body; False if a value is not finite, or would not be when it is decoded."""
    decode: Callable[[Bytes, npt.NDArray[Any]], None]
    accumulate: Callable[[Bytes, np.float32, Floats], float]
    """`acc = acc + weight * value`; the norm of the values."""
    check: Callable[[Bytes, float], None]
    """Raises InvalidMessage if a value that the body stands for is not finite, or not below that number (a power of
    two) in magnitude."""
    kernels: tuple[Kernel, ...] = ()
    golden: str = ""
    """The digest of what the self-test of a host has to find; none if it carries no values."""


@kernel(f32_in, f32, f32_out)
def _add(values: Any, weight: Any, acc: Any) -> None:
    for i in range(acc.size):
        acc[i] = acc[i] + weight * values[i]


@kernel(f32_in)
def largest(values: Any) -> Any:
    """The bits of the largest magnitude. It is found on the bits: integers order like magnitudes, NaN above infinity,
    and LLVM vectorizes an integer maximum."""
    bits = values.view(np.uint32)
    top = np.uint32(0)
    for i in range(bits.size):
        top = max(top, np.uint32(bits[i] & MAGNITUDE))
    return top


@kernel(f32_in, f32_in)
def _dot(x: Any, y: Any) -> Any:
    a = b = c = d = np.float64(0.0)  # in binary64, where no fp32 overflows; four chains of additions beside each other
    whole = x.size - x.size % 4
    for i in range(0, whole, 4):
        a += np.float64(x[i]) * np.float64(y[i])
        b += np.float64(x[i + 1]) * np.float64(y[i + 1])
        c += np.float64(x[i + 2]) * np.float64(y[i + 2])
        d += np.float64(x[i + 3]) * np.float64(y[i + 3])
    for i in range(whole, x.size):
        a += np.float64(x[i]) * np.float64(y[i])
    return a + b + c + d


@kernel(f32_in, f32_out)
def _over_weights(weights: Any, acc: Any) -> None:
    for i in range(acc.size):
        if weights[i]:
            acc[i] = acc[i] / weights[i]


KERNELS = (_add, largest, _dot, _over_weights)


def add(values: Floats, weight: np.float32, acc: Floats) -> None:
    """`acc = acc + weight * value`, as `Arithmetic.accumulate` does it of values that have travelled."""
    _add(values, np.float32(weight), acc)


def add_with_norm(values: Floats, weight: np.float32, acc: Floats) -> float:
    add(values, weight, acc)
    return norm(values)


def dot(x: Floats, y: Floats) -> float:
    """The inner product, in binary64."""
    return float(_dot(x, y))


def norm(values: Floats) -> float:
    """The root of the sum of squares. A measure, not the same bits everywhere."""
    return math.sqrt(_dot(values, values))


def cosine(x: Floats, y: Floats) -> float:
    """Of the angle between them; 0 where one of them is zero."""
    norms = norm(x) * norm(y)
    return dot(x, y) / norms if norms else 0.0


def over_weights(weights: Floats, acc: Floats) -> None:
    """`acc = acc / weights` where they are not zero."""
    _over_weights(weights, acc)


def is_finite(values: Floats) -> bool:
    return bool(largest(values) < INFINITE)


def bits_of(value: float) -> np.uint32:
    return np.uint32(np.float32(value).view(np.uint32))


def refuse_if(is_large: object, below: float) -> None:
    if is_large:
        raise InvalidMessage(f"encoded chunk: a value that is {'too large' if below < math.inf else 'not finite'}")
