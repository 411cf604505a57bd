"""The table of mutations fits the tree: `make mutate` can apply each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.table import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_its_text_is_there_once_and_its_tests_are_too(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, f"{mutation.file} has changed: adapt tests/mutation/table.py"
    assert mutation.old != mutation.new
    for test in mutation.tests:
        assert (ROOT / test.partition("::")[0]).is_file(), test


def test_names_are_unique() -> None:
    names = [m.name for m in MUTATIONS]
    assert len(set(names)) == len(names)
