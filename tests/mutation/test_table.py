"""The table of mutations fits the tree: `make mutate` can apply each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.mutation import DoesNotFit, Mutation
from tests.mutation.table import FILE_OF, MUTATIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_its_text_is_there_once_and_its_tests_are_too(mutation: Mutation) -> None:
    try:
        mutated = mutation.source_in(ROOT)
    except DoesNotFit as error:
        pytest.fail(f"{FILE_OF[mutation.name]}: {error}", pytrace=False)
    assert mutated != (ROOT / mutation.file).read_text(encoding="utf-8")
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), test
        name, _, _ = name.partition("[")
        assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_names_are_unique() -> None:
    assert len(FILE_OF) == len(MUTATIONS)
