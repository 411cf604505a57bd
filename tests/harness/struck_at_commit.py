"""`python -m tests.harness.struck_at_commit VERB ...`: the guarded `atoll` command, whose coordinator gets a signal in
front of COMMIT of a commit of the run, after all else of that transaction was done: at the next one once the file that
STRIKES names is there, with the signal that it names. The file is gone then."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.coordinator.core.events import CommitRecord, Record
from atoll.coordinator.postgresql_store import PostgresqlStore
from atoll.protocol.messages import Deposit
from tests.harness import guarded

PROGRAM = ("-m", "tests.harness.struck_at_commit")
STRIKES = "ATOLL_TEST_STRIKES"


def install(file: Path) -> None:
    persist, commit = PostgresqlStore.persist, PostgresqlStore._commit
    is_due = False

    def watched(self: PostgresqlStore, term: int, records: Sequence[Record], wall_time_s: float) -> tuple[Deposit, ...]:
        nonlocal is_due
        is_due = file.exists() and any(isinstance(record, CommitRecord) for record in records)
        return persist(self, term, records, wall_time_s)

    def struck(self: PostgresqlStore) -> None:
        nonlocal is_due
        if is_due:
            is_due, number = False, signal.Signals[file.read_text()]
            file.unlink()
            os.kill(os.getpid(), number)
        commit(self)

    PostgresqlStore.persist = watched  # type: ignore[assignment, method-assign]
    PostgresqlStore._commit = struck  # type: ignore[method-assign]


if __name__ == "__main__":
    install(Path(os.environ[STRIKES]))
    sys.exit(guarded.run())
