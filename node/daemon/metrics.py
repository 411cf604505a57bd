"""The node's Prometheus metrics: a collector that reads the node's facts when it is scraped, and the HTTP endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from atoll.node.local_protocol import CheckpointCounts
from atoll.protocol import pages
from atoll.protocol.messages import Heartbeat

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts(Heartbeat):
    """One consistent look at a node, with what it says in heartbeats."""

    run_id: str
    site: str
    site_id: int
    incarnation: int
    connected: bool
    commit: int  # -1 before commit 0
    refused_messages: int
    worker_generation: int
    num_crashes: int
    restart_wait_s: float
    checkpoints: CheckpointCounts
    num_syncs: int
    num_wrong_states: int
    retained_bytes: int
    last_exchange_s: float
    last_apply_s: float


class NodeCollector(Collector):
    def __init__(self, facts: Callable[[], NodeFacts]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        facts = self._facts()
        yield InfoMetricFamily(
            "atoll_node",
            "Who this node is and what it does",
            value={
                "run_id": facts.run_id,
                "site": facts.site,
                "site_id": str(facts.site_id),
                "incarnation": str(facts.incarnation),
                "phase": facts.phase,
            },
        )
        gauges = {
            "atoll_node_connected": ("1 while the session with the coordinator is up", float(facts.connected)),
            "atoll_node_commit": ("Last commit applied; -1 before commit 0", facts.commit),
            "atoll_node_inner_step": ("Inner steps of the run, as this site counts them", facts.inner_step),
            "atoll_node_steps_per_second": ("Inner steps per second in the last window", facts.steps_per_s),
            "atoll_node_loss": ("Mean training loss of the last window", facts.loss),
            "atoll_node_retained_bytes": ("Contributions held as a reducer", facts.retained_bytes),
            "atoll_node_restart_wait_seconds": (
                "Time until workers that crashed again and again are started anew; 0 while there are workers",
                facts.restart_wait_s,
            ),
            "atoll_node_last_exchange_seconds": ("Time of the last exchange", facts.last_exchange_s),
            "atoll_node_last_apply_seconds": ("Time of applying and hashing the last commit", facts.last_apply_s),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        counters = {
            "atoll_node_sent_bytes": ("Bytes of chunks sent to peers", facts.sent_bytes),
            "atoll_node_received_bytes": ("Bytes of chunks received from peers", facts.received_bytes),
            "atoll_node_moved_bytes": (
                "Bytes of chunks that were lacking and came, or that a site took which lacks them",
                facts.moved_bytes,
            ),
            "atoll_node_refused_messages": ("Messages refused as malformed, stale or foreign", facts.refused_messages),
            "atoll_node_train_seconds": ("Time the workers trained", facts.train_s),
            "atoll_node_wait_seconds": ("Time the workers waited for a sync", facts.wait_s),
            "atoll_node_worker_starts": ("Generations of workers launched", facts.worker_generation),
            "atoll_node_worker_crashes": ("Times that the workers crashed or hung", facts.num_crashes),
            "atoll_node_checkpoints_written": (
                "Checkpoints of inner optimizers that ranks wrote",
                facts.checkpoints.written,
            ),
            "atoll_node_checkpoints_skipped": (
                "Checkpoints left out because the one before was still being written",
                facts.checkpoints.skipped,
            ),
            "atoll_node_checkpoints_failed": (
                "Checkpoints that could not be written, as on a full disk",
                facts.checkpoints.failed,
            ),
            "atoll_node_wrong_states": ("States that were not the run's and were repaired", facts.num_wrong_states),
            "atoll_node_syncs": ("Commits applied by this process", facts.num_syncs),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)


class MetricsServer:
    """/metrics on an address of its own. `facts` is called on the event loop: what it reads changes there."""

    def __init__(self, facts: Callable[[], NodeFacts]) -> None:
        self._facts = facts
        self._pages = pages.Pages(self._answer)

    @property
    def address(self) -> str:
        return self._pages.address

    async def start(self, listen: str) -> None:
        """Raises ConfigError, HostError if the port is taken."""
        await self._pages.start(listen, "metrics")

    async def close(self) -> None:
        await self._pages.close()

    async def _answer(self, path: str) -> pages.Answer:
        if path != "/metrics":
            return pages.text(404, "there is /metrics")
        facts = self._facts()
        registry = CollectorRegistry()
        registry.register(NodeCollector(lambda: facts))
        return pages.Answer(200, PROMETHEUS_TEXT, generate_latest(registry))
