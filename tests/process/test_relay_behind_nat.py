"""Two sites behind NAT, with one private address for both, and a public host: nobody can dial a site, a site comes out
to one port alone, that of the relay, and they train.
What the public host could learn of it is searched for what the sites hold."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.protocol.trust import certificates, enrolled
from atoll.protocol.trust.names import Kind, Subject
from tests.harness.local_run import LocalRun
from tests.harness.nat import PUBLIC, Nat, available
from tests.process.test_relay import start_relay
from tests.process.test_secured_runs import LIMIT_S, SETTINGS, WORKER, count_contributors
from tests.workers.plain_worker import normal, parse_tensors

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(available()), reason=f"NAT in network namespaces: {available()}"),
]
TENSORS = "secret_tensor=200x100:frozen,w=30x40"
PORT, COORDINATOR_PORT = 443, 7700
PIECE_BYTES, EVERY_BYTES = 32, 8000
SNIFFER = Path(__file__).parents[1] / "workers" / "sniffer.py"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)"


def known_pieces() -> list[bytes]:
    """Of a tensor that all sites hold, and one fetches from the other: short enough to be in one frame."""
    seed = SETTINGS.seed
    (spec,) = [spec for spec in parse_tensors(TENSORS) if spec.name == "secret_tensor"]
    data = normal(spec, seed, 1).tobytes()
    return [data[at : at + PIECE_BYTES] for at in range(0, len(data), EVERY_BYTES)]


def memory_of(pid: int) -> Iterator[bytes]:
    """Of a process, region by region, as far as it can be read."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            begin, end = (int(text, 16) for text in re.split("[- ]", line)[:2])
            if " r" not in line or end - begin > 1 << 30:
                continue
            try:
                memory.seek(begin)
                yield memory.read(end - begin)
            except (OSError, ValueError, OverflowError):
                continue  # of the kernel's


def num_found(pieces: Iterable[bytes], parts: Iterable[bytes]) -> int:
    left = set(pieces)
    for part in parts:
        left -= {piece for piece in left if piece in part}
    return len(set(pieces)) - len(left)


def can_dial(prefix: list[str], host: str, port: int) -> bool:
    command = [*prefix, sys.executable, "-c", CONNECT, host, str(port)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def test_two_sites_behind_nat_train_and_the_public_host_learns_nothing(tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=100_000, min_sites=1)
    worker = [*WORKER, "--tensors", TENSORS]
    with Nat("ab", PORT) as nat, LocalRun(tmp_path, settings, secured=True) as run:
        run.start_coordinator(f"{PUBLIC}:{COORDINATOR_PORT}", nat.public)
        _, address = start_relay(run, f"{PUBLIC}:{PORT}", prefix=nat.public)
        frames = tmp_path / "frames"
        sniffer = run.start("sniffer", [*nat.public, sys.executable, str(SNIFFER), "wan", str(frames)])
        sniffer.wait_for_line("listening", LIMIT_S)
        extra, run.reached_at = ["--relay", address], [address]
        node = run.start_node("a", worker, prefix=nat.site("a"), extra=extra)
        run.wait(lambda s: s["last_commit"] > 0, LIMIT_S)
        run.start_node("b", worker, prefix=nat.site("b"), extra=extra)
        run.wait(lambda s: count_contributors(s, 2), LIMIT_S, "b has the state from a, and contributes")
        assert {site["address"] for site in run.status()["sites"]} == {f"a@{address}", f"b@{address}"}
        first = run.status()["last_commit"]
        run.wait(lambda s: s["last_commit"] > first + 3 and count_contributors(s, 2), LIMIT_S)

        listens = [
            *nat.site("a"),
            sys.executable,
            "-c",
            "import socket,time; s=socket.create_server(('',7)); print('listening', flush=True); time.sleep(100)",
        ]
        run.start("listener", listens).wait_for_line("listening", LIMIT_S)
        assert can_dial(nat.site("a"), "127.0.0.1", 7), "somebody listens at a"
        assert can_dial(nat.site("b"), PUBLIC, PORT), "b comes out"
        assert can_dial(nat.public, PUBLIC, COORDINATOR_PORT)
        assert not can_dial(nat.site("b"), PUBLIC, COORDINATOR_PORT), "by one port alone"
        assert not can_dial(nat.site("b"), nat.router_address("a"), 7)
        assert not can_dial(nat.public, nat.router_address("a"), 7)

        pieces = known_pieces()
        relay = next(process for process in run.processes if process.name == "relay")
        assert num_found(pieces, memory_of(node.popen.pid)) > len(pieces) // 2, "the search finds it where it is"
        assert num_found([*pieces, b"secret_tensor"], memory_of(relay.popen.pid)) == 0
        assert num_found([b"relay hub"], memory_of(relay.popen.pid)) == 1

        run.nodes["a"].interrupt()
        run.nodes["b"].interrupt()
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        last = max(commit for commit in range(1, run.status()["last_commit"] + 1) if len(run.hashes(commit)) == 2)
        assert last > first
        for commit in range(first, last + 1):
            assert len(set(run.hashes(commit).values())) == 1

        seen = frames.read_bytes()
        found = enrolled.load(run.home("a") / enrolled.FOLDER)
        assert found is not None
        salt = certificates.salt_of(certificates.from_pem(found.shown.roots)[0])
        shown = [Subject(settings.run_id, *who).dns_name(salt).encode() for who in ((Kind.RELAY,), (Kind.SITE, "a"))]
        assert num_found(shown, [seen]) == 2, "the handshakes with the relay, and with a through it"
        assert num_found([*pieces, b"secret_tensor", settings.run_id.encode()], [seen]) == 0
