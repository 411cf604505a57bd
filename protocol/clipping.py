"""Contributions to a chunk whose norms are high, and by how much they are made smaller. Pure; binary64, each
operation rounded by itself, so that all sites find the same.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST_NORMS = 3
"""That are not zero: of two nobody can say which one is too large."""


def factors(norms: Sequence[float], clip: float) -> list[float]:
    """Of each contribution: what makes its norm `clip` times the median of those that are not zero; 1 if it is not
    above that."""
    moved = sorted(norm for norm in norms if norm)
    if len(moved) < LEAST_NORMS:
        return [1.0] * len(norms)
    limit = clip * ((moved[(len(moved) - 1) // 2] + moved[len(moved) // 2]) / 2)
    return [limit / norm if norm > limit else 1.0 for norm in norms]


def counted(factors: Sequence[float], trim: int) -> list[int]:
    """Places of the contributions that a trimmed average is of. At most `trim` of those with a factor below 1 are left
    out whole: those with the smallest factors, of equal ones the last. Of what is left as many values can be cut as of
    all: sites that stay within the limit do not outvote the others because honest ones were left out."""
    most = min(trim, len(factors) - 1 - 2 * min(trim, (len(factors) - 1) // 2))
    highest = sorted(range(len(factors)), key=lambda place: (factors[place], -place))[:most]
    return [place for place, factor in enumerate(factors) if factor == 1 or place not in highest]
