"""A run that is not in plain text: invites, certificates, and what of it can be seen or used by others."""

from __future__ import annotations

import asyncio
import getpass
import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.coordinator import admin
from atoll.coordinator.authority import folder_of
from atoll.protocol import PROTOCOL_VERSION, transport
from atoll.protocol.dates import date_of
from atoll.protocol.errors import ConfigError, HostError, PeerError, RefusedError, StateError
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.trust import certificates, enrolled
from atoll.protocol.trust.invites import from_text
from atoll.protocol.trust.joining import renew
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import MutualTls, Shown
from atoll.protocol.v1 import common_pb2, peer_pb2, peer_pb2_grpc, session_pb2, session_pb2_grpc
from tests.harness.calls import write
from tests.harness.local_run import LocalRun, Process, Status
from tests.harness.relay import Relay
from tests.harness.sockets import free_address

WORKER = [sys.executable, str(Path(__file__).parents[1] / "workers" / "plain_worker.py"), "--step-delay-s", "0.02"]
MODEL = [*WORKER, "--tensors", "secret_tensor=30x40,b=10"]
SETTINGS = RunSettings(
    run_id="secret-run",
    steps=60,
    min_sites=2,
    data="local",
    time_limits="local",
    sync=SyncSettings(every=15, chunk_elements=1000, codec="fp32"),
)
FOREVER = replace(SETTINGS, steps=100_000)
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(400)


def atoll(run: LocalRun, *arguments: str) -> Process:
    process = run.start(arguments[0], [sys.executable, "-m", "tests.harness.guarded", *arguments])
    process.wait(LIMIT_S)
    return process


def count_contributors(status: dict[str, Any], num: int) -> bool:
    return bool(status["commits"]) and len(status["commits"][-1]["contributors"]) == num


def test_sites_join_by_invites_train_and_come_back_without_one(tmp_path: Path) -> None:
    with LocalRun(tmp_path, FOREVER, secured=True) as run:
        run.start_coordinator()
        for name in "ab":
            run.start_node(name, MODEL)
        run.wait(lambda s: s["last_commit"] > 1 and count_contributors(s, 2), LIMIT_S)
        run.nodes["b"].kill()
        again = run.start_node("b", MODEL)
        again.wait_for_line("start 2", LIMIT_S)
        at = run.status()["last_commit"]
        run.wait(lambda s: s["last_commit"] > at + 1 and count_contributors(s, 2), LIMIT_S, "both contribute again")
        admin.ask(run.store_path, "stop", reason="the test is over")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        assert not any("joined run" in line for line in again.lines), "its certificate is enough"
        last = run.status()["last_commit"]
        assert len(set(run.hashes(last).values())) == 1
        assert set(run.hashes(last)) == {"a", "b"}


def test_a_stranger_gets_no_answer_and_members_are_themselves_alone(tmp_path: Path) -> None:
    with LocalRun(tmp_path, FOREVER, secured=True) as run:
        run.start_coordinator()
        for name in "ab":
            run.start_node(name, MODEL)
        run.wait(lambda s: count_contributors(s, 2), LIMIT_S)
        peer = next(site["address"] for site in run.status()["sites"] if site["name"] == "b")

        async def call(address: str, handshake: transport.Handshake | None, method: str) -> grpc.StatusCode:
            """How a call with an empty message ends."""
            channel = transport.open_channel(address, handshake=handshake, max_message_bytes=1 << 20)
            try:
                kind = "stream_stream" if method.endswith("Session") else "unary_unary"
                made = getattr(channel, kind)(method)
                if kind == "unary_unary":
                    await made(b"", timeout=LIMIT_S)
                else:
                    stream = made(timeout=LIMIT_S)
                    await write(stream, b"")
                    await stream.read()
            except grpc.aio.AioRpcError as error:
                return error.code()
            finally:
                await channel.close()
            return grpc.StatusCode.OK

        found = enrolled.load(run.home("a") / enrolled.FOLDER)
        assert found is not None
        identity = MutualTls("secret-run", found.shown)
        nobody = transport.Handshake(
            grpc.ssl_channel_credentials(found.shown.roots), identity.towards(Kind.SITE).expected
        )
        own = certificates.Root.made(bytes(16), certificates.CLOCKS_DIFFER_BY, date_of(2e9))
        forged_key = certificates.new_key()
        forged = grpc.ssl_channel_credentials(
            found.shown.roots,
            certificates.key_to_pem(forged_key),
            certificates.to_pem(
                own.sign(forged_key.public_key(), found.subject, certificates.CLOCKS_DIFFER_BY, date_of(2e9))
            ),
        )
        coordinator = "/atoll.protocol.v1.CoordinatorService"
        to_run, to_peer = identity.towards(Kind.COORDINATOR), identity.towards(Kind.SITE, "b")

        async def all_calls() -> list[grpc.StatusCode]:
            return [
                await call(run.address, None, f"{coordinator}/Status"),  # in plain text
                await call(run.address, replace(to_run, credentials=nobody.credentials), f"{coordinator}/Status"),
                await call(run.address, replace(to_run, credentials=forged), f"{coordinator}/Status"),
                await call(run.address, identity.towards(Kind.SITE, "b"), f"{coordinator}/Status"),  # another's name
                await call(peer, identity.towards(Kind.SITE, "a"), "/atoll.protocol.v1.PeerService/Probe"),
                await call(peer, to_peer, "/atoll.protocol.v1.PeerService/Probe"),  # an identity is none among sites
                await call(run.address, to_run, f"{coordinator}/Join"),  # an identity is no invite
                await call(run.address, to_run, f"{coordinator}/Status"),
            ]

        unavailable, denied = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED
        assert asyncio.run(all_calls()) == [unavailable] * 5 + [denied] * 2 + [grpc.StatusCode.OK]
        run.wait(lambda s: s["last_commit"] > 2, LIMIT_S, "the run goes on")
        assert run.status()["num_refused"] == 0


def test_an_invite_that_was_used_has_expired_or_is_for_another_home_is_refused_in_words(tmp_path: Path) -> None:
    with LocalRun(tmp_path, FOREVER, secured=True) as run:
        coordinator = run.start_coordinator()
        used = run.invite("a")
        assert atoll(run, "join", str(used), "--home", str(run.home("a")), "--enrol-only").popen.returncode == 0
        folder = run.home("a") / enrolled.FOLDER
        before = enrolled.load(folder)
        again = atoll(run, "join", str(used), "--home", str(run.home("a")), "--enrol-only")
        assert again.popen.returncode == 0, "the same home may ask again"
        after = enrolled.load(folder)
        assert before is not None
        assert after is not None
        assert after.shown.key == before.shown.key
        assert (
            atoll(run, "join", str(run.invite("a")), "--home", str(run.home("a")), "--enrol-only").popen.returncode == 0
        )
        newer = enrolled.load(folder)
        assert newer is not None
        assert newer.shown.key != before.shown.key, "the old one may be known to others"
        kept = {enrolled.IDENTITY, enrolled.ROOTS, enrolled.COORDINATOR}
        assert {path.name for path in folder.iterdir()} == kept
        used = run.invite("thief")
        assert atoll(run, "join", str(used), "--home", str(run.home("first")), "--enrol-only").popen.returncode == 0
        thief = atoll(run, "join", str(used), "--home", str(run.home("thief")), "--enrol-only")
        assert thief.popen.returncode == RefusedError.exit_code
        assert any("the invite for site thief was used at" in line for line in thief.lines), thief.lines
        assert not run.home("thief").exists(), "nothing is left of it"
        assert any("was shown by somebody with another key" in line for line in coordinator.lines)
        other = atoll(run, "join", str(run.invite("b")), "--home", str(run.home("a")), "--enrol-only")
        assert other.popen.returncode == ConfigError.exit_code
        assert any("is of site a of run secret-run" in line for line in other.lines), other.lines
        late = run.invite("c", life_s=1e-3)
        expired = atoll(run, "join", str(late), "--home", str(run.home("c")), "--enrol-only")
        assert expired.popen.returncode == ConfigError.exit_code
        assert any("the invite for site c has expired at" in line for line in expired.lines), expired.lines
        nobody = atoll(run, "node", "--home", str(run.home("nobody")))
        assert nobody.popen.returncode == ConfigError.exit_code
        assert any("no site has joined a run with" in line for line in nobody.lines), nobody.lines
        dry = atoll(run, "join", str(run.folder / "b.invite"), "--home", str(run.home("b")), "--dry-run")
        assert dry.popen.returncode == ConfigError.exit_code
        bad = atoll(run, "join", str(run.folder / "b.invite"), "--home", str(run.home("b")), "--ranks", "0")
        assert bad.popen.returncode == ConfigError.exit_code
        assert not run.home("b").exists(), "the invite is not used"
        assert atoll(run, "status", str(run.toml)).popen.returncode == 0
        coordinator.kill()
        gone = atoll(run, "join", str(run.folder / "b.invite"), "--home", str(run.home("b")), "--enrol-only")
        assert gone.popen.returncode == PeerError.exit_code
        run.start_coordinator()
        back = atoll(run, "join", str(run.folder / "b.invite"), "--home", str(run.home("b")), "--enrol-only")
        assert back.popen.returncode == 0, "the invite, and the key that was made before, go on from there"


def answered(shown: Shown, name: str, address: str) -> bool:
    """Whether that site answers a probe by whoever shows this."""
    handshake = MutualTls("secret-run", shown).towards(Kind.SITE, name)
    header = common_pb2.Header(protocol_version=PROTOCOL_VERSION, run_id="secret-run")
    with grpc.secure_channel(address, handshake.credentials, options=[transport.expects(handshake)]) as channel:
        try:
            peer_pb2_grpc.PeerServiceStub(channel).Probe(peer_pb2.ProbeRequest(header=header), timeout=LIMIT_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                return False
            raise
    return True


def is_refused(shown: Shown, name: str, address: str, _: Status) -> bool:
    return not answered(shown, name, address)


def test_who_is_banned_is_refused_with_its_certificate_and_another_invite(tmp_path: Path) -> None:
    with LocalRun(tmp_path, FOREVER, secured=True) as run:
        coordinator = run.start_coordinator()
        for name in "abc":
            run.start_node(name, MODEL)
        run.wait(lambda s: count_contributors(s, 3), LIMIT_S)
        spare = run.invite("c")
        found = enrolled.load(run.home("c") / enrolled.FOLDER)
        assert found is not None
        before = MutualTls("secret-run", found.shown)
        shown = asyncio.run(renew(before, [run.address], Subject("secret-run", Kind.SITE, "c")))
        peers = {site["name"]: site["address"] for site in run.status()["sites"]}
        assert answered(shown, "b", peers["b"])
        assert atoll(run, "ban", str(run.toml), "c", "--reason", "it lies").popen.returncode == 0
        assert run.wait_all(LIMIT_S, ["c"]) == {"c": RefusedError.exit_code}
        last = run.status()["last_commit"]
        for name in "ab":  # its certificate holds for a day
            run.wait(partial(is_refused, shown, name, peers[name]), LIMIT_S, f"{name} has heard of it")
        run.wait(lambda s: s["last_commit"] > last, LIMIT_S, "the others go on")
        coordinator.kill()
        run.start_coordinator()
        again = run.start_node("c", MODEL)
        assert run.wait_all(LIMIT_S, ["c"]) == {"c": RefusedError.exit_code}
        assert any("c is banned from run 'secret-run': it lies" in line for line in again.lines), again.lines
        other = atoll(run, "join", str(spare), "--home", str(run.home("c2")), "--enrol-only")
        assert other.popen.returncode == RefusedError.exit_code
        assert any("c is banned from run 'secret-run': it lies" in line for line in other.lines), other.lines


def test_a_viewer_looks_at_the_run_from_elsewhere_and_can_do_no_more(tmp_path: Path) -> None:
    with LocalRun(tmp_path, FOREVER, secured=True) as run:
        run.start_coordinator()
        home = run.folder / "anna"
        joined = atoll(run, "join", str(run.invite("anna", role="viewer")), "--home", str(home))
        assert joined.popen.returncode == 0, joined.lines
        looked = atoll(run, "status", "--home", str(home))
        assert any("run secret-run: waiting for sites 0 of 2" in line for line in looked.lines), looked.lines
        found = enrolled.load(home / enrolled.FOLDER)
        assert found is not None
        handshake = MutualTls("secret-run", found.shown).towards(Kind.COORDINATOR)
        with grpc.secure_channel(run.address, handshake.credentials, options=[transport.expects(handshake)]) as channel:
            stub = session_pb2_grpc.CoordinatorServiceStub(channel)
            request = certificates.request(certificates.new_key())
            for call in (
                lambda: stub.Join(session_pb2.JoinRequest(), timeout=LIMIT_S),
                lambda: stub.Renew(session_pb2.RenewRequest(signing_request=request), timeout=LIMIT_S),
                lambda: stub.Renew(session_pb2.RenewRequest(signing_request=request, identity=True), timeout=LIMIT_S),
                lambda: next(stub.Watch(iter(()), timeout=LIMIT_S)),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        took = atoll(run, "invite", str(run.toml), "--viewer", "anna", "--take-back")
        assert took.popen.returncode == 0, took.lines
        refused_now = atoll(run, "status", "--home", str(home))
        assert refused_now.popen.returncode == RefusedError.exit_code
        assert any("has invited no viewer anna" in line for line in refused_now.lines), refused_now.lines
        node = atoll(run, "node", "--home", str(home))
        assert node.popen.returncode == ConfigError.exit_code
        assert any("is of viewer anna of run secret-run" in line for line in node.lines), node.lines


def test_an_operator_changes_the_run_from_elsewhere_and_the_log_says_who(tmp_path: Path) -> None:
    with LocalRun(tmp_path, FOREVER, secured=True) as run:
        coordinator = run.start_coordinator()
        homes = {}
        for role, name in (("viewer", "vera"), ("operator", "otto")):
            homes[name] = str(run.folder / name)
            joined = atoll(run, "join", str(run.invite(name, role=role)), "--home", homes[name])
            assert joined.popen.returncode == 0, joined.lines
        refused = atoll(run, "ban", "--home", homes["vera"], "c")
        assert refused.popen.returncode == RefusedError.exit_code
        assert any("viewer vera of run secret-run may not call Operate" in line for line in refused.lines)
        assert atoll(run, "ban", "--home", homes["otto"], "c", "--reason", "it lies").popen.returncode == 0
        assert run.status()["banned"] == ["c: it lies"]
        again = atoll(run, "evict", "--home", homes["otto"], "x")
        assert any("refused: no site of run 'secret-run' is called 'x'" in line for line in again.lines), again.lines
        invite = run.folder / "d.invite"
        invited = atoll(run, "invite", "--home", homes["otto"], "--site", "d", "--file", str(invite))
        assert invited.popen.returncode == 0, invited.lines
        assert from_text(invite.read_text()).addresses == (run.address,), "where the operator reaches it"
        coordinator.kill()
        run.start_coordinator()
        log = atoll(run, "audit", "--home", homes["otto"], "--format", "json")
        entries = [json.loads(line) for line in log.lines]
        by_otto = [
            (entry["what"], entry["outcome"]) for entry in entries if entry["by"].startswith("operator otto (key ")
        ]
        assert [what.partition(" ")[0] for what, _ in by_otto] == ["ban", "evict", "invite"]
        banned = "banned, though no site of that name is known here; known are none"
        assert [outcome.partition(":")[0] for _, outcome in by_otto] == [banned, "refused", "done"]
        assert sum(entry["by"] == f"{getpass.getuser()} on the coordinator's machine" for entry in entries) == 2
        here = atoll(run, "audit", str(run.toml), "--holds", entries[-1]["digest"])
        assert here.popen.returncode == 0
        assert len(here.lines) == len(entries)
        assert atoll(run, "audit", str(run.toml), "--holds", "0" * 64).popen.returncode == StateError.exit_code


def test_the_root_may_lie_elsewhere_and_both_sides_say_whether_they_work(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(FOREVER, min_sites=1), secured=True) as run:
        coordinator = run.start_coordinator()
        coordinator.kill()
        elsewhere = run.folder / "credentials"
        folder_of(run.store_path).rename(elsewhere)
        for path in (*elsewhere.iterdir(), elsewhere):
            path.chmod(0o400 if path.is_file() else 0o500)
        run.start_coordinator(extra=["--trust", str(elsewhere)])
        lives = atoll(run, "health", str(run.toml))
        assert (lives.popen.returncode, lives.lines[-1]) == (
            0,
            "the coordinator lives, and is not ready: 1 more site is needed for a quorum",
        )
        assert atoll(run, "health", str(run.toml), "--ready").popen.returncode == HostError.exit_code
        node = run.start_node("a", MODEL)
        run.wait(lambda s: count_contributors(s, 1), LIMIT_S)
        assert atoll(run, "health", str(run.toml), "--ready").lines[-1] == "the coordinator lives and is ready"
        assert atoll(run, "health", "--node", str(run.home("a")), "--ready").lines[-1] == "the node lives and is ready"
        # How fast the coordinator answers and the disk takes bytes is this machine's affair: `!` says that it is slow.
        said = [
            line for line in node.lines if re.search(r" (ok|!)  coordinator  127\.0\.0\.1:\d+ answers in \d+ ms", line)
        ]
        assert len(said) == 1, "a machine is looked at as it joins"
        looked = atoll(run, "doctor", "--home", str(run.home("a")))
        assert looked.popen.returncode == 0, looked.lines
        verdicts = {line.split()[1]: line.split()[0] for line in looked.lines if not line.strip().startswith("->")}
        assert verdicts.items() >= dict.fromkeys(("identity", "clock", "version"), "ok").items()
        assert {verdicts["coordinator"], verdicts["disk"]} <= {"ok", "!"}
        node.kill()
        gone = atoll(run, "health", "--node", str(run.home("a")))
        assert gone.popen.returncode == HostError.exit_code
        assert any("no node answers at" in line for line in gone.lines)


def test_nothing_of_a_run_is_on_the_wire_in_clear(tmp_path: Path) -> None:
    """All that goes through two relays: one before the coordinator, one before a site."""
    seen: list[bytes] = []

    def keep(data: bytes) -> bytes:
        seen.append(data)
        return data

    async def whole() -> None:
        with LocalRun(tmp_path, SETTINGS, secured=True) as run:
            run.start_coordinator()
            before_run = await Relay(run.address).start()
            before_run.change = keep
            invite = run.invite("berlin", addresses=[before_run.address])
            listen = "127.0.0.1:0"
            await asyncio.to_thread(atoll, run, "join", str(invite), "--home", str(run.home("berlin")), "--enrol-only")
            listen = free_address()
            before_site = await Relay(listen).start()
            before_site.change = keep
            extra = ["--listen", listen, "--advertise", before_site.address]
            await asyncio.to_thread(run.start_node, "berlin", MODEL, extra=extra)
            await asyncio.to_thread(run.start_node, "paris", MODEL)
            assert await asyncio.to_thread(run.wait_all, LIMIT_S) == {"berlin": 0, "paris": 0}
            key = (run.home("berlin") / "key").read_bytes()
            await before_run.stop()
            await before_site.stop()
            wire = b"".join(seen)
            assert len(wire) > 10_000
            for secret in (
                b"secret-run",
                b"secret_tensor",
                b"berlin",
                b"paris",
                b"coordinator",
                b"fp32",
                key,
                key.hex().encode(),
            ):
                assert secret not in wire, secret
            assert before_site.num_connections > 0
            assert before_run.num_connections > 0

    asyncio.run(whole())


def test_what_a_site_shows_is_renewed_without_a_sync_that_fails(tmp_path: Path) -> None:
    """Certificates of 12 seconds, looked at twice a second: a run that lasts longer than several of them. Site b has
    two hosts."""
    program = [sys.executable, str(Path(__file__).parents[1] / "workers" / "short_certificates.py")]
    with LocalRun(tmp_path, replace(FOREVER, time_limits="wan"), secured=True, program=program[1:]) as run:
        coordinator = run.start_coordinator()
        run.start_node("a", MODEL)
        of_hosts = ["--site-hosts", "2", "--site-address", free_address()]
        for name in ("b", "b-host1"):
            run.start_node(name, [*MODEL, "--shard"], extra=of_hosts)
        for process in (coordinator, *run.nodes.values()):
            for _ in range(2):
                process.wait_for_line(r"the certificate is renewed", LIMIT_S)
        run.wait(lambda s: sum("renewed" in line for line in run.nodes["a"].lines) > 2, LIMIT_S)
        before = run.status()["last_commit"]
        run.start_node("c", MODEL)
        assert not [line for line in run.nodes["b"].lines if "is lost" in line]
        status = run.wait(lambda s: s["last_commit"] > before + 2 and count_contributors(s, 3), LIMIT_S)
        assert status["num_evicted"] == 0
        assert status["num_attempts"] - status["last_commit"] <= 1, "no sync was begun again"


def test_a_certificate_that_is_shown_by_nobody_who_may(tmp_path: Path) -> None:
    """The key of a site, with a certificate of its own making: TLS refuses it before any of it is read."""
    with LocalRun(tmp_path, FOREVER, secured=True) as run:
        run.start_coordinator()
        assert (
            atoll(run, "join", str(run.invite("a")), "--home", str(run.home("a")), "--enrol-only").popen.returncode == 0
        )
        folder = run.home("a") / enrolled.FOLDER
        found = enrolled.load(folder)
        assert found is not None
        key = certificates.key_from_pem(found.shown.key)
        root = certificates.Root.made(
            certificates.salt_of(certificates.from_pem(found.shown.roots)[0]), certificates.CLOCKS_DIFFER_BY,
            date_of(1.8e9),
        )  # fmt: skip
        own = root.sign(key.public_key(), found.subject, certificates.CLOCKS_DIFFER_BY, date_of(1.8e9))
        shown = Shown(found.shown.roots, certificates.to_pem(own), found.shown.key)
        handshake = MutualTls("secret-run", shown).towards(Kind.COORDINATOR)
        with grpc.secure_channel(run.address, handshake.credentials, options=[transport.expects(handshake)]) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                session_pb2_grpc.CoordinatorServiceStub(channel).Status(session_pb2.StatusRequest(), timeout=LIMIT_S)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
