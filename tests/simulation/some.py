"""Which seeds of a test `make test` plays, and which are slow."""

from __future__ import annotations

import pytest


def seeds(num: int, every: int = 4, first: int = 0) -> pytest.MarkDecorator:
    """One of `every` in `make test`, the others in `make test-all` alone. Not one of three, as the number of sites
    follows from the seed by three."""
    assert every % 3
    some = range(first, num, every)
    others = pytest.param([seed for seed in range(num) if seed not in some], marks=pytest.mark.slow)
    return pytest.mark.parametrize("seeds", [some, others], ids=["some", "others"])
