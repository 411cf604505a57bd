"""Compiled arithmetic of the outer update and of the worker's cast. Every operation is rounded to fp32 by itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.node.dataplane.vectors import OUTER_VECTORS
from atoll.protocol.codecs.jit import compile_all, f32, f32_in, f32_out, kernel
from atoll.protocol.errors import SelfTestFailed

_HALF_BELOW = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_SIXTEEN = np.uint32(16)
_UPPER_HALF = np.uint32(0xFFFF0000)


@kernel(f32_in, f32_in, f32, f32_out)
def sgd(values: Any, average: Any, learning_rate: Any, out_values: Any) -> None:
    for i in range(out_values.size):
        out_values[i] = values[i] - learning_rate * average[i]


@kernel(f32_in, f32_in, f32_in, f32, f32, f32_out, f32_out)
def nesterov(  # noqa: PLR0917
    values: Any, momentum: Any, average: Any, learning_rate: Any, mu: Any, out_values: Any, out_momentum: Any
) -> None:
    for i in range(out_values.size):
        m = mu * momentum[i] + average[i]
        out_momentum[i] = m
        out_values[i] = values[i] - learning_rate * (average[i] + mu * m)


@kernel(f32_in, f32_out)
def round_to_bf16(values: Any, out: Any) -> None:
    """fp32(bf16(x)), ties to even. Infinities stay; the sites refuse NaN elsewhere."""
    bits = values.view(np.uint32)
    rounded = out.view(np.uint32)
    for i in range(out.size):
        word = bits[i]
        rounded[i] = np.uint32(word + _HALF_BELOW + ((word >> _SIXTEEN) & _ONE)) & _UPPER_HALF


@kernel(f32_in, f32_in, f32_out)
def subtract(values: Any, minus: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = values[i] - minus[i]


def warm_up() -> None:
    """Compiles every kernel, or loads it from the cache. Safe from any thread."""
    compile_all((sgd, nesterov, round_to_bf16, subtract))


_TILES = 5  # repetitions of the 16 elements, so that the vector units are tried too


def self_test() -> None:
    """Raises SelfTestFailed if this host computes other bits than the golden vectors, subnormal numbers included."""
    for vector in OUTER_VECTORS:
        x, m, d = (np.tile(_floats(data), _TILES) for data in (vector.x, vector.m, vector.d))
        learning_rate, mu = _floats(vector.learning_rate)[0], _floats(vector.momentum)[0]
        out_x, out_m = np.empty_like(x), np.empty_like(m)
        sgd(x, d, learning_rate, out_x)
        _same(out_x, vector.sgd_x, f"sgd, vector {vector.name!r}")
        nesterov(x, m, d, learning_rate, mu, out_x, out_m)
        _same(out_m, vector.nesterov_m, f"nesterov's momentum, vector {vector.name!r}")
        _same(out_x, vector.nesterov_x, f"nesterov, vector {vector.name!r}")


def _floats(data: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(bytes.fromhex(data), np.float32)


def _same(found: np.ndarray[Any, np.dtype[np.float32]], expected: str, what: str) -> None:
    if found.tobytes() != bytes.fromhex(expected) * _TILES:
        raise SelfTestFailed(
            f"outer {what}: this host computes other bits than the protocol asks for; it cannot take part in a run. "
            "Look for a library that turns subnormal numbers off (flush to zero), or another numba or LLVM"
        )
