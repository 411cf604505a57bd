"""Pages name only tests and files that are there. (Decisions are as old as their date.)"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

MAX_COLUMNS = 120
ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    named = re.findall(r"`((?:tests|protocol|coordinator|node|benchmarks|examples|deploy)/[\w/.-]+)`", page.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_markdown_is_wrapped() -> None:
    """Tables, vectors, and what is too long without a space aside."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in pages
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS and not line.startswith((" ", "|")) and " " in line[:MAX_COLUMNS]
    ]
    assert not long


def test_every_invariant_has_its_tests() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    section = text.partition("## The ten invariants")[2].partition("\n## ")[0]
    parts = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    assert len(parts) == 10
    assert all("`tests/" in part for part in parts)


def threats() -> list[list[str]]:
    """Rows of the threat model, by cells."""
    lines = (ROOT / "docs" / "security.md").read_text().splitlines()
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert head == ["who", "attack", "effect", "defence", "test"]
    return rows


def test_every_row_of_the_threat_model_has_all_its_cells() -> None:
    assert not [row for row in threats() if len(row) != 5 or not all(row)]


def test_every_row_of_the_threat_model_names_tests_that_are_there() -> None:
    """Whole, or by a beginning that one test has; files are looked for with those of all pages."""
    rows = [row[4] for row in threats()]
    source = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tests = set(re.findall(r"^def (test_\w+)", source, re.MULTILINE))
    named = [re.findall(r"`(test_\w+|tests/[\w/.]+|python -m benchmarks \w+)(\.\.\.)?`", row) for row in rows]
    assert len(rows) > 60
    assert not [row for row, found in zip(rows, named, strict=True) if not found]
    ambiguous = [
        name + more
        for name, more in (one for found in named for one in found if one[0].startswith("test_"))
        if (sum(test.startswith(name) for test in tests) != 1 if more else name not in tests)
    ]
    assert not ambiguous


def test_every_row_about_scripts_names_a_test_that_is_there() -> None:
    """What has no test is not listed. A row may have that of the row above it."""
    rows = [line for line in (ROOT / "docs" / "scripts.md").read_text().splitlines() if line.startswith("| ")]
    named = [re.findall(r"`((?:unit|process|trainers)/[\w/]+\.py)::(\w+)`", row.rpartition("|")[0]) for row in rows]
    without = [
        row
        for row, found in zip(rows, named, strict=True)
        if not found and not row.endswith(("| the same |", "| test |", "| --- |"))
    ]
    assert not without
    tests: dict[str, set[str]] = {}
    for file in {file for found in named for file, _ in found}:
        nodes = ast.walk(ast.parse((ROOT / "tests" / file).read_text()))
        tests[file] = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    assert not [f"{file}::{test}" for found in named for file, test in found if test not in tests[file]]
    assert sum(map(len, named)) > 40
