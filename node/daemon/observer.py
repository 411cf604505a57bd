"""What a node shows of itself: the journal's lines, the heartbeat, the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from atoll.node.core import events as e
from atoll.node.core.ranks.reports import in_words
from atoll.node.core.ranks.status import RankStatus
from atoll.node.core.site import SiteCore
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.journal import Journal
from atoll.node.exchange.hub import Hub
from atoll.protocol import messages as m
from atoll.protocol import pages
from atoll.protocol.http import Answer, plain_text
from atoll.protocol.page_access import Access

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

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.exchange_s = 0.0
        """Of the last exchange; set by whoever ran it. So is `apply_s`."""
        self.apply_s = 0.0
        self._loss = 0.0
        self._train_s = self._wait_s = 0.0
        self._num_syncs = 0
        self._sealed_at = 0.0
        self._work: object = None
        self._progress = 0

    def last_sync(self) -> str:
        """In words."""
        loss = f"loss {self._loss:.4f}, " if self._loss else ""
        return f"{loss}exchanged in {self.exchange_s:.2f} s, applied in {self.apply_s:.2f} s"

    def heartbeat(self) -> m.Heartbeat:
        """What the coordinator hears. Each counts progress."""
        said = self._said()
        return replace(said, progress=self._count_progress(said))

    def _count_progress(self, said: m.Heartbeat) -> int:
        """How often the paths that do the work had done any since the heartbeat before; signs of life are none."""
        site = self.core.site
        ranks = tuple((rank.due, rank.busy) for rank in self._ranks())
        work = (said.phase, site.workers.generation, site.num_crashes, ranks, said.inner_step, said.moved_bytes)
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
        said, site, hub = self._said(), self.core.site, self.hub
        outer, restart_at, checkpoints = site.disk.outer, site.workers.restart_at, self.core.ranks.checkpoints
        info = {
            "run_id": self.core.settings.run_id,
            "site": self.config.name,
            "site_id": str(site.site_id),
            "incarnation": str(self.core.ctx.identity.incarnation),
            "phase": said.phase,
        }
        yield InfoMetricFamily("atoll_node", "Who this node is and what it does", info)
        restart_s = max(0.0, restart_at - self._loop.time()) if restart_at is not None else 0.0
        restart_text = "Time until workers that crashed again and again are started anew; 0 while there are workers"
        error_text = "Norm of the error feedback over that of what was to be sent, of the fragment with the largest"
        for name, text, value in (
            ("atoll_node_connected", "1 while the session with the coordinator is up", float(site.welcomed)),
            ("atoll_node_commit", "Last commit applied; -1 before commit 0", outer.commit if outer else -1),
            ("atoll_node_inner_step", "Inner steps of the run, as this site counts them", said.inner_step),
            ("atoll_node_steps_per_second", "Inner steps per second in the last window", said.steps_per_s),
            ("atoll_node_loss", "Mean training loss of the last window", said.loss),
            ("atoll_node_error_share", error_text, said.error_share),
            (
                "atoll_node_retained_bytes",
                "Contributions, payloads and errors of averages held as a reducer",
                hub.retained_bytes,
            ),
            ("atoll_node_restart_wait_seconds", restart_text, restart_s),
            ("atoll_node_last_exchange_seconds", "Time of the last exchange", self.exchange_s),
            ("atoll_node_last_apply_seconds", "Time of applying and hashing the last commit", self.apply_s),
        ):
            yield GaugeMetricFamily(name, text, value)
        refused = hub.counters.refused.total() + self.num_refused()
        moved_text = "Bytes of chunks that were lacking and came, or that a site took which lacks them"
        skipped_text = "Checkpoints left out because the one before was still being written"
        failed_text = "Checkpoints that could not be written, as on a full disk"
        for name, text, value in (
            ("atoll_node_sent_bytes", "Bytes of chunks sent to peers", said.sent_bytes),
            ("atoll_node_received_bytes", "Bytes of chunks received from peers", said.received_bytes),
            ("atoll_node_moved_bytes", moved_text, said.moved_bytes),
            ("atoll_node_reconnects", "Streams to peers that broke and were opened again", hub.counters.reconnects),
            ("atoll_node_refused_messages", "Messages refused as malformed, stale or foreign", refused),
            ("atoll_node_train_seconds", "Time the workers trained", said.train_s),
            ("atoll_node_wait_seconds", "Time the workers waited for a sync", said.wait_s),
            ("atoll_node_worker_starts", "Generations of workers launched", site.workers.generation),
            ("atoll_node_worker_crashes", "Times that the workers crashed or hung", site.num_crashes),
            ("atoll_node_checkpoints_written", "Checkpoints of inner optimizers that ranks wrote", checkpoints.written),
            ("atoll_node_checkpoints_skipped", skipped_text, checkpoints.skipped),
            ("atoll_node_checkpoints_failed", failed_text, checkpoints.failed),
            ("atoll_node_wrong_states", "States that were not the run's and were repaired", site.num_wrong_states),
            ("atoll_node_errors_dropped", "Times that error feedback was lost and began anew", site.num_errors_dropped),
            (
                "atoll_node_average_errors_dropped",
                "Chunks whose average's error was lost",
                hub.average_errors.num_dropped,
            ),
            ("atoll_node_syncs", "Commits applied by this process", self._num_syncs),
        ):
            yield CounterMetricFamily(name, text, value)

    def observe(self, event: e.Event) -> None:
        """Losses and events for the journal and the metrics."""
        match event:
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
                self._num_syncs += 1
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
