"""The decisions of a site as stories: transcripts/site_*.txt, each what it is told and what it then wants done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.site_story import play

STORIES = sorted((Path(__file__).parent / "transcripts").glob("site_*.txt"))


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
    assert len(STORIES) >= 10
