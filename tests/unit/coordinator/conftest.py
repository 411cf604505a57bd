"""What tests of the coordinator share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.coordinator.lease import Claim
from atoll.coordinator.postgresql import Database
from atoll.coordinator.postgresql_store import PostgresqlStore
from atoll.coordinator.sql_store import SqlStore
from atoll.coordinator.sqlite_store import SqliteStore
from atoll.coordinator.stage import NoRoots
from atoll.coordinator.store import Store
from tests.harness import postgresql
from tests.harness.memory_store import MemoryStore

Reopen = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgresql", marks=postgresql.needed)])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    """Each call is the store as the next coordinator finds it."""
    memory = MemoryStore()
    last: list[SqlStore] = []

    def sqlite() -> Store:
        for old in last:
            old.close()
        last[:] = [SqliteStore(tmp_path / "run.db")]
        return last[0]

    def in_postgresql() -> Store:
        """By the same coordinator, whose lease is not over."""
        for old in last:
            old.close()
        store = PostgresqlStore(database)
        last[:] = [store]
        store.claims(Claim("one", "here:1"), lambda: None, NoRoots())
        return store

    if request.param == "postgresql":
        database = Database.named(request.getfixturevalue("postgresql_server").emptied())
    yield {"memory": lambda: memory, "sqlite": sqlite, "postgresql": in_postgresql}[request.param]
    for store in last:
        store.close()
