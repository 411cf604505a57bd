"""Measures of the code's structure, each with its bound and the goal. Exit code 1 if one is beyond its bound.

A bound is what was reached. Where less is found, the bound is to be lowered to it, so that it stays reached.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.structure import files, imports, purity
from tests.structure.code import CORES, Module, is_in, modules_in
from tests.structure.writers import writers

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 450
MIN_LINES = 25
"""A file of fewer that only forwards is one too many."""
LINES_BEFORE = 26_134
"""Of product code at f850c86, before it was restructured."""
TOKENS_BEFORE = 230_522
"""The same; a line of more tokens is a denser one."""
NEW_LINES = 33_018
"""Of features that came meanwhile, and are no part of that: docs/decisions/0042 lists them."""
MOST_LINES = LINES_BEFORE - 1_500 + NEW_LINES
IMPURE: dict[str, str] = {
    "protocol/strict.py": "knows the type Path, and opens none",
}
"""Modules that are pure although they name what pure ones may not, and why."""
MANY_WRITERS: dict[str, str] = {}
"""Fields, as `Class.field`, that several modules may write, and why."""


@dataclass(frozen=True, slots=True)
class Code:
    modules: list[Module]
    pyproject: str

    @property
    def cores(self) -> list[Module]:
        return [module for module in self.modules if is_in(module, CORES)]


@dataclass(frozen=True, slots=True)
class Found:
    figure: int
    offenders: list[str]


@dataclass(frozen=True, slots=True)
class Measure:
    name: str
    goal: int
    bound: int
    of: Callable[[Code], Found]
    step: int = 1
    """A bound is lowered in steps of this size."""


def circles(code: Code) -> Found:
    found = imports.circles(code.modules, for_types=False)
    return Found(sum(map(len, found)), [", ".join(names) for names in found])


def circles_for_types(code: Code) -> Found:
    real = {name for names in imports.circles(code.modules, for_types=False) for name in names}
    found = [names for names in imports.circles(code.modules, for_types=True) if not real.issuperset(names)]
    return Found(sum(len(set(names) - real) for names in found), [", ".join(names) for names in found])


def long_files(code: Code) -> Found:
    sizes = sorted(((files.num_lines(m), m.path) for m in code.modules), reverse=True)
    return listed([f"{path}: {size}" for size, path in sizes if size > MAX_LINES])


def forwarding_files(code: Code) -> Found:
    return listed([m.path for m in code.modules if files.num_lines(m) < MIN_LINES and files.only_forwards(m)])


def impure_modules(code: Code) -> Found:
    contract = purity.contract_of(code.pyproject)
    found = {module.path: purity.impurities(module, contract) for module in code.modules}
    return without({path: f"{path}: {', '.join(names)}" for path, names in found.items() if names}, IMPURE)


def fields_of_many(code: Code) -> Found:
    found = {
        f"{class_.name}.{field}": f"{class_.name}.{field} of {class_.path}: {', '.join(sorted(paths))}"
        for (class_, field), paths in writers(code.modules).by_field.items()
        if len(paths) > 1
    }
    return without(found, MANY_WRITERS)


def writes_of_no_class(code: Code) -> Found:
    return listed([f"{w.module.path}:{w.line}: {w.field}" for w in writers(code.modules).of_no_class])


def without_docstring(code: Code) -> Found:
    found = {module.path: files.without_docstring(module) for module in code.cores}
    offenders = [f"{path}: {', '.join(names)}" for path, names in found.items() if names]
    return Found(sum(map(len, found.values())), offenders)


def lines_of_code(code: Code) -> Found:
    sizes = [files.size_of(module) for module in code.modules]
    lines, tokens = sum(size.lines for size in sizes), sum(size.tokens for size in sizes)
    notes = [
        f"{LINES_BEFORE} at f850c86, {NEW_LINES} of features since",
        f"{tokens / max(1, lines):.2f} tokens a line, {tokens} in all",
        f"{TOKENS_BEFORE / LINES_BEFORE:.2f} and {TOKENS_BEFORE} at f850c86",
        f"{sum(size.docstring_lines for size in sizes)} more of docstrings",
    ]
    return Found(lines, notes)


def without(offenders: dict[str, str], exceptions: dict[str, str]) -> Found:
    """By name. An exception that is none is an offender."""
    needless = [f"{name} is an exception without need" for name in exceptions if name not in offenders]
    return listed(sorted(text for name, text in offenders.items() if name not in exceptions) + needless)


def listed(offenders: list[str]) -> Found:
    return Found(len(offenders), offenders)


MEASURES = (
    Measure("modules in circles of imports", goal=0, bound=0, of=circles),
    Measure("modules in circles with imports for types", goal=0, bound=0, of=circles_for_types),
    Measure(f"files of more than {MAX_LINES} lines", goal=0, bound=0, of=long_files),
    Measure(f"files of less than {MIN_LINES} lines that only forward", goal=0, bound=0, of=forwarding_files),
    Measure("pure modules that are not pure", goal=0, bound=0, of=impure_modules),
    Measure("fields of a core's state that several modules write", goal=0, bound=0, of=fields_of_many),
    Measure("writes of a core's state of an unclear class", goal=0, bound=0, of=writes_of_no_class),
    Measure("public functions of the cores without a docstring", goal=0, bound=0, of=without_docstring),
    Measure("lines of product code", goal=MOST_LINES, bound=MOST_LINES, of=lines_of_code, step=100),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="another tree, such as a checkout of an older commit")
    root = parser.parse_args(arguments).root
    code = Code(modules_in(root), (root / "pyproject.toml").read_text(encoding="utf-8"))
    exceeded = False
    for measure in MEASURES:
        found = measure.of(code)
        exceeded |= found.figure > measure.bound
        print(line(measure, found.figure))
        for offender in found.offenders:
            print(f"    {offender}")
    return int(exceeded)


def line(measure: Measure, figure: int) -> str:
    text = f"{figure:6} {measure.name} (bound {measure.bound}, goal {measure.goal})"
    if figure > measure.bound:
        return f"{text}: TOO MANY"
    if figure <= measure.bound - measure.step:
        return f"{text}: lower the bound to {-(-figure // measure.step) * measure.step}"
    return text


if __name__ == "__main__":
    sys.exit(main())
