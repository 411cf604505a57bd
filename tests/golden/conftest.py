"""`pytest tests/golden --update-golden` writes the transcripts anew; read the difference before you commit it."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what happened instead of comparing it")
