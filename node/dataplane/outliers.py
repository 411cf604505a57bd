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


Outlier = tuple[int, float, float]
"""Place among the contributions, norm, and the limit that it is above."""


def outliers(
    norms: Sequence[float],
    base_norm: float,
    last_norm: Callable[[], float],
    *,
    num_others: int = 2,
    largest: float = LARGEST_CONTRIBUTION,
) -> tuple[Outlier, ...]:
    """Of the `norms` of contributions to one chunk, those above their limit, in order.

    The limit is `FACTOR` times the median of the others' that are not zero. Where fewer than `num_others` are, it is
    `FACTOR` times `last_norm()`, of the chunk's last average, or else `base_norm`, of its values; if all contributors
    are above that, the chunk has changed and nobody stands out. A chunk that moves by less than it is does no harm: no
    limit is below `base_norm`. None is above `largest`, and what is not finite is always above.
    """
    base_norm = base_norm if base_norm < math.inf else 0.0
    norms = [n if n < math.inf else math.inf for n in norms]  # NaN too
    others = _Others(norms)
    reference: float | None = None
    found: list[Outlier] = []
    for place, norm in enumerate(norms):
        if not norm:
            continue
        if others.num >= num_others:
            limit = FACTOR * others.median(norm)
        else:
            if reference is None:
                reference = last_norm() or base_norm
            limit = FACTOR * reference if reference > 0 else largest
        limit = min(max(limit, base_norm), largest)
        if norm > limit or norm == math.inf:
            found.append((place, norm, limit))
    if len(found) == len(norms):
        found = [outlier for outlier in found if outlier[1] > largest]
    return tuple(found)


class _Others:
    """Those that are not zero, without one of them. Sorted once: there may be a thousand."""

    def __init__(self, norms: Sequence[float]) -> None:
        self._sorted = sorted(n for n in norms if n)
        self.num = len(self._sorted) - 1

    def median(self, left_out: float) -> float:
        place = bisect.bisect_left(self._sorted, left_out)
        low, high = ((i if i < place else i + 1) for i in ((self.num - 1) // 2, self.num // 2))
        return (self._sorted[low] + self._sorted[high]) / 2
