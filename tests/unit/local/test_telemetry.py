"""What a node says of itself now and then: for people, without waiting for the disk."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.node.daemon import telemetry
from atoll.node.daemon.peers import address_of_metrics
from atoll.node.daemon.telemetry import Telemetry
from atoll.node.exchange.peers.counters import Counters
from atoll.node.local_protocol import CheckpointCounts, RankReadings
from atoll.node.tasks import Tasks, end
from atoll.protocol import messages as m
from atoll.protocol.machine import Machine
from atoll.protocol.resources import Resources

ON_GPU = RankReadings(memory_bytes=5, gpu_used_bytes=3, gpu_total_bytes=8, peak_flops_per_s=1e12)


def a_node(
    said: list[m.SiteMessage], machine: Machine, failed: list[BaseException], site: SimpleNamespace | None = None
) -> Telemetry:
    ranks = SimpleNamespace(
        group=SimpleNamespace(ranks=[SimpleNamespace(readings=r) for r in (ON_GPU, ON_GPU, RankReadings())]),
        trained_tokens=1000,
        checkpoints=CheckpointCounts(failed=4),
    )
    core: Any = SimpleNamespace(site=site or SimpleNamespace(num_crashes=2, last_crash="exit code 1"), ranks=ranks)
    counters = Counters(sent_bytes=35, sent_contribution_bytes=10, sent_average_bytes=20, reconnects=3)
    observer: Any = SimpleNamespace(
        hub=SimpleNamespace(counters=counters), exchange_total_s=1.5, apply_total_s=0.5, num_applied=7
    )
    return Telemetry(
        core=core,
        observer=observer,
        machine=machine,
        home=Path("/home"),
        tasks=Tasks(failed.append),
        say=said.append,
        num_parameters=lambda: 50,
        certificate_until_s=lambda: 1e9,
        metrics_address="10.0.0.1:9100",
    )


def test_it_says_what_ranks_node_and_machine_measure() -> None:
    said: list[m.SiteMessage] = []

    async def main() -> None:
        resources = Resources(memory_bytes=11, disk_free_bytes=12, disk_total_bytes=13)
        node = a_node(said, replace(Machine(), resources=lambda _: resources), [])
        node.beat()
        await asyncio.gather(*node.tasks)

    asyncio.run(main())
    assert said == [
        m.Telemetry(
            trained_tokens=1000,
            sent_contribution_bytes=10,
            sent_average_bytes=20,
            sent_state_bytes=5,
            exchange_total_s=1.5,
            num_applied=7,
            apply_total_s=0.5,
            num_crashes=2,
            last_crash="exit code 1",
            num_reconnects=3,
            num_failed_checkpoints=4,
            model_flops=6.0 * 50 * 1000,
            peak_flops_per_s=2e12,
            node_memory_bytes=11,
            rank_memory_bytes=10,
            num_gpus=2,
            gpu_used_bytes=6,
            gpu_total_bytes=16,
            disk_free_bytes=12,
            disk_total_bytes=13,
            certificate_until_s=1e9,
            metrics_address="10.0.0.1:9100",
        )
    ]


def test_it_says_so_now_and_then_and_never_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a disk is stuck: then one thread waits for it, and no more."""
    said: list[m.SiteMessage] = []
    may_go_on = threading.Event()
    num_asked = 0

    def stuck(_: Path) -> Resources:
        nonlocal num_asked
        num_asked += 1
        assert may_go_on.wait(60)
        return Resources()

    async def main() -> None:
        site = SimpleNamespace(num_crashes=2, last_crash="exit code 1")
        node = a_node(said, replace(Machine(), resources=stuck), [], site)
        monkeypatch.setattr(telemetry, "EVERY_S", 0.0)
        for _ in range(5):
            node.beat()
            await asyncio.sleep(0)
        assert not said
        may_go_on.set()
        await asyncio.gather(*node.tasks)
        assert num_asked == 1
        monkeypatch.setattr(telemetry, "EVERY_S", 3600.0)
        node.beat()
        await asyncio.gather(*node.tasks)
        node.beat()
        assert not node.tasks, "not yet again"
        node.soon()
        node.beat()
        assert node.tasks, "a session begins"
        await asyncio.gather(*node.tasks)
        site.num_crashes += 1
        node.beat()
        assert node.tasks, "workers crashed"
        await end(node.tasks)

    asyncio.run(main())
    assert len(said) == 3


@pytest.mark.parametrize(
    ("listens", "address", "metrics"),
    [
        ("127.0.0.1:9100", "10.0.0.1:7000", ""),
        ("localhost:9100", "10.0.0.1:7000", ""),
        ("0.0.0.0:9100", "10.0.0.1:7000", "10.0.0.1:9100"),
        ("10.0.0.2:9100", "gpu1.example:7000", "gpu1.example:9100"),
        ("[::]:9100", "[fe80::1]:7000", "[fe80::1]:9100"),
    ],
)
def test_metrics_that_others_reach_are_at_the_address_of_the_site(listens: str, address: str, metrics: str) -> None:
    assert address_of_metrics(listens, address) == metrics
