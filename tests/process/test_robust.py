"""Real sites, some of which send their pseudo-gradient times -10: what the run makes of it by `sync.robust`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.robust import play, settings_of
from tests.harness.local_run import GUARDED

pytestmark = pytest.mark.timeout(400)
START_LOSS = 1.5
"""About: of values and targets that are drawn alike, behind the first window."""


def test_with_no_defence_one_of_eight_sites_spoils_the_run(tmp_path: Path) -> None:
    found = play(tmp_path, settings_of("off", 1, 5), 1, GUARDED)
    assert found.loss > START_LOSS
    assert not found.named


@pytest.mark.parametrize("mode", ["clip", "trim"])
def test_two_of_eight_do_not_where_they_are_clipped_or_trimmed_and_both_are_named(tmp_path: Path, mode: str) -> None:
    found = play(tmp_path, settings_of(mode, 1, 5), 2, GUARDED)
    assert found.loss < 0.2 * START_LOSS
    assert found.named == ("site6", "site7")
