"""Sites whose only way out is an HTTP proxy: it alone can find the coordinator and the relay."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.protocol.errors import ConfigError
from tests.harness.connect_proxy import ConnectProxy
from tests.harness.local_run import LocalRun
from tests.process.test_relay import start_relay
from tests.process.test_secured_runs import LIMIT_S, MODEL, SETTINGS, atoll

pytestmark = pytest.mark.timeout(400)


def hidden(address: str) -> str:
    """The same, by a name that nobody but the proxy knows."""
    return f"host.invalid:{address.rpartition(':')[2]}"


def test_sites_behind_an_http_proxy_finish_a_run(tmp_path: Path) -> None:
    """Which is asked whatever the environment says, and only where the node was told of it."""
    with ConnectProxy() as proxy, LocalRun(tmp_path, replace(SETTINGS, steps=300), secured=True) as run:
        with pytest.raises(socket.gaierror):
            socket.getaddrinfo("host.invalid", 1)
        run.start_coordinator()
        _, relay = start_relay(run)
        environment = {"no_proxy": "*", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
        for name in "ab":
            invite, home = run.invite(name, addresses=[hidden(run.address)]), run.home(name)
            joining = ["join", str(invite), "--home", str(home), "--enrol-only"]
            assert atoll(run, *joining, "--proxy", proxy.url).popen.returncode == 0
            extra = ["--proxy", proxy.url, "--relay", hidden(relay)]
            run.start_node(name, MODEL, extra=extra, environment=environment)
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        assert len(set(run.hashes(20).values())) == 1
        assert set(proxy.asked) == {hidden(run.address), hidden(relay)}
        checked = atoll(run, "doctor", "--home", str(run.home("a")), "--proxy", proxy.url)
        assert any("coordinator  host.invalid" in line for line in checked.lines), checked.lines
        wrong = atoll(run, "node", "--home", str(run.home("a")), "--proxy", "127.0.0.1:1")
        assert wrong.popen.returncode == ConfigError.exit_code
        assert any("write http://HOST:PORT" in line for line in wrong.lines), wrong.lines
