"""Compiled arithmetic of the outer update and of the worker's cast. Every operation is rounded to fp32 by itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.node.dataplane.trimming import trimmed
from atoll.protocol.codecs import golden
from atoll.protocol.codecs.jit import compile_all, f32, f32_in, f32_out, kernel
from atoll.protocol.digest import Digest

_HALF_BELOW = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_SIXTEEN = np.uint32(16)
_ZERO, _ONE_STEP = np.float32(0), np.float32(1)
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


@kernel(f32_in, f32_in, f32, f32, f32_out)
def signsgd(values: Any, average: Any, learning_rate: Any, decay: Any, out_values: Any) -> None:
    for i in range(out_values.size):
        sign = np.float32(average[i] > _ZERO) - np.float32(average[i] < _ZERO)
        out_values[i] = values[i] - learning_rate * (sign + decay * values[i])


@kernel(f32_in, f32_in, f32_in, f32_in, f32_in, f32_out, f32_out, f32_out)
def adamw(  # noqa: PLR0917
    values: Any, momentum: Any, variance: Any, average: Any, numbers: Any, out_values: Any, out_m: Any, out_v: Any
) -> None:
    """`numbers`: learning rate, weight decay, beta1, 1 - beta1, beta2, 1 - beta2, what the two moments are divided by,
    epsilon."""
    rate, decay, beta1, rest1, beta2, rest2 = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]
    bias1, bias2, epsilon = numbers[6], numbers[7], numbers[8]
    for i in range(out_values.size):
        m = beta1 * momentum[i] + rest1 * average[i]
        v = beta2 * variance[i] + rest2 * (average[i] * average[i])
        out_m[i] = m
        out_v[i] = v
        out_values[i] = values[i] - rate * ((m / bias1) / (np.sqrt(v / bias2) + epsilon) + decay * values[i])


@kernel(f32_in, f32_in, f32_in, f32_in, f32_out, f32_out, f32_out)
def onebit_adam(  # noqa: PLR0917
    values: Any, variance: Any, average: Any, numbers: Any, out_values: Any, out_m: Any, out_v: Any
) -> None:
    """`numbers` as for adamw; `average` is of momenta, and the variance stays. Where a codec gives all elements of a
    block one size, an element with far smaller gradients would leap: none moves by more than the learning rate."""
    rate, decay, bias1, bias2, epsilon = numbers[0], numbers[1], numbers[6], numbers[7], numbers[8]
    for i in range(out_values.size):
        step = (average[i] / bias1) / (np.sqrt(variance[i] / bias2) + epsilon)
        if step > _ONE_STEP:
            step = _ONE_STEP
        elif step < -_ONE_STEP:
            step = -_ONE_STEP
        out_m[i] = average[i]
        out_v[i] = variance[i]
        out_values[i] = values[i] - rate * (step + decay * values[i])


@kernel(f32_in, f32_out)
def round_to_bf16(values: Any, out: Any) -> None:
    """fp32(bf16(x)), ties to even. Infinities stay; the sites refuse NaN elsewhere."""
    bits = values.view(np.uint32)
    rounded = out.view(np.uint32)
    for i in range(out.size):
        word = bits[i]
        rounded[i] = np.uint32(word + _HALF_BELOW + ((word >> _SIXTEEN) & _ONE)) & _UPPER_HALF


def warm_up() -> None:
    """Compiles every kernel, or loads it from the cache. Safe from any thread."""
    compile_all((sgd, nesterov, signsgd, adamw, onebit_adam, round_to_bf16, trimmed))


_RESULTS = {
    "ordinary": "5e2fb611208c0a547ff43833502642afaaac641e8914ac7125c72c0c617d0f50",
    "subnormal": "146255aa3fa976738c60994d8fcdc5a4a08e03e0b307db4dc993d3687d63afcc",
}
"""Digests of the golden results: sgd's values, nesterov's momenta and values, adamw's moments and values, 1-bit
Adam's values, signsgd's values."""
_NUMBERS = np.array([0.003, 0.1, 0.9, 0.1, 0.95, 0.05, 0.19, 0.0975, 1e-8], np.float32)
_NUM_ELEMENTS = 80
"""So that the vector units are tried too."""


def self_test() -> None:
    """Raises SelfTestFailed if this host computes other bits than the golden results, subnormal numbers included."""
    for name, expected in _RESULTS.items():
        x, m, d = golden.numbers(name, 3, _NUM_ELEMENTS)
        out_x, out_m, out_v = np.empty_like(x), np.empty_like(m), np.empty_like(m)
        results = Digest("atoll/outer-results/v1")
        sgd(x, d, np.float32(0.7), out_x)
        results.data(out_x.tobytes())
        nesterov(x, m, d, np.float32(0.7), np.float32(0.9), out_x, out_m)
        results.data(out_m.tobytes()).data(out_x.tobytes())
        adamw(x, m, np.abs(m), d, _NUMBERS, out_x, out_m, out_v)
        results.data(out_m.tobytes()).data(out_v.tobytes()).data(out_x.tobytes())
        onebit_adam(x, np.abs(m), d, _NUMBERS, out_x, out_m, out_v)
        results.data(out_x.tobytes())
        signsgd(x, d, np.float32(0.7), np.float32(0.1), out_x)
        results.data(out_x.tobytes())
        golden.compare(f"outer update of {name} numbers", results, expected)
