"""Which seeds of a schedule `make test` plays: the first of them. `make test-all` plays all."""

from __future__ import annotations

import pytest


def in_halves(num: int, first: int = 0) -> pytest.MarkDecorator:
    """The test's `seeds`: so many, from `first` on."""
    middle, stop = first + num // 2, first + num
    return pytest.mark.parametrize(
        "seeds",
        [
            pytest.param(range(first, middle), id=f"{first} to {middle - 1}"),
            pytest.param(range(middle, stop), id=f"{middle} to {stop - 1}", marks=pytest.mark.slow),
        ],
    )


def in_parts(num: int, played: int) -> pytest.MarkDecorator:
    """The test's `part`, of so many; `make test` plays the first ones."""
    return pytest.mark.parametrize(
        "part", [pytest.param(part, marks=[pytest.mark.slow] if part >= played else []) for part in range(num)]
    )
