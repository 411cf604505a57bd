"""Fields of a core's state, and the modules that write them.

A state class is a class of a core that is neither frozen nor an exception, an Enum or a Protocol. A write is
`x.field = ...`, `x.field += ...`, `del x.field`, the same of `x.field[...]`, or a call of `x.field` that changes a
container. What a class sets of itself in `__init__` is no write, nor what it is made with.

There are no types here. The class of `x` is, in this order: the class around it for `self`; what the parameter or
name `x` is annotated with; the only state class of that core that has such a field; of several, the one that the last
word of `x` is the name of (`run.sync.ready` is Sync's), or that a field of that name is annotated with. Outside of the
cores the first two alone count. So these are not found: what is written through another name of a container
(`ready = sync.ready`), by `setattr`, or by a function that is given it. Where several classes are left, the write is
listed apart.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tests.structure.code import CORES, Module, is_in

CHANGING = (
    *("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "move_to_end", "pop"),
    *("popitem", "popleft", "remove", "reverse", "setdefault", "sort", "update"),
    *("difference_update", "intersection_update", "symmetric_difference_update"),
)
NO_STATE = re.compile(r"Enum|Flag|Exception|Error|Protocol|NamedTuple")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, eq=False)
class StateClass:
    core: str
    path: str
    """Of its module."""
    name: str
    fields: dict[str, str]
    """With the annotation of each, as far as it has one."""
    bases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Write:
    module: Module
    line: int
    base: ast.expr
    """What the field is of."""
    field: str
    method: str
    """What is called of the field; empty if it is assigned."""
    around: tuple[ast.ClassDef | Function, ...]
    """Classes and functions, the innermost last."""


@dataclass(frozen=True, slots=True)
class Writers:
    by_field: dict[tuple[StateClass, str], set[str]]
    """Paths of the modules that write it."""
    of_no_class: list[Write]
    """Some state class has such a field, but which one is written is not clear."""


def writers(modules: list[Module]) -> Writers:
    classes = [found for module in modules for found in _state_classes(module)]
    methods = _methods(modules)
    by_field: dict[tuple[StateClass, str], set[str]] = defaultdict(set)
    of_no_class = []
    for module in modules:
        for write in _writes(module, module.tree, ()):
            known = [c for c in classes if write.field in c.fields]
            owners = _owners(write, known, classes)
            if any(name in methods[write.method] for c in owners for name in _words(c.fields[write.field])):
                continue  # a class of the product has that method: what it changes is its own
            if len(owners) == 1:
                by_field[owners[0], write.field].add(module.path)
            elif owners:
                of_no_class.append(write)
    return Writers(dict(by_field), of_no_class)


def _state_classes(module: Module) -> Iterator[StateClass]:
    core = next((core for core in CORES if is_in(module, (core,))), "")
    for node in module.tree.body if core else ():
        if not isinstance(node, ast.ClassDef):
            continue
        decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
        bases = tuple(ast.unparse(base) for base in node.bases)
        if "frozen=True" not in decorators and not any(NO_STATE.search(base) for base in bases):
            yield StateClass(core, module.path, node.name, _fields(node), bases)


def _fields(node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for inner in ast.walk(node):
        match inner:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if inner in node.body:
                found[name] = ast.unparse(annotation)
            case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name), annotation=annotation):
                found[name] = ast.unparse(annotation)
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
                found.setdefault(name, ast.unparse(value.func) if isinstance(value, ast.Call) else "")
    return found


def _methods(modules: list[Module]) -> dict[str, set[str]]:
    """By the name of a method, the names of the product's classes that have it."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, Function):
                        found[method.name].add(node.name)
    return found


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _owners(write: Write, known: list[StateClass], classes: list[StateClass]) -> list[StateClass]:
    """The class that is written; several if it is not clear which; none if it is no state of a core."""
    if _is_self(write.base):
        around = next((node.name for node in reversed(write.around) if isinstance(node, ast.ClassDef)), "")
        own = [c for c in classes if (c.path, c.name) == (write.module.path, around)]
        if own and write.field not in own[0].fields:
            own = [c for c in known if c.name in own[0].bases]
        return own
    if (words := _annotation(write)) is not None:
        return [c for c in known if c.name in words][:1]
    same_core = [c for c in known if is_in(write.module, (c.core,))]
    if len(same_core) < 2:
        return same_core
    last_word = re.findall(r"[a-z0-9_]+", ast.unparse(write.base).lower())[-1].strip("_")
    kinds = {word for c in classes if is_in(write.module, (c.core,)) for word in _words(c.fields.get(last_word, ""))}
    named = [c for c in same_core if c.name in kinds or c.name.lower() == last_word.replace("_", "")]
    return named if len(named) == 1 else same_core


def _annotation(write: Write) -> set[str] | None:
    """The words of the annotation of a plain name; None if it has none."""
    if not isinstance(write.base, ast.Name):
        return None
    for function in reversed(write.around):
        for node in ast.walk(function):
            match node:
                case ast.arg(arg=name, annotation=ast.expr() as annotation) if name == write.base.id:
                    return _words(ast.unparse(annotation))
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if name == write.base.id:
                    return _words(ast.unparse(annotation))
    return None


def _writes(module: Module, node: ast.AST, around: tuple[ast.ClassDef | Function, ...]) -> Iterator[Write]:
    for inner in ast.iter_child_nodes(node):
        for base, field, method in _written(inner):
            starts = around and around[-1].name in ("__init__", "__post_init__") and _is_self(base)
            if not starts:
                yield Write(module, base.lineno, base, field, method, around)
        inside = (*around, inner) if isinstance(inner, ast.ClassDef | Function) else around
        yield from _writes(module, inner, inside)


def _written(node: ast.AST) -> Iterator[tuple[ast.expr, str, str]]:
    match node:
        case ast.Attribute(value=base, attr=field, ctx=ast.Store() | ast.Del()):
            yield base, field, ""
        case ast.Subscript(value=container, ctx=ast.Store() | ast.Del()):
            yield from _container(container, "__setitem__")
        case ast.Call(func=ast.Attribute(value=container, attr=name)) if name in CHANGING:
            yield from _container(container, name)


def _container(expression: ast.expr, method: str) -> Iterator[tuple[ast.expr, str, str]]:
    while isinstance(expression, ast.Subscript):
        expression = expression.value
    if isinstance(expression, ast.Attribute):
        yield expression.value, expression.attr, method


def _is_self(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Name) and expression.id == "self"
