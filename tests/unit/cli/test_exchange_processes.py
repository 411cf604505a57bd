"""How many exchange processes a host may have, and at which ports."""

from __future__ import annotations

import pytest

from atoll.node.daemon.config import NodeConfig
from atoll.protocol.errors import ConfigError
from tests.unit.cli.test_site_of_several_hosts import config_of


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--exchange-processes 0", "--exchange-processes 0: must be 1 to 16"),
        ("--exchange-processes 17", "--exchange-processes 17: must be 1 to 16"),
        ("--exchange-processes 2 --advertise 10.0.0.1:7800", "with --advertise needs --listen with a port"),
        (
            "--exchange-processes 2 --advertise 10.0.0.1:7800 --listen 0.0.0.0:0",
            "with --advertise needs --listen with a port",
        ),
        ("--exchange-processes 2 --listen 0.0.0.0:65535", "from that of --listen or --advertise on, go to 65536"),
        (
            "--exchange-processes 3 --listen 0.0.0.0:7800 --advertise 10.0.0.1:65534",
            "from that of --listen or --advertise on, go to 65536",
        ),
    ],
)
def test_processes_that_a_host_cannot_have(words: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(words)
    assert text in str(caught.value)


def test_processes_share_the_threads_of_kernels() -> None:
    assert config_of("").exchange_processes == 1
    found = config_of("--exchange-processes 4 --node-threads 6 --listen 0.0.0.0:65532 --advertise 10.0.0.1:7800")
    assert (found.exchange_processes, found.num_kernel_threads, found.num_exchange_threads) == (4, 6, 2)
    assert NodeConfig(name="a", num_node_threads=6).num_exchange_threads == 6
