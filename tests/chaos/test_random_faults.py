"""A whole run under random faults: it ends, nobody is lost for good, and all sites that hold a commit hold the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.soak import play


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("seed", [11])
def test_a_run_outlives_random_faults(tmp_path: Path, seed: int) -> None:
    assert play(tmp_path, seed, num_faults=8).total() == 8
