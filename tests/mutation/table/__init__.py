"""The mutations, in a file for each folder of the code, in its order; several for a folder of many."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.mutation.mutation import Mutation

FOLDER = Path(__file__).parent
TABLE: dict[str, tuple[Mutation, ...]] = {
    f"tests/mutation/table/{path.name}": import_module(f"{__name__}.{path.stem}").MUTATIONS
    for path in sorted(FOLDER.glob("*.py"))
    if path.stem != "__init__"
}
"""By file."""
MUTATIONS = tuple(mutation for mutations in TABLE.values() for mutation in mutations)
FILE_OF = {mutation.name: file for file, mutations in TABLE.items() for mutation in mutations}
