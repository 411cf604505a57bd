"""What a node shows of itself: the journal's lines, the heartbeat, the facts behind the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields

from atoll.node.core import events as e
from atoll.node.core.ranks.status import RankStatus
from atoll.node.core.site import SiteCore
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.journal import Journal
from atoll.node.daemon.metrics import NodeFacts
from atoll.node.exchange.hub import Hub
from atoll.protocol import messages as m

MAX_DOING_CHARACTERS = 64  # of a heartbeat


class Observer:
    """Reads the parts of a node; `observe` every event before the core gets it."""

    def __init__(
        self,
        *,
        config: NodeConfig,
        core: SiteCore,
        hub: Hub,
        journal: Journal,
        num_refused: Callable[[], int],
    ) -> None:
        """`num_refused`: messages of the coordinator and of ranks that made no sense."""
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._core = core
        self._hub = hub
        self._journal = journal
        self._num_refused = num_refused
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
        """What the coordinator hears of the facts. Each counts progress."""
        facts = self.facts()
        said = {item.name: getattr(facts, item.name) for item in fields(m.Heartbeat)}
        return m.Heartbeat(**said | {"progress": self._count_progress(facts)})

    def _count_progress(self, facts: NodeFacts) -> int:
        """How often the paths that do the work had done any since the heartbeat before; signs of life are none."""
        ranks = tuple((rank.due, rank.busy) for rank in self._ranks())
        work = (facts.phase, facts.worker_generation, facts.num_crashes, ranks, facts.inner_step, facts.moved_bytes)
        if work != self._work:
            self._work = work
            self._progress += 1
        return self._progress

    def _ranks(self) -> tuple[RankStatus, ...]:
        """None between a crash and the start of new workers: those that are known then are the dead ones."""
        group = self._core.ranks.group
        return group.ranks if group is not None and self._core.site.workers.restart_at is None else ()

    def facts(self) -> NodeFacts:
        site = self._core.site
        outer, workers = site.disk.outer, site.workers
        restart_at = workers.restart_at
        ranks = self._ranks()
        watch = self._core.ranks.watch(self._core.limits) if ranks else None
        doing, limit_s = (watch.doing, watch.limit_s) if watch else ("", 0.0)
        if restart_at is not None:
            doing = f"workers crashed {workers.crashes_in_a_row} times in a row"
            limit_s = self._core.limits.max_restart_s  # for the pause before new workers are started
        contributions, payloads = self._hub.waits_for()
        step = min((r.step for r in ranks), default=0)
        run_step = outer.run_step if outer else 0
        return NodeFacts(
            run_id=self._core.settings.run_id,
            site=self._config.name,
            site_id=site.site_id,
            incarnation=self._core.ctx.identity.incarnation,
            phase=self._core.phase,
            connected=site.welcomed,
            commit=outer.commit if outer else -1,
            inner_step=run_step + max(step - site.base_step, 0),
            num_ranks=self._config.num_ranks,
            steps_per_s=max((r.steps_per_s for r in ranks), default=0.0),
            loss=self._loss,
            train_s=self._train_s,
            wait_s=self._wait_s,
            sent_bytes=self._hub.counters.sent_bytes,
            received_bytes=self._hub.counters.received_bytes,
            moved_bytes=self._hub.counters.moved_bytes,
            doing=doing[:MAX_DOING_CHARACTERS],
            limit_s=limit_s,
            waits_for_contributions=tuple(contributions[: m.MAX_WAITS]),
            waits_for_payloads=tuple(payloads[: m.MAX_WAITS]),
            refused_messages=self._hub.counters.refused.total() + self._num_refused(),
            worker_generation=workers.generation,
            num_crashes=site.num_crashes,
            restart_wait_s=max(0.0, restart_at - self._loop.time()) if restart_at is not None else 0.0,
            checkpoints=self._core.ranks.checkpoints,
            num_syncs=self._num_syncs,
            num_wrong_states=site.num_wrong_states,
            retained_bytes=self._hub.retained_bytes,
            last_exchange_s=self.exchange_s,
            last_apply_s=self.apply_s,
        )

    def observe(self, event: e.Event) -> None:
        """Losses and events for the journal and the metrics."""
        match event:
            case e.SnapshotSealed(step=step, tokens=tokens, num_steps=num_steps, mean_loss=loss, train_s=train_s):
                self._sealed_at = self._loop.time()
                self._train_s += train_s
                if num_steps:
                    self._loss = loss
                if train_s > 0:  # else the same snapshot again; num_steps is 0 without a loss
                    self._journal.write(
                        "window",
                        step=step,
                        tokens=tokens,
                        num_steps=num_steps,
                        loss=loss if num_steps else None,
                        train_s=round(train_s, 4),
                    )
            case e.Merged(version=version, wait_s=wait_s):
                self._wait_s += wait_s
                self._journal.write("merged", commit=version, wait_s=round(wait_s, 4))
            case e.CommitApplied(commit=commit, state_hash=state_hash):
                self._num_syncs += 1
                self._journal.write(
                    "commit",
                    commit=commit,
                    state_hash=state_hash.hex(),
                    exchange_s=round(self.exchange_s, 4),
                    apply_s=round(self.apply_s, 4),
                    sent_bytes=self._hub.counters.sent_bytes,
                    received_bytes=self._hub.counters.received_bytes,
                )
            case e.Published(content):
                since_s = self._loop.time() - self._sealed_at
                self._journal.write("published", commit=content.version, since_sealed_s=round(since_s, 4))
            case e.Received(message=m.Commit() as commit):
                since_s = self._loop.time() - self._sealed_at
                self._journal.write("commit_received", commit=commit.commit, since_sealed_s=round(since_s, 4))
            case e.WorkersFailed(text=text) | e.ExchangeBroken(m.ExchangeFailed(text=text)):
                self._journal.write(type(event).__name__, text=text)
