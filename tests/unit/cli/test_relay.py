"""How a node comes to a relay or a proxy, and what a relay is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.node.daemon.config import NodeConfig, validate
from atoll.node.daemon.peers import address_of_metrics
from atoll.node.relay import config as relay_config
from atoll.node.relay.config import RelayConfig
from atoll.protocol import transport
from atoll.protocol.errors import ConfigError
from atoll.protocol.machine import Machine


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"relay": "r:1", "advertise": "h:2"}, "--relay r:1 with --advertise h:2"),
        ({"relay": "r:1", "exchange_processes": 2}, "a relay leads to one process of a site"),
        ({"proxy": "r:1"}, "--proxy r:1: write http://HOST:PORT"),
    ],
)
def test_what_a_node_cannot_have(given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(NodeConfig(coordinator="c:1", name="a", **given))  # type: ignore[arg-type]
    assert text in str(caught.value)
    validate(NodeConfig(coordinator="c:1", name="a", relay="r:1", proxy="http://p:1", listen="10.0.0.1:1"))


def test_a_machine_dials_through_a_proxy_only_if_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then whatever the environment says of it."""
    monkeypatch.setenv(transport.NO_PROXY, "*")
    assert Machine.through("").network is transport
    assert isinstance(Machine.through("p:1").network, transport.Proxied)
    without, through = dict(transport.channel_options(1)), dict(transport.channel_options(1, "p:1"))
    assert (without["grpc.enable_http_proxy"], "grpc.http_proxy" in without) == (0, False)
    assert os.environ[transport.NO_PROXY] == ""
    assert (through["grpc.enable_http_proxy"], through["grpc.http_proxy"]) == (1, "http://p:1")


def test_nobody_finds_the_metrics_of_a_site_behind_a_relay() -> None:
    assert address_of_metrics("0.0.0.0:9100", "a@relay:7800") == ""


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"listen": "h"}, "'h' is not an address"),
        ({"http_listen": "h"}, "'h' is not an address"),
        ({"quota_gb": -1.0}, "--quota-gb -1"),
        ({"quota_gb": float("nan")}, "--quota-gb nan"),
        ({"quota_gb": float("inf")}, "--quota-gb inf"),
    ],
)
def test_what_a_relay_cannot_be_told(given: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        relay_config.validate(RelayConfig(**{"home": Path(), "listen": "h:1", **given}))  # type: ignore[arg-type]
    assert text in str(caught.value)
