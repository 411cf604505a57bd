"""What a node shows of itself: the journal's lines, the heartbeat, the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.ranks.reports import in_words
from atoll.node.core.ranks.status import RankStatus
from atoll.node.core.site import SiteCore
from atoll.node.daemon.allowance import Sent
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.journal import Journal
from atoll.node.daemon.logged_values import LoggedValues
from atoll.node.daemon.metrics import METRICS, Look
from atoll.node.daemon.sync_phases import SitePhases
from atoll.node.daemon.tracing import SiteTraces
from atoll.node.exchange.hub import Hub
from atoll.node.relay.attached import Attached
from atoll.protocol import messages as m
from atoll.protocol import pages
from atoll.protocol.http import Answer, plain_text
from atoll.protocol.metrics import families
from atoll.protocol.page_access import Access
from atoll.protocol.traces import Metadata

PROCESS = ProcessCollector(registry=None)
MAX_DOING_CHARACTERS = 64  # of a heartbeat


@dataclass(eq=False, kw_only=True)
class Observer:
    """Reads the parts of a node; `observe` every event that the core has handled."""

    config: NodeConfig
    core: SiteCore
    hub: Hub
    journal: Journal
    num_refused: Callable[[], int]
    """Messages of the coordinator and of ranks that made no sense."""
    attached: Attached | None = None
    """To a relay."""
    sent: Callable[[], Sent] = Sent
    """In this month, as far as it was looked at."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.logged = LoggedValues(self.journal)
        self.exchange_s = 0.0
        """Of the last one."""
        self.apply_s = 0.0
        """The same; set by whoever applied it."""
        self._loss = 0.0
        self._train_s = self._wait_s = 0.0
        self.num_applied = 0
        """Commits."""
        self.exchange_total_s = self.apply_total_s = 0.0
        self._sealed_at = 0.0
        self._work: object = None
        self.phases = SitePhases()
        self.traces: SiteTraces | None = None
        """Of syncs, where they are traced."""
        self.num_lost_spans: Callable[[], int | None] = lambda: None
        self.num_written: Callable[[], int] = lambda: 0
        """Records of the outer state: a slow disk is no hang."""
        self._progress = 0

    def exchanged(self, seconds: float) -> None:
        """An exchange is over."""
        self.exchange_s = seconds
        self.exchange_total_s += seconds

    def last_sync(self) -> str:
        """In words."""
        loss = f"loss {self._loss:.4f}, " if self._loss else ""
        return f"{loss}exchanged in {self.exchange_s:.2f} s, applied in {self.apply_s:.2f} s"

    def heartbeat(self) -> m.Heartbeat:
        """What the coordinator hears. Each counts progress."""
        said = self._said()
        return replace(said, progress=self._count_progress(said), phases=self.phases.taken())

    def _count_progress(self, said: m.Heartbeat) -> int:
        """How often the paths that do the work had done any since the heartbeat before; signs of life are none."""
        site = self.core.site
        ranks = tuple((rank.due, rank.busy) for rank in self._ranks())
        moved = said.moved_bytes, self.num_written()
        work = (said.phase, site.workers.generation, site.num_crashes, ranks, said.inner_step, moved)
        if work != self._work:
            self._work = work
            self._progress += 1
        return self._progress

    def _ranks(self) -> tuple[RankStatus, ...]:
        """None between a crash and the start of new workers: those that are known then are the dead ones."""
        group = self.core.ranks.group
        return group.ranks if group is not None and self.core.site.workers.restart_at is None else ()

    def _said(self) -> m.Heartbeat:
        site = self.core.site
        outer, workers = site.disk.outer, site.workers
        ranks = self._ranks()
        watch = self.core.ranks.watch(self.core.limits) if ranks else None
        doing, limit_s = (watch.doing, watch.limit_s) if watch else ("", 0.0)
        if workers.restart_at is not None:
            doing = f"workers crashed {workers.crashes_in_a_row} times in a row"
            limit_s = self.core.limits.max_restart_s  # for the pause before new workers are started
        if workers.waits:
            doing = f"waiting for {in_words(site.missing_hosts, 'host')} of this site"
            limit_s = float(self.core.settings.max_busy_s)
        contributions, payloads = self.hub.waits_for()
        step = min((r.step for r in ranks), default=0)
        run_step = outer.run_step if outer else 0
        return m.Heartbeat(
            phase=self.core.phase,
            inner_step=run_step + max(step - site.base_step, 0),
            num_ranks=self.config.num_site_ranks,
            steps_per_s=max((r.steps_per_s for r in ranks), default=0.0),
            loss=self._loss,
            train_s=self._train_s,
            wait_s=self._wait_s,
            error_share=max(site.error_shares, default=0.0),
            sent_bytes=self.hub.counters.sent_bytes,
            received_bytes=self.hub.counters.received_bytes,
            moved_bytes=self.hub.counters.moved_bytes,
            doing=doing[:MAX_DOING_CHARACTERS],
            limit_s=limit_s,
            waits_for_contributions=tuple(contributions[: m.MAX_WAITS]),
            waits_for_payloads=tuple(payloads[: m.MAX_WAITS]),
        )

    def pages(self, access: Access = pages.OPEN) -> pages.Pages:
        """/metrics."""

        async def answer(path: str) -> Answer:
            if path != "/metrics":
                return plain_text(404, "there is /metrics")
            return pages.metrics(self.metrics())  # on the event loop, where what it reads changes

        return pages.Pages(answer, access)

    def metrics(self) -> Iterator[Metric]:
        """One consistent look at the node, for Prometheus."""
        restart_at = self.core.site.workers.restart_at
        restart_s = max(0.0, restart_at - self._loop.time()) if restart_at is not None else 0.0
        look = Look(
            config=self.config,
            core=self.core,
            hub=self.hub,
            said=self._said(),
            num_refused=self.hub.counters.refused.total() + self.num_refused(),
            restart_s=restart_s,
            exchange_s=self.exchange_s,
            apply_s=self.apply_s,
            num_applied=self.num_applied,
            attached=self.attached,
            month_sent_bytes=self.sent().num_bytes,
            num_lost_spans=self.num_lost_spans(),
        )
        yield from families(METRICS, look)
        yield from PROCESS.collect()

    def observe(self, event: e.Event) -> None:
        """Losses and events for the journal, the metrics and the trace."""
        self.phases.heard(event, self._loop.time())
        if self.traces is not None:
            self.traces.heard(event, self._loop.time())
        match event:
            case e.RankSaid(rank=rank, said=m.Logged() as said):
                self.logged.heard(rank, said)
            case e.SnapshotSealed(step=step, tokens=tokens, num_steps=num_steps, mean_loss=loss, train_s=train_s):
                self._sealed_at = self._loop.time()
                self._train_s += train_s
                if num_steps:
                    self._loss = loss
                if train_s > 0:  # else the same snapshot again; num_steps is 0 without a loss
                    self.journal.write(
                        "window",
                        step=step,
                        tokens=tokens,
                        num_steps=num_steps,
                        loss=loss if num_steps else None,
                        train_s=round(train_s, 4),
                    )
            case e.Merged(version=version, wait_s=wait_s):
                self._wait_s += wait_s
                self.journal.write("merged", commit=version, wait_s=round(wait_s, 4))
            case e.CommitApplied(commit=commit, state_hash=state_hash):
                self.num_applied += 1
                self.apply_total_s += self.apply_s
                self.journal.write(
                    "commit",
                    commit=commit,
                    state_hash=state_hash.hex(),
                    exchange_s=round(self.exchange_s, 4),
                    apply_s=round(self.apply_s, 4),
                    sent_bytes=self.hub.counters.sent_bytes,
                    received_bytes=self.hub.counters.received_bytes,
                    error_commits=list(self.core.site.error_commits),
                )
            case e.Published(content):
                since_s = self._loop.time() - self._sealed_at
                self.journal.write("published", commit=content.version, since_sealed_s=round(since_s, 4))
            case e.Received(message=m.Commit() as commit):
                since_s = self._loop.time() - self._sealed_at
                self.journal.write("commit_received", commit=commit.commit, since_sealed_s=round(since_s, 4))
            case e.WorkersFailed(text=text) | e.ExchangeBroken(error=text):
                self.journal.write(type(event).__name__, text=str(text))

    def session_metadata(self) -> Metadata | None:
        """Of another stream to the coordinator."""
        return None if self.traces is None else self.traces.begin_session()

    def wanted(self, output: out.Output) -> None:
        """By the core, before it is done; for the trace."""
        self.phases.wanted(output, self._loop.time())
        if self.traces is not None:
            self.traces.wanted(output, self._loop.time())
