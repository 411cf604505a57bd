"""Which seeds of a named schedule are played by whom: the first half by `make test`, all by `make test-all`."""

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
