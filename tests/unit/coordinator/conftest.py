"""What tests of the coordinator share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.coordinator.sqlite_store import SqliteStore
from atoll.coordinator.store import Store
from tests.harness.memory_store import MemoryStore

Reopen = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    """Each call is the store as the next coordinator finds it."""
    memory = MemoryStore()
    last: list[SqliteStore] = []

    def sqlite() -> Store:
        for old in last:
            old.close()
        last[:] = [SqliteStore(tmp_path / "run.db")]
        return last[0]

    yield (lambda: memory) if request.param == "memory" else sqlite
    for store in last:
        store.close()
