"""Circles among the imports of modules.

An import counts where it is carried out as its module loads: at its top level, in `if` and `try` too, not in functions.
`from package import name` is an import of the module `package.name` if there is one. That a package's `__init__` runs
first is not counted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.structure.code import Module

Graph = dict[str, set[str]]


def circles(modules: list[Module], *, for_types: bool) -> list[list[str]]:
    """Modules that import each other, directly or through others, each circle sorted; with those that are imported
    `if TYPE_CHECKING` alone too where `for_types`."""
    names = {module.name for module in modules}
    graph: Graph = {module.name: set() for module in modules}
    for module in modules:
        for target, is_for_types in _imports(module.tree.body, names):
            if for_types or not is_for_types:
                graph[module.name].add(target)
    return [sorted(group) for group in _strongly_connected(graph) if len(group) > 1 or group[0] in graph[group[0]]]


def _imports(body: list[ast.stmt], names: set[str], is_for_types: bool = False) -> Iterator[tuple[str, bool]]:
    for statement in body:
        match statement:
            case ast.Import():
                targets = [alias.name for alias in statement.names]
            case ast.ImportFrom(module=str(package), level=0):
                inside = [f"{package}.{alias.name}" for alias in statement.names]
                targets = [name if name in names else package for name in inside]
            case ast.If():
                for_types = is_for_types or _is_type_checking(statement.test)
                yield from _imports(statement.body, names, for_types)
                yield from _imports(statement.orelse, names, is_for_types)
                continue
            case ast.Try():
                handlers = [line for handler in statement.handlers for line in handler.body]
                inner = [*statement.body, *handlers, *statement.orelse, *statement.finalbody]
                yield from _imports(inner, names, is_for_types)
                continue
            case _:
                continue
        yield from ((target, is_for_types) for target in targets if target in names)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _strongly_connected(graph: Graph) -> list[list[str]]:
    """Tarjan's algorithm. The depth of its recursion is at most the number of modules."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    waiting: list[str] = []
    groups = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        waiting.append(name)
        for target in sorted(graph[name]):
            if target not in order:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in waiting:
                lowest[name] = min(lowest[name], order[target])
        if lowest[name] == order[name]:
            place = waiting.index(name)
            groups.append(waiting[place:])
            del waiting[place:]

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return groups
