"""The cosine transform of a block of rows of 64 values (DCT-II, orthonormal): its table, and the way back.

    X = C_m x C_64^T        x = C_m^T X C_64        C_n[k][i] = sqrt((2 - (k = 0)) / n) cos(pi (2i + 1) k / 2n)

in fp32, each operation rounded by itself, sums from 0 in the order of the index: first along the rows, and on the way
back first along the columns. Pure, without numpy.
"""

from __future__ import annotations

import math
from array import array
from functools import lru_cache

_EDGE = 64


@lru_cache(_EDGE + 1)
def table(size: int) -> array[float]:
    """`C_size`, row by row. Angles are brought into the first quadrant, so that what is zero is."""
    return array("f", [_factor(size, k) * _cosine((2 * i + 1) * k, 2 * size) for k in range(size) for i in range(size)])


def _factor(size: int, k: int) -> float:
    return math.sqrt((2 if k else 1) / size)


def _cosine(numerator: int, denominator: int) -> float:
    """`cos(pi numerator / denominator)`."""
    turn = numerator % (2 * denominator)
    turn = min(turn, 2 * denominator - turn)
    sign = -1.0 if 2 * turn > denominator else 1.0
    turn = min(turn, denominator - turn)
    return sign * math.cos(math.pi * turn / denominator) if 2 * turn != denominator else 0.0


def inverse(values: array[float]) -> array[float]:
    """The rows of which `values` are the transform. A row of zeros changes no sum."""
    num_rows = len(values) // _EDGE
    whole, rows = table(_EDGE), table(num_rows)
    found = [(u, values[u * _EDGE : (u + 1) * _EDGE]) for u in range(num_rows)]
    found = [(u, row) for u, row in found if any(row)]
    out = array("f")
    for r in range(num_rows):
        summed = array("f", bytes(4 * _EDGE))
        for u, row in found:
            summed = _plus(summed, rows[u * num_rows + r], row)
        across = array("f", bytes(4 * _EDGE))
        for v, value in enumerate(summed):
            if value:
                across = _plus(across, value, whole[v * _EDGE : (v + 1) * _EDGE])
        out.extend(across)
    return out


def _plus(values: array[float], factor: float, more: array[float]) -> array[float]:
    scaled = array("f", [factor * value for value in more])
    return array("f", [a + b for a, b in zip(values, scaled, strict=True)])
