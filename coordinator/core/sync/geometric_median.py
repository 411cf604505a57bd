"""The geometric median of vectors of which the inner products alone are known: the point whose distances to all of
them, each times a weight, have the smallest sum, as shares of the vectors. Pure; binary64, in a fixed order.

It is found by the smoothed Weiszfeld algorithm (Pillutla et al., arXiv 1912.13445, Algorithm 1) on shares: of a point
`z = sum_j s_j v_j` the squared distance to `v_i` is `sum_j s_j d_ij - 1/2 sum_jk s_j s_k d_jk`, where `d_ij` is that
between `v_i` and `v_j`. No vector is needed, and none of the numbers grows with the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

SMOOTHING = 1e-6
"""nu, of the longest vector: a distance below it counts as it. What two vectors differ by less is not told apart."""
MAX_STEPS = 256
TOLERANCE = 1e-9
"""Of a share: a step that changes none by more is the last."""
LARGEST = 1e100
"""Of a product: of as many fp32 values as a model may have it is below 1e89."""
ROUNDING = 1e-9
"""By which a product may be more than that of the lengths: sums of many terms, each rounded, in any order."""

Matrix = list[list[float]]


def count_of(num_products: int) -> int:
    """How many vectors have so many products; 0 if none have."""
    number = (math.isqrt(8 * num_products + 1) - 1) // 2
    return number if number * (number + 1) // 2 == num_products else 0


def matrix_of(products: Sequence[float]) -> Matrix:
    """Of the products as they travel, row by row up to the diagonal."""
    number = count_of(len(products))
    return [[products[max(i, j) * (max(i, j) + 1) // 2 + min(i, j)] for j in range(number)] for i in range(number)]


def problem_of(products: Sequence[float], number: int) -> str:
    """Why these are not products of so many vectors, as far as two of them show; empty if they may be."""
    if len(products) != number * (number + 1) // 2:
        return f"{len(products)} inner products of {number} contributions"
    if not all(abs(product) <= LARGEST for product in products):  # neither is NaN
        return "an inner product that is beyond all contributions"
    of = matrix_of(products)
    lengths = [of[i][i] for i in range(number)]
    if min(lengths) < 0:
        return "a contribution whose square is negative"
    for i in range(number):
        for j in range(i):
            if abs(of[i][j]) > (1 + ROUNDING) * math.sqrt(lengths[i]) * math.sqrt(lengths[j]):
                return "an inner product of two contributions that is more than that of their norms"
    return ""


def shares(products: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Of each vector, each above 0: their sum is 1. `weights`: how much its distance counts, each above 0.

    Where all vectors are alike, they are those of the weights.
    """
    of, number = matrix_of(products), len(weights)
    total = math.fsum(weights)
    found = [weight / total for weight in weights]
    smallest = (SMOOTHING * math.sqrt(max(of[i][i] for i in range(number)))) ** 2
    if not smallest:
        return found
    squares = [[max(0.0, of[i][i] + of[j][j] - 2 * of[i][j]) for j in range(number)] for i in range(number)]
    for _ in range(MAX_STEPS):
        to_each = [sum(map(mul, found, row)) for row in squares]
        spread = sum(map(mul, found, to_each)) / 2
        pulls = [weight / math.sqrt(max(smallest, to - spread)) for weight, to in zip(weights, to_each, strict=True)]
        total = math.fsum(pulls)
        before, found = found, [pull / total for pull in pulls]
        if max(abs(a - b) for a, b in zip(before, found, strict=True)) <= TOLERANCE:
            break
    return found
