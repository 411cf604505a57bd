"""Attention whose sequences several ranks share, and its gradients, are those of one process."""

from __future__ import annotations

import pytest

from tests.harness.rank_lines import told_by

CLOSE = {"float64": 1e-13, "float32": 5e-6, "bfloat16": 0.05}
"""Of values around 1, against fp64. bf16 has 8 bits of mantissa."""
pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_of_shared_sequences(num_ranks: int) -> None:
    """Ulysses, a ring and both; causal or not; lengths that have to be filled up; key heads for several query heads."""
    found = told_by("sequences.py", num_ranks, [])
    assert {way["ulysses"] for way in found} == {n for n in (1, 2, 4) if n <= num_ranks}
    assert len(found) == 30 * (2 if num_ranks == 2 else 3)
    assert not [way for way in found if not way["difference"] <= CLOSE[way["dtype"]]]
