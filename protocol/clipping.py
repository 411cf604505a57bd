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
