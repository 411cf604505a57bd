"""Records of commits as a store keeps them, and what must be true of them."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from atoll.coordinator import rows
from atoll.coordinator.core.events import CommitRecord


def commits_of(store: Path) -> list[CommitRecord]:
    """Of a SQLite file that nobody has open."""
    with closing(sqlite3.connect(store)) as db:
        return decoded(db.execute("SELECT body FROM records WHERE kind = 'commit' ORDER BY number"))


def decoded(bodies: Iterable[tuple[bytes]]) -> list[CommitRecord]:
    records = [rows.decode("commit", body) for (body,) in bodies]
    return [record for record in records if isinstance(record, CommitRecord)]


def assert_each_sample_counts_once(commits: list[CommitRecord]) -> None:
    positions = Counter(
        (line.line, n) for c in commits for line in c.commit.done for r in line.ranges for n in range(r.first, r.end)
    )
    assert positions
    assert max(positions.values()) == 1
    assert sum(positions.values()) == commits[-1].commit.run_tokens
