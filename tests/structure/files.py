"""Of single files: their length, files that only forward, lines of code, functions without a docstring."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from tests.structure.code import Definition, Module

NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def num_lines(module: Module) -> int:
    return module.source.count("\n")


def only_forwards(module: Module) -> bool:
    """Imports, other names for what is elsewhere, and functions that return what another one does with their own
    arguments, and nothing else. A file with a docstring alone forwards nothing."""
    body = [statement for statement in module.tree.body if not _is_docstring(statement)]
    return bool(body) and all(_forwards(statement) for statement in body)


def _forwards(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.Assign(targets=[ast.Name()], value=ast.Name() | ast.Attribute()):
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            own = [inner for inner in statement.body if not _is_docstring(inner)]
            return len(own) == 1 and _is_forwarding_call(own[0])
    return False


def _is_forwarding_call(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Return | ast.Expr) else None
    if isinstance(value, ast.Await):
        value = value.value
    if not isinstance(value, ast.Call):
        return False
    arguments = [*value.args, *(keyword.value for keyword in value.keywords)]
    return all(isinstance(inner, ast.Name | ast.Starred) for inner in arguments)


@dataclass(frozen=True, slots=True)
class Size:
    """Blank lines and comments are in none of these."""

    lines: int
    tokens: int
    docstring_lines: int
    """Those below a field too."""


def size_of(module: Module) -> Size:
    docstrings: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.stmt) and _is_docstring(node):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found = tokenize.generate_tokens(io.StringIO(module.source).readline)
    tokens = [t for t in found if t.type not in NOT_CODE and t.start[0] not in docstrings]
    code = {line for t in tokens for line in range(t.start[0], t.end[0] + 1)}
    return Size(lines=len(code - docstrings), tokens=len(tokens), docstring_lines=len(docstrings))


def without_docstring(module: Module) -> list[str]:
    """Public functions, and public methods and properties of public classes. Not the setters of properties, nor the
    typed forms of a function (`@overload`)."""
    return [name for name, function in _public_functions(module.tree, "") if ast.get_docstring(function) is None]


def _public_functions(node: Definition | ast.Module, outer: str) -> Iterator[tuple[str, Definition]]:
    for inner in node.body:
        if not isinstance(inner, Definition) or inner.name.startswith("_"):
            continue
        if isinstance(inner, ast.ClassDef):
            yield from _public_functions(inner, f"{outer}{inner.name}.")
        elif not any(ast.unparse(d).endswith((".setter", "overload")) for d in inner.decorator_list):
            yield f"{outer}{inner.name}", inner


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
