"""Which contributions to a chunk cannot be meant: larger than the others' by a factor that no training has. Pure.

See docs/decisions/0014-unusable-contributions.md.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

FACTOR = 1000.0
LARGEST_CONTRIBUTION = 2.0**90
"""The norm of one to a trainable chunk; beyond it none is meant, whatever it is compared with."""
LARGEST_AVERAGE = 2.0**96
"""Of a trainable chunk's payload, each value: no outer update of it overflows in any run that ends."""
LARGEST_GRADIENT, LARGEST_AVERAGE_GRADIENT = 2.0**56, 2.0**60
"""The same of gradients, whose squares have to fit into a variance."""


Outlier = tuple[int, float, float]
"""Place among the contributions, norm, and the limit that it is above."""


def limits(
    norms: Sequence[float], base_norm: float, last_norm: Callable[[], float], *, num_others: int, largest: float
) -> list[float]:
    """Of each contribution to one chunk, by the `norms` of all: the norm above which it is an outlier.

    It is `FACTOR` times the median of the others' that are not zero. Where fewer than `num_others` are, it is `FACTOR`
    times `last_norm()`, of the chunk's last average, or else `base_norm`, of its values. A chunk that moves by less
    than it is does no harm: no limit is below `base_norm`. None is above `largest`.
    """
    base_norm = base_norm if base_norm < math.inf else 0.0
    others = _Others([_or_infinite(n) for n in norms])
    reference: float | None = None
    found = []
    for norm in norms:
        if not norm:
            limit = largest
        elif others.num >= num_others:
            limit = FACTOR * others.median(_or_infinite(norm))
        else:
            if reference is None:
                reference = last_norm() or base_norm
            limit = FACTOR * reference if reference > 0 else largest
        found.append(min(max(limit, base_norm), largest))
    return found


def above(norms: Sequence[float], held_against: Sequence[float], largest: float) -> tuple[Outlier, ...]:
    """Those above their limits, in order, and what is not finite. If all that are not zero, and not one alone, are
    above theirs, the chunk has changed, and only those above `largest` stand out."""
    found = [
        (place, norm, limit)
        for place, (norm, limit) in enumerate(zip(map(_or_infinite, norms), held_against, strict=True))
        if norm > limit or norm == math.inf
    ]
    num_moved = sum(norm != 0 for norm in norms)
    if len(found) == num_moved and (num_moved > 1 or num_moved == len(norms)):
        no_number = math.inf if num_moved < len(norms) else None  # of a base that is none: those that kept it stay
        found = [outlier for outlier in found if outlier[1] > largest or outlier[1] == no_number]
    return tuple(found)


def _or_infinite(norm: float) -> float:
    return norm if norm < math.inf else math.inf  # NaN too


class _Others:
    """Those that are not zero, without one of them. Sorted once: there may be a thousand."""

    def __init__(self, norms: Sequence[float]) -> None:
        self._sorted = sorted(n for n in norms if n)
        self.num = len(self._sorted) - 1

    def median(self, left_out: float) -> float:
        place = bisect.bisect_left(self._sorted, left_out)
        low, high = ((i if i < place else i + 1) for i in ((self.num - 1) // 2, self.num // 2))
        return (self._sorted[low] + self._sorted[high]) / 2
