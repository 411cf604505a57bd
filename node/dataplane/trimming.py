"""The mean of each element without its highest and lowest values: the coordinate-wise trimmed mean.

Source: arXiv 1803.01498.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from atoll.protocol.codecs.jit import f32_in, f32_out, kernel

Floats = npt.NDArray[np.float32]


@kernel(f32_in, f32_in, types.int64, f32_out)
def trimmed(values: Any, weights: Any, cut: Any, out: Any) -> None:
    """`values`: of one contribution after the other. Of equal ones the first is lowest, and the last highest."""
    number = weights.size
    column, order, is_left = np.empty(number, np.float32), np.empty(number, np.int64), np.zeros(number, np.bool_)
    for i in range(out.size):
        for k in range(number):
            value, place = values[k * out.size + i], k
            while place > 0 and column[place - 1] > value:
                column[place], order[place] = column[place - 1], order[place - 1]
                place -= 1
            column[place], order[place] = value, k
        for place in range(number):
            is_left[order[place]] = cut <= place < number - cut
        total, weight = np.float32(0.0), np.float32(0.0)
        for k in range(number):
            if is_left[k]:
                total = total + weights[k] * values[k * out.size + i]
                weight = weight + weights[k]
        out[i] = total / weight


def trimmed_mean(values: Floats, weights: Sequence[float], trim: int, out: Floats) -> None:
    """`values`: fp32, a row for each contribution. As many as `trim` are cut on each side, fewer where none were left.

    `out = (0 + w_0*v_0 + ...) / (0 + w_0 + ...)` over those that are left, fp32, each operation rounded by itself.
    """
    cut = min(trim, (len(weights) - 1) // 2)
    trimmed(values.reshape(-1), np.array(weights, np.float32), cut, out)
