"""Plain text is for one machine, or for a network that its people say to trust."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator import config as coordinator
from atoll.coordinator.authority import Authority
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.main import serve
from atoll.coordinator.service import CoordinatorServer
from atoll.node.daemon import config as node
from atoll.node.daemon.config import NodeConfig
from atoll.protocol.errors import ConfigError
from atoll.protocol.machine import Machine
from atoll.protocol.settings import RunSettings
from atoll.protocol.trust import certificates
from atoll.protocol.trust.security import MutualTls
from tests.harness.coordinator_story import some_settings
from tests.harness.memory_store import MemoryStore

ELSEWHERE = "10.0.0.1:7700"
WHAT_TO_DO = r"Leave out --insecure, and invite sites \(`atoll invite`\); or say --insecure-network in its place"
NODE = NodeConfig(name="a", coordinator="127.0.0.1:7700", insecure=True)


@pytest.mark.parametrize("field", ["coordinator", "listen", "advertise", "http_listen"])
@pytest.mark.parametrize("address", [ELSEWHERE, "0.0.0.0:7700", "[::]:7700", "[2001:db8::1]:7700", "host.example:7700"])
def test_a_node_is_in_plain_text_on_its_machine_alone_unless_it_is_forced(field: str, address: str) -> None:
    changes: Any = {field: address}
    config = replace(NODE, **changes)
    with pytest.raises(ConfigError, match=WHAT_TO_DO) as caught:
        node.validate(config)
    assert str(caught.value).startswith(f"--{field.replace('_', '-')} {address} with --insecure")
    node.validate(replace(config, insecure_network=True))
    node.validate(replace(config, insecure=False, insecure_network=True))
    node.validate(replace(config, insecure=False))


def test_the_network_of_a_site_of_several_hosts_is_to_be_trusted_by_somebody() -> None:
    config = replace(NODE, site_hosts=2, site_address=ELSEWHERE)
    with pytest.raises(ConfigError, match=f"--site-address {ELSEWHERE} with --insecure"):
        node.validate(config)
    node.validate(replace(config, site_address="127.0.0.1:7800"))
    node.validate(replace(config, insecure=False, insecure_network=True))


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_loopback_is_this_machine(address: str, tmp_path: Path) -> None:
    node.validate(replace(NODE, coordinator=address, listen=address, http_listen=address))
    coordinator.validate(CoordinatorConfig(store_path=tmp_path, listen=address, http_listen=address, insecure=True))


@pytest.mark.parametrize("field", ["listen", "http_listen"])
def test_a_coordinator_that_would_be_in_plain_text_elsewhere_makes_nothing(field: str, tmp_path: Path) -> None:
    changes: Any = {field: "0.0.0.0:0"}
    config = replace(CoordinatorConfig(store_path=tmp_path / "run.db", insecure=True), **changes)
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} 0.0.0.0:0 with --insecure.*{WHAT_TO_DO}"):
        asyncio.run(serve(config, RunSettings(run_id="run")))
    assert not list(tmp_path.iterdir())
    coordinator.validate(replace(config, insecure_network=True))


def test_an_address_has_at_least_one_connection(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--connections-per-address 0: must be at least 1"):
        coordinator.validate(CoordinatorConfig(store_path=tmp_path, connections_per_address=0))


def test_the_document_of_the_page_says_whether_the_run_is_in_plain_text(tmp_path: Path) -> None:
    """tests/process/test_page_in_a_browser.py has what the page says of it."""

    async def documents() -> list[dict[str, Any]]:
        config, settings = CoordinatorConfig(store_path=tmp_path / "run.db"), some_settings(run_id="run")
        authority = Authority.opened(tmp_path / "trust", "run", Machine())
        tls = MutualTls("run", authority.shown())
        return [
            await CoordinatorServer(config, settings, MemoryStore()).document(),
            await CoordinatorServer(config, settings, MemoryStore(), authority=authority, security=tls).document(),
        ]

    plain, secured = asyncio.run(documents())
    assert (plain["root"], plain["root_until_s"]) == (None, None)
    (root,) = certificates.from_pem(secured["root"].encode())
    assert secured["root_until_s"] == root.not_valid_after_utc.timestamp()
