"""Exchange processes that are started, and started again; those of these tests go wrong in every way."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.exchange_processes.fleet import ExchangeProcesses
from atoll.node.daemon.peers import Met
from atoll.protocol import transport
from atoll.protocol.errors import HostError
from tests.harness.hosts import led
from tests.harness.model_on_hosts import SETTINGS

ODD = str(Path(__file__).parents[2] / "workers" / "odd_exchange_process.py")


@asynccontextmanager
async def of(
    folder: Path, how: str, *, lease_s: float = 600.0, listen_on: str = "127.0.0.1:0", advertise: str = ""
) -> AsyncIterator[ExchangeProcesses]:
    """Two of them, beside a node."""
    async with led(folder, site_hosts=1) as site:
        config = NodeConfig(coordinator="127.0.0.1:1", name="a", exchange_processes=3, advertise=advertise)
        found = ExchangeProcesses(
            config,
            SETTINGS,
            Met(site.hub, listen_on, advertise or "127.0.0.1:7000"),
            home=site.home.folder,
            lease_s=lease_s,
            program=(sys.executable, ODD, how),
        )
        try:
            yield found
        finally:
            await found.close()


async def started_and_failed(found: ExchangeProcesses) -> None:
    """On a busy machine one of them may be started three times before the other one listens."""
    await found.start()
    await found.failed()


def test_a_process_that_never_listens_ends_the_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with of(tmp_path, "ends") as found:
            with pytest.raises(HostError, match=r"exchange process \d of this host has ended: exit code 4"):
                await found.start()

    transport.run(main())
    assert not any("started again" in line for line in caplog.messages)


def test_the_node_says_why_a_process_cannot_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with of(tmp_path, "fails") as found:
            with pytest.raises(HostError, match=r"exchange process \d of this host: no port is left"):
                await found.start()

    transport.run(main())


def test_a_process_that_ends_again_and_again_ends_the_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        async with of(tmp_path, "ends when it is ready") as found:
            with pytest.raises(HostError, match=r"process \d of this host has ended: exit code 4; see the log"):
                await started_and_failed(found)

    transport.run(main())
    ends = [sum(f"process {n} of this host has ended: exit code 4" in line for line in caplog.messages) for n in (1, 2)]
    assert max(ends) == 2, "the first of them to be started three times ends the node"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("is silent", r"it has said nothing for 0\.05 s \(signal SIGKILL\)"),
        ("makes no sense", r"what comes between a node and its exchange process is no message"),
    ],
)
def test_a_process_that_is_silent_or_makes_no_sense_is_killed(
    tmp_path: Path, how: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.node.daemon.exchange_processes.fleet.END_LIMIT_S", 0.05)

    async def main() -> None:
        async with of(tmp_path, how, lease_s=0.05 if how == "is silent" else 600.0) as found:
            with pytest.raises(HostError, match=why):
                await started_and_failed(found)

    transport.run(main())


@pytest.mark.parametrize(
    ("listen_on", "advertise", "expected"),
    [
        ("127.0.0.1:0", "", ("127.0.0.1:4001", "127.0.0.1:4002")),
        ("127.0.0.1:7000", "", ("127.0.0.1:7001", "127.0.0.1:7002")),
        ("127.0.0.1:7000", "10.0.0.1:9000", ("10.0.0.1:9001", "10.0.0.1:9002")),
    ],
)
def test_peers_reach_each_at_a_port_of_its_own(
    tmp_path: Path, listen_on: str, advertise: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.node.daemon.exchange_processes.fleet.END_LIMIT_S", 0.05)

    async def main() -> None:
        async with of(tmp_path, "is silent", listen_on=listen_on, advertise=advertise) as found:
            await found.start()
            assert found.addresses == expected

    transport.run(main())
