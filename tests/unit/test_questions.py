"""How a core keeps its state is known to one file of questions for each core: a core can be cut anew, and its tests
stay. Tests call a core's contract, look at what it puts out, and ask the rest by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
QUESTIONS = {"harness/coordinator_questions.py", "harness/site_questions.py"}
CONTRACT = {
    "handle",
    "handled",
    "next_deadline",
    "view",
    "data_ranges",
    "curves",
    "phases",
    "median_phases",
    "refusal",
    "last_start",
    "phase",
    "limits",
    "settings",
    "ranks",
}
STATES = {"Run", "SiteState", "Context"}


def reads_of_a_core(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and ".core" in (node.module or ""):
            yield from (f"line {node.lineno}: {name.name}" for name in node.names if name.name in STATES)
        elif isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if node.attr == "_core" or (owner == "core" and node.attr not in CONTRACT):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_tests_ask_a_core_by_name() -> None:
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        if name not in QUESTIONS:
            found += [f"{name}, {read}" for read in reads_of_a_core(path.read_text())]
    assert not found, f"ask it in one of {sorted(QUESTIONS)}"


@pytest.mark.parametrize(
    ("source", "num"),
    [
        ("story.core.run.sync.attempt", 1),
        ("run = core.run", 1),
        ("node.core.site.outer = None", 1),
        ("drive.core.ctx", 1),
        ("server._core.view(0.0)", 1),
        ("from atoll.coordinator.core.run import Run", 1),
        ("from atoll.node.core.state import Outer, SiteState", 1),
        ("story.core.handle(event, story.core.next_deadline())", 0),
        ("from atoll.node.core.site import SiteCore", 0),
    ],
)
def test_a_read_of_a_core_is_seen(source: str, num: int) -> None:
    assert len(list(reads_of_a_core(source))) == num
