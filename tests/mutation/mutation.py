"""One mutation: the rule that it breaks, where its text is, and the source with it in place."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PRODUCT = ("coordinator", "node", "protocol", "src")


class DoesNotFit(Exception):
    """The code has changed, and the table is to follow. Says which mutation, and where its text is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    name: str
    rule: str
    """What the code promises and the mutation takes away."""
    where: str
    """`folder.module:Class.function`: the innermost one around the text; `folder.module` if there is none."""
    old: str
    """Occurs exactly once there. Keep it short."""
    new: str
    tests: tuple[str, ...]
    """Files, or single tests as `file::test`, that must notice."""

    @property
    def file(self) -> str:
        """Below the root of the repository."""
        return f"{self.where.partition(':')[0].replace('.', '/')}.py"

    def source_in(self, root: Path) -> str:
        """The whole file with the mutation in place. Raises DoesNotFit."""
        path = root / self.file
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        name = self.where.partition(":")[2]
        places = [place for place, around in _occurrences(source, self.old) if around == name]
        if len(places) != 1:
            times = Counter(_holders(root, self.old))
            found = ", ".join(f"{times[where]} times in {where}" for where in times) or "nowhere"
            raise DoesNotFit(f"{self.name!r} does not fit: its text, once in {self.where}, is {found}:\n{self.old}")
        (place,) = places
        return source[:place] + self.new + source[place + len(self.old) :]


def _holders(root: Path, text: str) -> Iterator[str]:
    """As a mutation's `where`, for each occurrence in the product's code."""
    for folder in PRODUCT:
        for path in sorted((root / folder).rglob("*.py")):  # goes through no link
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            for _, around in _occurrences(path.read_text(encoding="utf-8"), text):
                yield f"{module}:{around}" if around else module


def _occurrences(source: str, text: str) -> Iterator[tuple[int, str]]:
    """Each place of `text`, with the name of the innermost function or class around it, empty if there is none."""
    place = source.find(text)
    while place >= 0:
        end = place + len(text)
        around = [(b - a, name) for a, b, name in _definitions(source) if a <= place and end <= b]
        yield place, min(around)[1] if around else ""
        place = source.find(text, place + 1)


@cache
def _definitions(source: str) -> list[tuple[int, int, str]]:
    """Of each function and class: its first character, decorators included, the one behind its last, its name."""
    starts = [0]
    for line in source.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    found = []

    def visit(node: ast.AST, outer: str) -> None:
        for inner in ast.iter_child_nodes(node):
            name = outer
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{inner.name}" if outer else inner.name
                first = min([inner.lineno, *(decorator.lineno for decorator in inner.decorator_list)])
                found.append((starts[first - 1], starts[inner.end_lineno or first], name))
            visit(inner, name)

    visit(ast.parse(source), "")
    return found
