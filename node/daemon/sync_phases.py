"""What each sync took at a site, from the events that its core hears and from what it wants done (`tracing.py` alike).
Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.exchange_events import ExchangeFinished
from atoll.protocol import messages as m
from atoll.protocol.figures import SyncPhases

MOST_SYNCS = 64
"""That are open; the oldest is forgotten where there are more."""


@dataclass(slots=True)
class _Sync:
    train_s: float = 0.0
    snapshot_s: float = 0.0
    exchange_s: float = 0.0
    apply_s: float = 0.0
    exchanging_since: float | None = None
    applying_since: float | None = None


class SitePhases:
    """`heard` each event after the core has handled it, and then `wanted` each output, both in their order."""

    def __init__(self) -> None:
        self._open: dict[int, _Sync] = {}
        self._of_commit: dict[int, int] = {}  # the syncs of those that are open
        self._writing_since: float | None = None
        self._snapshot_s = 0.0  # of the newest one
        self._taken: deque[SyncPhases] = deque(maxlen=m.MAX_PHASES)

    def heard(self, event: e.Event, now: float) -> None:
        match event:
            case e.SnapshotSealed() if self._writing_since is not None:
                self._snapshot_s, self._writing_since = now - self._writing_since, None
            case ExchangeFinished(plan=plan) | e.ExchangeBroken(plan=plan):
                self._end_exchange(plan.sync, now)
            case e.Received(message=m.Commit() as commit) if commit.sync in self._open:
                self._of_commit[commit.commit] = commit.sync
            case e.CommitApplied(commit=number) | e.ApplyFailed(commit=number):
                self._end_apply(number, now)
            case e.Published(content=content):
                self._end_apply(content.version, now)
            case e.Merged(version=version, wait_s=wait_s):
                self._merged(version, wait_s)
            case _:
                pass

    def wanted(self, output: out.Output, now: float) -> None:
        match output:
            case out.AnswerWorkers(answer=answer) if answer.kind is e.AnswerKind.SNAPSHOT:
                self._writing_since = now
            case out.Send(message=m.Ready(sync=number, train_s=train_s)):
                sync = self._at(number)
                sync.train_s, sync.snapshot_s = train_s, self._snapshot_s
            case out.BeginExchange(plan=plan):
                self._end_exchange(plan.sync, now)
                self._at(plan.sync).exchanging_since = now
            case out.CancelExchange(sync=number):
                self._end_exchange(number, now)
            case out.ApplyCommit(commit=commit) if commit.sync in self._open:
                self._open[commit.sync].applying_since = now
            case out.PublishState(content=content) if content.version in self._of_commit:
                self._open[self._of_commit[content.version]].applying_since = now
            case out.DropSync(sync=number) if number not in self._of_commit.values():
                self._open.pop(number, None)  # nothing comes of it
            case _:
                pass

    def taken(self) -> tuple[SyncPhases, ...]:
        """Of syncs whose result the ranks have taken since the call before."""
        found, self._taken = tuple(self._taken), deque(maxlen=m.MAX_PHASES)
        return found

    def _at(self, number: int) -> _Sync:
        if number not in self._open and len(self._open) >= MOST_SYNCS:
            self._forget(min(self._open))
        return self._open.setdefault(number, _Sync())

    def _forget(self, number: int) -> None:
        del self._open[number]
        self._of_commit = {commit: sync for commit, sync in self._of_commit.items() if sync != number}

    def _end_exchange(self, number: int, now: float) -> None:
        sync = self._open.get(number)
        if sync is not None and sync.exchanging_since is not None:
            sync.exchange_s += now - sync.exchanging_since
            sync.exchanging_since = None

    def _end_apply(self, commit: int, now: float) -> None:
        sync = self._open.get(self._of_commit.get(commit, -1))
        if sync is not None and sync.applying_since is not None:
            sync.apply_s += now - sync.applying_since
            sync.applying_since = None

    def _merged(self, version: int, wait_s: float) -> None:
        """The ranks have waited for the newest of the commits that they take."""
        commits = sorted(commit for commit in self._of_commit if commit <= version)
        for commit in commits:
            number = self._of_commit.pop(commit)
            if (sync := self._open.pop(number, None)) is not None:
                self._taken.append(
                    SyncPhases(
                        sync=number,
                        train_s=sync.train_s,
                        snapshot_s=sync.snapshot_s,
                        exchange_s=sync.exchange_s,
                        apply_s=sync.apply_s,
                        wait_s=wait_s if commit == commits[-1] else 0.0,
                    )
                )
