"""Another root takes the place of the run's, while the run goes on."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest

from atoll.protocol import PROTOCOL_VERSION, transport
from atoll.protocol.errors import HostError, PeerError
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.trust import certificates, enrolled
from atoll.protocol.trust.joining import renew
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import MutualTls, Shown
from atoll.protocol.v1 import common_pb2, peer_pb2, peer_pb2_grpc
from tests.harness.local_run import GUARDED, POLL_S, LocalRun, Process, Status
from tests.process.test_endpoints import SETTINGS as SETTINGS_OF_HOSTS
from tests.process.test_endpoints import Sites
from tests.process.test_relay import start_relay
from tests.process.test_secured_runs import FOREVER, LIMIT_S, MODEL, atoll, count_contributors

pytestmark = pytest.mark.timeout(400)


def until_done(run: LocalRun, *arguments: str) -> Process:
    """The command, again as long as it is refused."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        done = atoll(run, *arguments)
        if done.popen.returncode == 0:
            return done
        assert time.monotonic() < deadline, done.lines
        time.sleep(POLL_S)


def shown_of(run: LocalRun, name: str) -> Shown:
    found = enrolled.load(run.home(name) / enrolled.FOLDER)
    assert found is not None
    return found.shown


def of_a_day(run: LocalRun, name: str, shown: Shown) -> Shown:
    return asyncio.run(renew(MutualTls("secret-run", shown), [run.address], Subject("secret-run", Kind.SITE, name)))


def refusal_by(address: str, shown: Shown, name: str, run_id: str = "secret-run") -> grpc.StatusCode | None:
    """What that site answers to a probe by whoever shows this; None for an answer."""
    handshake = MutualTls(run_id, shown).towards(Kind.SITE, name)
    header = common_pb2.Header(protocol_version=PROTOCOL_VERSION, run_id=run_id)
    with grpc.secure_channel(address, handshake.credentials, options=[transport.expects(handshake)]) as channel:
        try:
            peer_pb2_grpc.PeerServiceStub(channel).Probe(peer_pb2.ProbeRequest(header=header), timeout=LIMIT_S)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return None


def has_renewed(node: Process, _: Status) -> bool:
    """Its identity, and what it shows to sites."""
    return sum("the certificate is renewed" in line for line in node.lines) >= 2


def trusts(run: LocalRun, name: str, roots: bytes, _: Status) -> bool:
    return shown_of(run, name).roots == roots


def test_another_root_takes_the_place_of_the_runs_and_no_sync_is_lost(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(FOREVER, time_limits="wan"), secured=True) as run:
        coordinator = run.start_coordinator()
        for name in "ab":
            run.start_node(name, MODEL)
        away = run.start(
            "join",
            [sys.executable, *GUARDED, "join", str(run.invite("c")), "--home", str(run.home("c")), "--enrol-only"],
        )
        assert away.wait(LIMIT_S) == 0, away.lines
        home = run.folder / "otto"
        joined = atoll(run, "join", str(run.invite("otto", role="operator")), "--home", str(home))
        assert joined.popen.returncode == 0, joined.lines
        run.wait(lambda s: count_contributors(s, 2), LIMIT_S)
        before, old = of_a_day(run, "c", shown_of(run, "c")), shown_of(run, "c")
        peers = {site["name"]: site["address"] for site in run.status()["sites"]}
        assert refusal_by(peers["a"], before, "a") is None
        early = atoll(run, "rotate", str(run.toml), "--sign")
        assert any("there is no next root" in line for line in early.lines), early.lines

        assert atoll(run, "rotate", str(run.toml)).popen.returncode == 0
        again = atoll(run, "rotate", str(run.toml))
        assert again.popen.returncode == HostError.exit_code
        assert any("a rotation has begun" in line for line in again.lines), again.lines
        until_done(run, "rotate", str(run.toml), "--sign")  # once a and b trust the next root
        for name in "ab":
            assert len(certificates.from_pem(shown_of(run, name).roots)) == 2
            run.wait(partial(has_renewed, run.nodes[name]), LIMIT_S)
        early = atoll(run, "rotate", str(run.toml), "--retire")
        assert any("certificates of the old root are in use until" in line for line in early.lines), early.lines
        both = run.status()["root"].encode()
        assert refusal_by(peers["a"], replace(before, roots=both), "a") is None, (
            "what the old root signed is good still"
        )
        between = of_a_day(run, "c", old)
        assert certificates.is_signed_by(
            certificates.from_pem(between.certificate)[0], certificates.from_pem(between.roots)[0]
        )
        assert refusal_by(peers["a"], between, "a") is None
        assert atoll(run, "status", "--home", str(home)).popen.returncode == 0
        run.start_node("d", MODEL)
        run.wait(lambda s: count_contributors(s, 3), LIMIT_S)

        retired = atoll(run, "rotate", "--home", str(home), "--retire", "--now")
        assert retired.popen.returncode == 0, retired.lines
        assert retired.lines[-1].endswith("need another invite: site c")
        assert atoll(run, "status", "--home", str(home)).popen.returncode == 0, "its identity was renewed as it looked"
        roots = run.status()["root"].encode()
        assert len(certificates.from_pem(roots)) == 1
        last = run.status()["last_commit"]
        run.wait(lambda s: s["last_commit"] > last + 1 and count_contributors(s, 3), LIMIT_S)
        for name in "ab":
            run.wait(partial(trusts, run, name, roots), LIMIT_S)
            assert refusal_by(peers[name], replace(before, roots=roots), name) is grpc.StatusCode.UNAVAILABLE
            assert refusal_by(peers[name], replace(between, roots=roots), name) is None
        for refused in (old, replace(old, roots=roots)):
            with pytest.raises(PeerError):
                of_a_day(run, "c", refused)
        status = run.status()
        assert status["num_evicted"] == 0
        assert status["num_attempts"] - status["last_commit"] <= 1, "no sync was begun again"

        run.nodes["a"].kill()
        coordinator.kill()
        run.start_coordinator()
        run.start_node("a", MODEL)
        last = run.status()["last_commit"]
        run.wait(lambda s: s["last_commit"] > last and count_contributors(s, 3), LIMIT_S, "a is back by what was kept")


@pytest.mark.slow  # the test above has all steps; this one has everybody else who shows certificates
def test_a_site_of_two_hosts_and_one_behind_a_relay_follow_to_another_root(tmp_path: Path) -> None:
    """Each of the hosts and the relay is started anew after it, by what it has kept."""
    settings = replace(
        SETTINGS_OF_HOSTS, min_sites=2, quorum=2, steps=100_000, time_limits="wan",
        sync=SyncSettings(every=10, chunk_elements=500),
    )  # fmt: skip
    with LocalRun(tmp_path, settings, secured=True) as run:
        run.start_coordinator()
        relay, address = start_relay(run)
        sites = Sites(run, {"one": 1, "two": 2}, "--step-delay-s", "0.01")
        sites.start("one", extra=["--relay", address])
        for host in range(2):
            sites.start("two", host)
        run.wait(lambda s: s["last_commit"] > 0 and count_contributors(s, 2), LIMIT_S)
        assert f"one@{address}" in {site["address"] for site in run.status()["sites"]}

        assert atoll(run, "rotate", str(run.toml)).popen.returncode == 0
        until_done(run, "rotate", str(run.toml), "--sign")  # once all of them trust the next root, the relay too
        for daemon in ("one", "two", "two-host1"):
            run.wait(partial(has_renewed, run.nodes[daemon]), LIMIT_S)
        run.wait(partial(has_renewed, relay), LIMIT_S)
        until_done(run, "rotate", str(run.toml), "--retire", "--now")
        roots = run.status()["root"].encode()
        assert len(certificates.from_pem(roots)) == 1
        for daemon in ("one", "two", "two-host1"):
            run.wait(partial(trusts, run, daemon, roots), LIMIT_S)
        last = run.status()["last_commit"]
        run.wait(lambda s: s["last_commit"] > last + 2 and count_contributors(s, 2), LIMIT_S)
        status = run.status()
        assert status["num_evicted"] == 0
        assert status["num_attempts"] - status["last_commit"] <= 1, "no sync was begun again"

        relay.kill()
        again, _ = start_relay(run, address)
        run.nodes["two-host1"].kill()
        sites.start("two", 1)
        last = run.status()["last_commit"]
        run.wait(lambda s: s["last_commit"] > last + 3 and count_contributors(s, 2), LIMIT_S, "all are back")
        sites.stop()
        again.interrupt()
        assert again.wait(LIMIT_S) == 0
