"""What a node says of itself now and then, for people: nothing waits for it, and nothing is decided by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.node.core.site import SiteCore
from atoll.node.daemon.observer import Observer
from atoll.node.tasks import Tasks
from atoll.protocol import messages as m
from atoll.protocol.machine import Machine

EVERY_S = 10.0
FLOPS_PER_PARAMETER = 6
"""And token, forward and backward: Kaplan et al., 2020 (2001.08361), section 2.1, without attention's part."""


@dataclass(eq=False, kw_only=True)
class Telemetry:
    core: SiteCore
    observer: Observer
    machine: Machine
    home: Path
    tasks: Tasks
    say: Callable[[m.SiteMessage], None]
    num_parameters: Callable[[], int]
    """Trainable ones of the site; 0 before there is a model."""
    certificate_until_s: Callable[[], float] = lambda: 0.0
    """When the site's identity expires, in seconds since 1970; 0 in plain text."""
    metrics_address: str = ""
    """Where other machines find the node's metrics; empty if they do not."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._is_measuring = False
        self._num_crashes = 0  # that were said

    def soon(self) -> None:
        """With the next heartbeat: a session begins, whose other end knows nothing of this site yet."""
        self._due = 0.0

    def beat(self) -> None:
        """Called with each heartbeat. A crash of workers is told with the next one."""
        is_due = self._loop.time() >= self._due or self.core.site.num_crashes != self._num_crashes
        if not is_due or self._is_measuring:
            return
        self._due = self._loop.time() + EVERY_S
        self._is_measuring = True
        self.tasks.spawn(self._measured())

    async def _measured(self) -> None:
        try:
            resources = await asyncio.to_thread(self.machine.resources, self.home)
        finally:
            self._is_measuring = False
        self._num_crashes = self.core.site.num_crashes
        site, ranks, counters = self.core.site, self.core.ranks, self.observer.hub.counters
        read = [rank.readings for rank in ranks.group.ranks] if ranks.group is not None else []
        self.say(
            m.Telemetry(
                trained_tokens=ranks.trained_tokens,
                sent_contribution_bytes=counters.sent_contribution_bytes,
                sent_average_bytes=counters.sent_average_bytes,
                sent_state_bytes=counters.sent_bytes - counters.sent_contribution_bytes - counters.sent_average_bytes,
                exchange_total_s=self.observer.exchange_total_s,
                num_applied=self.observer.num_applied,
                apply_total_s=self.observer.apply_total_s,
                num_crashes=site.num_crashes,
                last_crash=site.last_crash,
                num_reconnects=counters.reconnects,
                num_failed_checkpoints=ranks.checkpoints.failed,
                model_flops=float(FLOPS_PER_PARAMETER * self.num_parameters() * ranks.trained_tokens),
                peak_flops_per_s=sum(one.peak_flops_per_s for one in read),
                node_memory_bytes=resources.memory_bytes,
                rank_memory_bytes=sum(one.memory_bytes for one in read),
                num_gpus=sum(one.gpu_total_bytes > 0 for one in read),
                gpu_used_bytes=sum(one.gpu_used_bytes for one in read),
                gpu_total_bytes=sum(one.gpu_total_bytes for one in read),
                disk_free_bytes=resources.disk_free_bytes,
                disk_total_bytes=resources.disk_total_bytes,
                certificate_until_s=self.certificate_until_s(),
                metrics_address=self.metrics_address,
            )
        )
