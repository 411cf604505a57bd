"""`examples/lightning_trainer.py`, a script of Lightning's Trainer, as two sites: real processes, the real library."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: make test-more")

from tests.trainers.sites import late_joiner_ends_equal

pytestmark = [pytest.mark.more, pytest.mark.timeout(900)]


def test_two_sites_one_of_them_late_end_equal(tmp_path: Path) -> None:
    late_joiner_ends_equal(tmp_path, "lightning_trainer.py", [], tokens_a_sample=1)
