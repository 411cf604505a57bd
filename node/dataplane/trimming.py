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
    is_cut = np.empty(number, np.bool_)
    for i in range(out.size):
        is_cut[:] = False
        for _ in range(cut):
            low = high = -1
            for k in range(number):
                if not is_cut[k] and (low < 0 or values[k * out.size + i] < values[low * out.size + i]):
                    low = k
            is_cut[low] = True
            for k in range(number):
                if not is_cut[k] and (high < 0 or values[k * out.size + i] >= values[high * out.size + i]):
                    high = k
            is_cut[high] = True
        total, weight = np.float32(0.0), np.float32(0.0)
        for k in range(number):
            if not is_cut[k]:
                total = total + weights[k] * values[k * out.size + i]
                weight = weight + weights[k]
        out[i] = total / weight


def trimmed_mean(values: Floats, weights: Sequence[float], trim: int, out: Floats) -> None:
    """`values`: fp32, a row for each contribution. As many as `trim` are cut on each side, fewer where none were left.

    `out = (0 + w_0*v_0 + ...) / (0 + w_0 + ...)` over those that are left, fp32, each operation rounded by itself.
    """
    cut = min(trim, (len(weights) - 1) // 2)
    trimmed(values.reshape(-1), np.array(weights, np.float32), cut, out)
