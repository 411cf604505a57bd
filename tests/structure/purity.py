"""Modules that are to be pure, and reach for a clock, a file, a thread or chance.

What may not be imported, and by which packages, is said once: in the import contract of pyproject.toml. Here it also
holds of every module whose docstring says "Pure", and calls that need no import are found.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

from tests.structure.code import Module, is_in

CONTRACT = "pure cores have no I/O, clocks, threads or global randomness"
CALLS = ("open", "input", "print", "breakpoint")
SAYS_PURE = re.compile(r"\bPure\b")


@dataclass(frozen=True, slots=True)
class Contract:
    packages: tuple[str, ...]
    forbidden: tuple[str, ...]


def contract_of(pyproject: str) -> Contract:
    """Raises KeyError if there is no such contract."""
    for contract in tomllib.loads(pyproject)["tool"]["importlinter"]["contracts"]:
        if contract["name"] == CONTRACT:
            return Contract(tuple(contract["source_modules"]), tuple(contract["forbidden_modules"]))
    raise KeyError(CONTRACT)


def impurities(module: Module, contract: Contract) -> list[str]:
    """What a module reaches for that is to be pure, in functions too; nothing of other modules."""
    says_pure = SAYS_PURE.search(ast.get_docstring(module.tree) or "")
    if not (says_pure or is_in(module, contract.packages)):
        return []
    return sorted(set(_impurities(module.tree, contract.forbidden)))


def _impurities(tree: ast.Module, forbidden: tuple[str, ...]) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(name)):
                names = [name]
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield f"{name}()"
                continue
            case _:
                continue
        yield from (name for name in names if name.partition(".")[0] in forbidden)
