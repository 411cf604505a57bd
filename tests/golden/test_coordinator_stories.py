"""The coordinator's decisions as stories: transcripts/*.txt, each a list of commands and what they led to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.coordinator_story import play

STORIES = sorted((Path(__file__).parent / "transcripts").glob("coordinator_*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path, request: pytest.FixtureRequest) -> None:
    expected = path.read_text(encoding="utf-8")
    happened = play(expected)
    if request.config.getoption("--update-golden", default=False):
        path.write_text(happened, encoding="utf-8")
        return
    assert happened == expected, (
        f"if this is meant: pytest tests/golden --update-golden, then read git diff {path.name}"
    )


def test_there_are_stories() -> None:
    assert len(STORIES) >= 15
