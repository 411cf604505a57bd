"""`examples/accelerate_loop.py`, a loop over epochs with what accelerate wraps, as two sites: real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-more")

from tests.trainers.sites import late_joiner_ends_equal

pytestmark = [pytest.mark.more, pytest.mark.timeout(900)]


def test_two_sites_one_of_them_late_end_equal(tmp_path: Path) -> None:
    """The late one's learning rate rises, and the first one's optimizer comes back from its checkpoint: both need what
    is inside of accelerate's optimizer."""
    late_joiner_ends_equal(tmp_path, "accelerate_loop.py", [], tokens_a_sample=1)
