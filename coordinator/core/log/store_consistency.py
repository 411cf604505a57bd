"""Whether what a store gave back fits together. A checksum does not tell that a row is missing, or is an older one."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.coordinator.core.data.ledger import Ledger
from atoll.coordinator.core.events import Persisted
from atoll.protocol.errors import StateError


def check(persisted: Persisted, keep: int, first_run_tokens: int, ledger: Ledger) -> None:
    """`keep`: how many of the newest commits a store gives. Raises StateError."""
    if what := next(_contradictions(persisted, keep, first_run_tokens, ledger), None):
        raise StateError(what)


def _contradictions(persisted: Persisted, keep: int, first_run_tokens: int, ledger: Ledger) -> Iterator[str]:
    commits = [r.commit for r in persisted.commits]
    if commits and commits[0].commit != 1 and len(commits) < keep:
        yield f"commit {commits[0].commit - 1} is missing"
    last, last_sync = commits[0].commit - 1 if commits else 0, 0
    tokens = None if last else first_run_tokens  # of what was before the first one
    for commit in commits:
        if commit.commit != last + 1:
            yield f"commit {commit.commit} follows commit {last}"
        added = sum(c.tokens for c in commit.contributors)
        if tokens is not None and commit.run_tokens != tokens + added:
            yield f"commit {commit.commit} adds {added} tokens to {tokens} and makes {commit.run_tokens}"
        if commit.term >= persisted.term:
            yield f"commit {commit.commit} is of term {commit.term}, this is term {persisted.term}"
        if not last_sync < commit.sync <= persisted.last_sync:
            yield f"commit {commit.commit} is of sync {commit.sync}, after sync {last_sync} of {persisted.last_sync}"
        for part in commit.done:
            if part.line not in ledger.lines or not ledger.lines[part.line].done.holds_all(part.ranges):
                yield f"commit {commit.commit} lists positions of line {part.line} that are not done"
        last, tokens, last_sync = commit.commit, commit.run_tokens, commit.sync
    if persisted.open is not None:
        now = persisted.open.open
        if (now.base_commit, now.run_tokens) != (last, tokens):
            yield f"sync {now.sync} is open on commit {now.base_commit}, the last commit is {last}"
    if persisted.finished is not None and persisted.finished.commit != last:
        yield f"the run is over with commit {persisted.finished.commit}, the last commit is {last}"
