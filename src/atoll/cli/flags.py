"""Flags from the dataclass that they fill: type, default and docstring of a field are said once, at the field."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from atoll.protocol.dates import duration_s
from atoll.protocol.strict import field_types
from atoll.protocol.text import LOG_FORMATS


@dataclass(frozen=True, slots=True)
class Flag:
    """Of one field."""

    metavar: str | None = None
    name: str = ""
    """With its dashes, where it is not the field's."""
    read: Callable[[str], Any] | None = None
    """The value that a person's text stands for; the field's type, where that is all."""


def add_flags(parser: argparse.ArgumentParser, cls: type, flags: Mapping[str, Flag], *, set_only: bool = False) -> None:
    """Of fields of `cls`; their docstrings are the help. `set_only`: None for those that are not given."""
    docs, kinds = field_docs(cls), field_types(cls)
    for item in dataclasses.fields(cls):
        if (flag := flags.get(item.name)) is None:
            continue
        is_required = item.default is dataclasses.MISSING
        text = docs[item.name].replace("%", "%%")
        if not is_required and item.default not in (None, "", (), False):
            text = f"{text.removesuffix('.')} (default: {item.default})"
        options: dict[str, Any] = {"dest": item.name, "help": text, "required": is_required and not set_only}
        if not is_required:
            options["default"] = None if set_only else item.default
        if kinds[item.name] is bool:
            options["action"] = "store_true"
        else:
            (kind, *rest) = get_args(kinds[item.name]) or (kinds[item.name],)
            options |= {"type": flag.read or kind, "metavar": flag.metavar}
            if rest == [Ellipsis]:
                options |= {"nargs": "+", "action": "extend", "default": []}
        parser.add_argument(flag.name or f"--{item.name.replace('_', '-')}", **options)


def log_format(text: str) -> str:
    """Raises argparse's error."""
    if text not in LOG_FORMATS:
        raise argparse.ArgumentTypeError(f"write {' or '.join(LOG_FORMATS)}, not {text!r}")
    return text


def lasting(text: str) -> int:
    """Seconds. Raises argparse's error."""
    try:
        return duration_s(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"write 90m, 24h or 7d, not {text!r}") from None


def given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Of flags, those that a person gave."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, in one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for item, follower in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and isinstance(follower, ast.Expr)
            and isinstance(follower.value, ast.Constant)
            and isinstance(follower.value.value, str)
        ):
            docs[item.target.id] = " ".join(follower.value.value.split())
    return docs
