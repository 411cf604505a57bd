"""A site's spans of syncs, from the events that its core hears and from what it wants done (`observer.py` alike).

Of the node itself: what other hosts and exchange processes of the site do meanwhile is inside of its exchange. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.exchange_events import ExchangeFinished
from atoll.protocol import messages as m
from atoll.protocol import traces
from atoll.protocol.traces import Attribute, Metadata, Place, Span

MOST_SYNCS = 64
"""That are open; the oldest ends where there are more."""


@dataclass(slots=True)
class _Sync:
    begin_s: float
    end_s: float
    """Of the newest phase that is over."""
    commit: int | None = None
    attempt: int = 0
    begun: dict[str, float] = field(default_factory=dict)
    """Phases that are not over."""


class SiteTraces:
    """`heard` each event after the core has handled it, and then `wanted` each output, both in their order."""

    def __init__(
        self, run_id: str, site: str, incarnation: int, *, site_id: Callable[[], int], send: Callable[[Span], None]
    ) -> None:
        self._run_id = run_id
        self._about: dict[str, Attribute] = {"atoll.run": run_id, "atoll.site": site, "atoll.start": incarnation}
        self._site, self._incarnation = site, incarnation
        self._site_id = site_id
        self._send = send
        self._open: dict[int, _Sync] = {}
        self._of_commit: dict[int, int] = {}  # the syncs of those that are open
        self._sealed_s = 0.0
        self._num_sessions = 0
        self._session_s: float | None = None

    # --- where calls are made

    def enter(self, plan: m.Plan) -> None:
        """The task that calls is the exchange of this plan, and so are those that it starts."""
        traces.CALLS.set(traces.of_exchange(self._run_id, plan.sync, self._site_id(), plan.attempt))

    def begin_session(self) -> Metadata:
        """Of another stream to the coordinator."""
        self._num_sessions += 1
        return traces.metadata_of(self._session_place())

    def _session_place(self) -> Place:
        return traces.of_session(self._run_id, self._site, self._incarnation, self._num_sessions)

    # --- what happens

    def heard(self, event: e.Event, now: float) -> None:
        match event:
            case e.SessionOpened():
                self._session_s = now
            case e.SessionLost():
                self._end_session(now)
            case e.SnapshotSealed():
                self._sealed_s = now
            case ExchangeFinished(plan=plan):
                self._end(plan.sync, "exchange", now)
                self._begin(plan.sync, "wait for commit", now)
            case e.ExchangeBroken(plan=plan):
                self._end(plan.sync, "exchange", now, "broken")
            case e.Received(message=m.Commit() as commit):
                if (sync := self._open.get(commit.sync)) is not None:
                    sync.commit = commit.commit
                    self._of_commit[commit.commit] = commit.sync
                    self._end(commit.sync, "wait for commit", now)
            case e.CommitApplied(commit=number):
                self._end_of_commit(number, "apply", now)
            case e.ApplyFailed(commit=number):
                self._end_of_commit(number, "apply", now, "failed")
            case e.Published(content=content):
                if (of_commit := self._end_of_commit(content.version, "publish", now)) is not None:
                    self._begin(of_commit, "take", now)
            case e.Merged(version=version):
                self._end_of_commit(version, "take", now)
                for taken in [taken for taken in self._of_commit if taken <= version]:
                    self._close(self._of_commit[taken])
            case _:
                pass

    def wanted(self, output: out.Output, now: float) -> None:
        match output:
            case out.Send(message=m.Ready(sync=sync, train_s=train_s)):
                self._part(sync, "train", self._sealed_s - train_s, self._sealed_s)
                self._begin(sync, "wait for plan", now)
            case out.BeginExchange(plan=plan):
                self._end(plan.sync, "wait for plan", now)
                self._end(plan.sync, "exchange", now, "another attempt")
                self._begin(plan.sync, "exchange", now)
                self._open[plan.sync].attempt = plan.attempt
            case out.CancelExchange(sync=sync):
                self._end(sync, "exchange", now, "cancelled")
            case out.ApplyCommit(commit=commit) if commit.sync in self._open:
                self._begin(commit.sync, "apply", now)
            case out.PublishState(content=content) if content.version in self._of_commit:
                self._begin(self._of_commit[content.version], "publish", now)
            case out.DropSync(sync=sync) if sync in self._open and self._open[sync].commit is None:
                self._close(sync, "no commit")
            case _:
                pass

    def close(self) -> None:
        """The node has ended: what is open is sent as far as it came."""
        for sync in tuple(self._open):
            self._close(sync)

    # --- spans

    def _begin(self, number: int, name: str, now: float) -> None:
        self._at(number, now).begun[name] = now

    def _at(self, number: int, begin_s: float) -> _Sync:
        if number not in self._open and len(self._open) >= MOST_SYNCS:
            self._close(min(self._open))
        sync = self._open.setdefault(number, _Sync(begin_s, begin_s))
        sync.begin_s = min(sync.begin_s, begin_s)
        return sync

    def _end(self, number: int, name: str, now: float, problem: str = "") -> None:
        """Of a phase, if it has begun."""
        sync = self._open.get(number)
        if sync is not None and (since := sync.begun.pop(name, None)) is not None:
            self._part(number, name, since, now, problem)

    def _end_of_commit(self, commit: int, name: str, now: float, problem: str = "") -> int | None:
        """The same; of which sync, if that is open."""
        if (number := self._of_commit.get(commit)) is not None:
            self._end(number, name, now, problem)
        return number

    def _part(self, number: int, name: str, begin_s: float, end_s: float, problem: str = "") -> None:
        sync = self._at(number, begin_s)
        sync.end_s = max(sync.end_s, end_s)
        about, site_id = dict(self._about), self._site_id()
        parent = traces.of_site(self._run_id, number, site_id)
        place = Place(parent.trace_id, traces.inside(parent.trace_id, name, site_id))
        if name == "exchange":
            about["atoll.attempt"] = sync.attempt
            place = traces.of_exchange(self._run_id, number, site_id, sync.attempt)
        self._send(
            Span(
                name=name,
                place=place,
                parent=parent,
                begin_s=begin_s,
                end_s=end_s,
                attributes=about,
                problem=problem,
            )
        )

    def _close(self, number: int, problem: str = "") -> None:
        sync = self._open.pop(number)
        about = self._about | {"atoll.sync": number}
        if sync.commit is not None:
            about["atoll.commit"] = sync.commit
            self._of_commit.pop(sync.commit, None)
        self._send(
            Span(
                name="site",
                place=traces.of_site(self._run_id, number, self._site_id()),
                parent=traces.of_sync(self._run_id, number),
                begin_s=sync.begin_s,
                end_s=sync.end_s,
                attributes=about,
                problem=problem,
            )
        )

    def _end_session(self, now: float) -> None:
        if self._session_s is not None:
            self._send(
                Span(
                    name="session",
                    place=self._session_place(),
                    begin_s=self._session_s,
                    end_s=now,
                    attributes=self._about,
                )
            )
            self._session_s = None
