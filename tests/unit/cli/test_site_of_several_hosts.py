"""What a person says of a site with several hosts, and what is told of it that cannot be."""

from __future__ import annotations

import argparse

import pytest

from atoll.cli.node import add_arguments, node_config
from atoll.node.daemon.config import NodeConfig, validate
from atoll.node.daemon.interfaces import LOOPBACK, address_of, interface_with
from atoll.node.host_protocol import MAX_HOSTS
from atoll.protocol.errors import ConfigError

TWO = "--site-hosts 2 --site-address 10.0.0.1:7800"


def config_of(words: str, coordinator: str = "--coordinator 127.0.0.1:1") -> NodeConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--insecure-network", "--name", "a", *coordinator.split(), *words.split()])
    args.command, args.debug = [], False
    return node_config(args)


@pytest.mark.parametrize(
    ("words", "num_ranks"),
    [
        ("", 1),
        ("--ranks 1", 1),
        ("--ranks 4", 4),
        ("--parallel dp_shard=16", 8),
        ("--parallel dp_shard=16 --ranks 8", 8),
        ("--parallel dp_shard=-1 --ranks 8", 8),
        ("--parallel dp_shard=-1,tp=4 --ranks 2", 2),
        ("--parallel tp=2", 1),
        ("--parallel pp=2 --ranks 1", 1),
        ("--parallel dp_shard=-1", 1),
        ("--parallel pp=-1,tp=2 --ranks 4", 4),
        ("--parallel dp_shard=4,ep=-1", 2),
    ],
)
def test_ranks_are_said_of_each_host_and_the_layout_of_all(words: str, num_ranks: int) -> None:
    for host in range(2):
        config = config_of(f"{words} {TWO} --site-rank {host}")
        assert config.num_ranks == num_ranks
        assert config.num_site_ranks == 2 * num_ranks
        assert config.first_rank == host * num_ranks


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "--parallel dp_shard=3",
            "3 ranks, which 2 hosts cannot share out: choose sizes whose product is a multiple of 2",
        ),
        ("--parallel dp_shard=-1,tp=3 --ranks 2", "cannot be divided by the 3 that --parallel"),
        ("--parallel dp_shard=16 --ranks 4", "--parallel dp_shard=16, which needs 16"),
    ],
)
def test_ranks_that_the_hosts_cannot_share_out(words: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(f"{words} {TWO}")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--site-hosts 0", f"--site-hosts 0: must be 1 to {MAX_HOSTS}"),
        ("--site-hosts -1", f"--site-hosts -1: must be 1 to {MAX_HOSTS}"),
        (f"--site-hosts {MAX_HOSTS + 1} --site-address 10.0.0.1:7800", f"must be 1 to {MAX_HOSTS}"),
        (f"{TWO} --site-rank 2", "--site-rank 2: the hosts of this site are 0 to 1"),
        (f"{TWO} --site-rank -1", "--site-rank -1: the hosts of this site are 0 to 1"),
        ("--site-rank 1", "--site-rank 1: the hosts of this site are 0 to 0, as --site-hosts is 1"),
        ("--site-hosts 2", "--site-hosts 2 and --site-address (none): a site of several hosts needs both"),
        ("--site-address 10.0.0.1:7800", "--site-hosts 1 and --site-address 10.0.0.1:7800: a site of several hosts"),
        ("--site-hosts 2 --site-address nowhere", "nowhere"),
        (f"{TWO} --launcher torchrun", "--site-hosts with --launcher torchrun"),
        ("--interface lo", "--interface lo: only with --launcher torchrun or --site-hosts"),
    ],
)
def test_hosts_that_a_site_cannot_have(words: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(words)
    assert text in str(caught.value)


def test_the_most_hosts_that_a_site_can_have() -> None:
    last = MAX_HOSTS - 1
    config = config_of(f"--site-hosts {MAX_HOSTS} --site-address 10.0.0.1:7800 --site-rank {last} --ranks 8")
    assert (config.first_rank, config.num_site_ranks) == (8 * last, 8 * MAX_HOSTS)


def test_an_interface_may_be_named_for_ranks_of_several_hosts() -> None:
    assert config_of(f"{TWO} --interface lo").rank_interface == "lo"
    with pytest.raises(ConfigError, match=r"network interface 'nowhere0': there is none; this machine has .*lo"):
        config_of(f"{TWO} --interface nowhere0")


def test_host_0_alone_needs_the_coordinator() -> None:
    with pytest.raises(ConfigError, match="say where the coordinator listens: --coordinator HOST:PORT"):
        config_of(f"{TWO} --site-rank 0", coordinator="")
    assert config_of(f"{TWO} --site-rank 1", coordinator="").site_rank == 1


def test_a_layout_is_of_the_ranks_of_all_hosts() -> None:
    config = NodeConfig(
        coordinator="127.0.0.1:1", name="a", num_ranks=2, site_hosts=2, site_address="10.0.0.1:7800", parallel="tp=2"
    )
    with pytest.raises(ConfigError, match="--ranks 4 and --parallel tp=2, which needs 2"):
        validate(config)


def test_the_interface_that_has_an_address() -> None:
    assert interface_with("127.0.0.1") == LOOPBACK == interface_with("127.0.0.7")
    with pytest.raises(ConfigError, match=r"has the address 192\.0\.2\.1; name one with --interface"):
        interface_with("192.0.2.1")


def test_an_interface_without_an_address_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"lo": "127.0.0.1", "eth1": "10.0.0.7"}

    def address(name: str) -> str:
        if name not in addresses:
            raise ConfigError(f"network interface {name!r}: no address")
        return addresses[name]

    monkeypatch.setattr("atoll.node.daemon.interfaces.address_of", address)
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1")])
    assert interface_with("10.0.0.7") == "eth1"
    with pytest.raises(ConfigError, match="no network interface"):
        interface_with("10.0.0.8")


def test_addresses_of_this_machine_lead_back_to_their_interface() -> None:
    assert interface_with(address_of(LOOPBACK)) == LOOPBACK
