"""Compiled arithmetic of the outer update and of the worker's cast. Every operation is rounded to fp32 by itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.protocol.codecs.jit import compile_all, f32, f32_in, f32_out, kernel

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
