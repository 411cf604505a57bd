"""The product's modules, as they are measured: parsed, without what is generated."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("node", "protocol", "coordinator", "src")
CORES = ("atoll.coordinator.core", "atoll.node.core")
GENERATED = "protocol/v1/", "src/atoll/_version.py"

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Module:
    path: str
    """Below the root of the repository."""
    source: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """As it is imported."""
        return name_of(self.path)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")


def name_of(path: str) -> str:
    inside = path.removeprefix("src/atoll/").removesuffix(".py")
    return f"atoll/{inside}".removesuffix("/__init__").replace("/", ".")


def parsed(path: str, source: str) -> Module:
    return Module(path, source, ast.parse(source))


def modules_in(root: Path) -> list[Module]:
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):  # goes through no link
            name = path.relative_to(root).as_posix()
            if not name.startswith(GENERATED):
                found.append(parsed(name, path.read_text(encoding="utf-8")))
    return found


def is_in(module: Module, packages: tuple[str, ...]) -> bool:
    return any(f"{module.name}.".startswith(f"{package}.") for package in packages)
