"""Sites that nobody can dial: a relay joins what they dial out, and is no more than that."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.cli.client import fetch_status
from atoll.coordinator import admin
from atoll.protocol.errors import ConfigError, RefusedError
from atoll.protocol.trust import enrolled
from atoll.protocol.trust.joining import renew
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import MutualTls
from tests.harness.local_run import LocalRun, Process
from tests.harness.sockets import free_address
from tests.process.test_secured_runs import FOREVER, LIMIT_S, MODEL, atoll, count_contributors

pytestmark = pytest.mark.timeout(400)


def start_relay(run: LocalRun, listen: str = "", *extra: str, prefix: Sequence[str] = ()) -> tuple[Process, str]:
    """The process, and its address; the relay has joined the run."""
    home = run.folder / "hub"
    if not home.exists():
        joining = ["join", str(run.invite("hub", role="relay")), "--home", str(home)]
        assert run.start("join", [*prefix, sys.executable, *run.program, *joining]).wait(LIMIT_S) == 0
    command = ["relay", "--home", str(home), "--listen", listen or free_address(), *extra]
    process = run.start("relay", [*prefix, sys.executable, *run.program, *command])
    return process, process.wait_for_line(r"listening on (\S+)", LIMIT_S).group(1)


def attached_twice(node: Process) -> bool:
    return sum(re.search("(?<!not )attached to the relay at", line) is not None for line in node.lines) >= 2


def test_sites_behind_a_relay_finish_a_run_though_it_is_killed_meanwhile(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(FOREVER, time_limits="wan"), secured=True) as run:
        run.start_coordinator()
        relay, address = start_relay(run)
        for name in "ab":
            run.start_node(name, MODEL, extra=["--relay", address])
        run.wait(lambda s: s["last_commit"] > 2 and count_contributors(s, 2), LIMIT_S)
        assert {site["address"] for site in run.status()["sites"]} == {f"a@{address}", f"b@{address}"}
        assert atoll(run, "health", "--relay", str(tmp_path / "hub"), "--ready").popen.returncode == 0
        assert atoll(run, "health", "--node", str(run.home("a")), "--ready").popen.returncode == 0
        relay.kill()
        run.nodes["a"].wait_for_line(f"not attached to the relay at {address}", LIMIT_S)
        unready = atoll(run, "health", "--node", str(run.home("a")), "--ready")
        assert any("is not attached to its relay" in line for line in unready.lines), unready.lines
        again, _ = start_relay(run, address)
        run.wait(lambda _: all(attached_twice(run.nodes[name]) for name in "ab"), LIMIT_S, "both are back at the relay")
        at = run.status()["last_commit"]
        run.wait(lambda s: s["last_commit"] > at + 2 and count_contributors(s, 2), LIMIT_S, "both contribute")
        admin.ask(run.store_path, "stop", reason="the test is over")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        last = run.status()["last_commit"]
        hashes = run.hashes(last)
        assert set(hashes) == {"a", "b"}
        assert len(set(hashes.values())) == 1
        assert run.status()["num_evicted"] == 0
        again.interrupt()
        assert again.wait(LIMIT_S) == 0


def test_a_site_that_can_be_dialled_and_one_that_cannot(tmp_path: Path) -> None:
    """The first with two exchange processes. And what the relay says of itself."""
    with LocalRun(tmp_path, FOREVER, secured=True) as run:
        run.start_coordinator()
        page = free_address()
        relay, address = start_relay(run, "", "--http-listen", page, "--log-format", "json")
        run.start_node("a", MODEL, extra=["--exchange-processes", "2"])
        run.start_node("b", MODEL, extra=["--relay", address])
        run.wait(lambda s: s["last_commit"] > 2 and count_contributors(s, 2), LIMIT_S)
        with urllib.request.urlopen(f"http://{page}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        assert "atoll_relay_attached_sites 1.0" in lines
        logged = [json.loads(line) for line in relay.lines if line.startswith("{")]
        assert {(line["run"], line["relay"]) for line in logged} == {(FOREVER.run_id, "hub")}
        assert f"metrics on {page}" in [line["message"] for line in logged]
        (carried,) = [line for line in lines if line.startswith("atoll_relay_carried_bytes_total")]
        assert carried.startswith('atoll_relay_carried_bytes_total{site="a"}'), "b dials a itself"
        assert float(carried.split()[1]) > 1000
        admin.ask(run.store_path, "stop", reason="the test is over")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        hashes = run.hashes(run.status()["last_commit"])
        assert set(hashes) == {"a", "b"}
        assert len(set(hashes.values())) == 1


def test_at_the_end_of_a_quota_the_site_and_the_relay_say_so(tmp_path: Path) -> None:
    with LocalRun(tmp_path, FOREVER, secured=True) as run:
        run.start_coordinator()
        relay, address = start_relay(run, "", "--quota-gb", "3e-4")
        for name in "ab":
            run.start_node(name, MODEL, extra=["--relay", address])
        words = r"site (\w) has used its quota of 0.0003 GB a day .* served again in 14\d\d minutes"
        name = relay.wait_for_line(words, LIMIT_S).group(1)
        run.nodes[name].wait_for_line(words, LIMIT_S)


def test_a_relay_may_do_nothing_else_and_needs_a_run_with_certificates(tmp_path: Path) -> None:
    with LocalRun(tmp_path, FOREVER, secured=True) as run:
        run.start_coordinator()
        home = tmp_path / "hub"
        assert atoll(run, "join", str(run.invite("hub", role="relay")), "--home", str(home)).popen.returncode == 0
        found = enrolled.load(home / enrolled.FOLDER)
        assert found is not None
        identity = MutualTls("secret-run", found.shown)
        shown = asyncio.run(renew(identity, [run.address], Subject("secret-run", Kind.RELAY)))
        with pytest.raises(RefusedError, match="relay hub of run secret-run may not call Status"):
            fetch_status(run.address, found)
        with pytest.raises(RefusedError, match="a relay of run secret-run may not call Status"):
            fetch_status(run.address, replace(found, shown=shown))
        node = atoll(run, "node", "--home", str(home))
        assert node.popen.returncode == ConfigError.exit_code
        assert any("is of relay hub of run secret-run, not of site hub" in line for line in node.lines), node.lines
        assert (
            atoll(run, "join", str(run.invite("a")), "--home", str(run.home("a")), "--enrol-only").popen.returncode == 0
        )
        other = atoll(run, "relay", "--home", str(run.home("a")), "--listen", "127.0.0.1:0")
        assert other.popen.returncode == ConfigError.exit_code
        assert any("a relay joins by `atoll invite --relay NAME`" in line for line in other.lines), other.lines
        plain = atoll(run, "node", "--insecure", "--coordinator", run.address, "--name", "a", "--relay", "127.0.0.1:1")
        assert plain.popen.returncode == ConfigError.exit_code
        assert any("a run in plain text has no relays" in line for line in plain.lines), plain.lines
        both = atoll(run, "node", "--home", str(run.home("a")), "--relay", "h:1", "--advertise", "h:2")
        assert any("--relay h:1 with --advertise h:2" in line for line in both.lines), both.lines
