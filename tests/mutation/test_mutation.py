"""A mutation's text is looked for in the function that it names, and what does not fit says where the text is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.__main__ import lacking
from tests.mutation.mutation import DoesNotFit, Mutation

SOURCE = """
HERE = 1


class Site:
    limit = 2

    @property
    def first(self):
        return self.value or 1

    def second(self):
        return self.value or 1


def first():
    if HERE:
        def inner():
            return 1 - 1 - 1
    return 1
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "node" / "core").mkdir(parents=True)
    (tmp_path / "node" / "core" / "site.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "node" / "other.py").write_text("async def moved():\n    await here()\n", encoding="utf-8")
    return tmp_path


def mutation(where: str, old: str) -> Mutation:
    return Mutation(name="the name", rule="r", where=where, old=old, new="CHANGED", tests=())


@pytest.mark.parametrize(
    ("name", "old", "place"),
    [
        ("", "HERE = 1", SOURCE.index("HERE")),
        (":Site", "limit = 2", SOURCE.index("limit")),
        (":Site.first", "return self.value", SOURCE.index("return self.value")),
        (":Site.first", "@property", SOURCE.index("@property")),
        (":Site.second", "return self.value", SOURCE.rindex("return self.value")),
        (":first.inner", "return 1", SOURCE.index("return 1")),
        (":first", "return 1", SOURCE.rindex("return 1")),
        (":Site", "or 1\n\n    def second", SOURCE.index("or 1")),
    ],
)
def test_a_text_is_looked_for_in_its_function_alone(root: Path, name: str, old: str, place: int) -> None:
    changed = SOURCE[:place] + "CHANGED" + SOURCE[place + len(old) :]
    assert mutation(f"node.core.site{name}", old).source_in(root) == changed


@pytest.mark.parametrize(
    ("where", "old", "found"),
    [
        ("node.core.site", "limit = 2", "1 times in node.core.site:Site"),
        (
            "node.core.site:Site",
            "self.value",
            "1 times in node.core.site:Site.first, 1 times in node.core.site:Site.second",
        ),
        ("node.core.site:Site.third", "HERE = 1", "1 times in node.core.site"),
        ("node.core.site:Site.first", "await here()", "1 times in node.other:moved"),
        ("node.core.gone:first", "HERE = 1", "1 times in node.core.site"),
        ("node.core.site:first", "return 2", "nowhere"),
        ("node.core.site:first.inner", "- 1", "2 times in node.core.site:first.inner"),
    ],
)
def test_what_does_not_fit_says_which_mutation_and_where_its_text_is(
    root: Path, where: str, old: str, found: str
) -> None:
    with pytest.raises(DoesNotFit) as refusal:
        mutation(where, old).source_in(root)
    assert str(refusal.value) == f"'the name' does not fit: its text, once in {where}, is {found}:\n{old}"


def test_a_file_that_a_copy_of_the_repository_lacks_catches_nothing(tmp_path: Path) -> None:
    def of(name: str) -> str:
        return f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/{name}'"

    assert lacking(tmp_path, of("Makefile")) == "Makefile"
    assert not lacking(tmp_path, of("tmp/of_a_test")), "a test's own"
    assert not lacking(tmp_path, of("no/such/file")), "nor has the repository"
    assert not lacking(tmp_path, "AssertionError")
