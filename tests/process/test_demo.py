"""`atoll demo` as a user runs it: real processes, real text, the report in a pipe, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.cli import plot
from atoll.node.dataplane.saved_manifest import load_manifest
from atoll.protocol.trust import certificates, enrolled
from atoll.protocol.trust.names import Kind, Subject
from tests.harness.wires import Wires, available, found

COMMAND = [sys.executable, "-m", "atoll", "demo", "--model", "nano", "--sites", "2", "--sync-every", "10"]
LIMIT_S = 150.0
SHAPES_LIMIT_S = 390.0
SITES = ("amsterdam", "berlin")
FEWEST_BYTES = 6
"""Of a word that is looked for: a shorter one may be in what is encrypted by chance."""
IN_JSON = ("--format", "json")
TLS = b"\x16\x03"
PRIVATE_KEY = re.compile(rb"-----BEGIN PRIVATE KEY-----\n.*?-----END PRIVATE KEY-----\n", re.DOTALL)
no_wires = available()

pytestmark = pytest.mark.timeout(400)


def left_behind(folder: Path) -> list[str]:
    """Command lines of running processes that name `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it ended meanwhile
        if any(str(folder) in word for word in words):
            found.append(" ".join(words))
    return found


def words_of(folder: Path, run_id: str) -> set[bytes]:
    """What nobody on the wire is to read: names of the run, its sites and its tensors, settings, and keys."""
    tensors = [tensor.name for tensor in load_manifest(folder / "model").manifest.tensors]
    settings = re.findall(r"^(\w+_\w+) = ", (folder / "run.toml").read_text(), re.MULTILINE)
    secrets = {(folder / "sites" / site / "key").read_bytes() for site in SITES}
    keys = [text for path in folder.rglob("*.*") if path.is_file() for text in PRIVATE_KEY.findall(path.read_bytes())]
    assert len(keys) >= 1 + len(SITES), "the root's, and an identity of each"
    for text in keys:
        number = certificates.key_from_pem(text).private_numbers().private_value
        secrets |= {number.to_bytes(32), *text.splitlines()[1:-1]}
    secrets |= {secret.hex().encode() for secret in secrets}
    names = {run_id, "coordinator", "PRIVATE KEY", *SITES, *tensors, *settings}
    return {word for word in {name.encode() for name in names} | secrets if len(word) >= FEWEST_BYTES}


def check_wires(wires: Wires, folder: Path, report: dict[str, Any]) -> None:
    """All that the demo's processes said to each other is there, and says nothing of the run."""
    words, said = words_of(folder, report["run_id"]), wires.said()
    assert wires.num_lost() == 0
    assert sum(map(len, said)) > sum(site["sent_bytes"] for site in report["sites"]) > 100_000
    enrolled_there = enrolled.load(folder / "sites" / SITES[0] / enrolled.FOLDER)
    assert enrolled_there is not None
    salt = certificates.salt_of(certificates.from_pem(enrolled_there.shown.roots)[0])
    run_id = report["run_id"]
    coordinator, *sites = (
        subject.dns_name(salt).encode()
        for subject in (Subject(run_id, Kind.COORDINATOR), *(Subject(run_id, Kind.SITE, site) for site in SITES))
    )
    assert found([coordinator], said), "a handshake with the coordinator"
    assert found(sites, said), "and one of the two sites"
    assert all(stream.startswith(TLS) for stream in said)
    assert found(words, [*said, *wires.other_packets()]) == set()
    wires.inside(partial(say_in_clear, b" ".join(sorted(words))))
    wires.until_read(lambda said: found(words, said) == words)


def say_in_clear(text: bytes) -> None:
    """In two pieces, which cut a word."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as one,
        listening.accept()[0] as other,
    ):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in (text[:3], text[3:]):
            one.sendall(piece)
        one.shutdown(socket.SHUT_WR)
        while other.recv(1 << 16):
            pass


AS_ANYBODY = pytest.param(False, id="by an ordinary user")
WITH_WIRES = pytest.param(
    True,
    marks=[pytest.mark.root, pytest.mark.skipif(bool(no_wires), reason=f"what goes over its wires: {no_wires}")],
    id="with nothing on its wires in clear",
)


@pytest.mark.parametrize("has_wires", [AS_ANYBODY, WITH_WIRES] if no_wires else [WITH_WIRES])
def test_two_sites_train_and_the_report_is_json(tmp_path: Path, has_wires: bool) -> None:
    folder = tmp_path / "demo"
    begin = partial(
        subprocess.run,
        [*COMMAND, "--steps", "35", *IN_JSON, "--keep", str(folder)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    with ExitStack() as stack:
        wires = stack.enter_context(Wires()) if has_wires else None
        result = wires.inside(begin) if wires is not None else begin()
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        if wires is not None:
            check_wires(wires, folder, report)
    assert report["ok"] is True
    assert report["commits"] == report["expected_commits"] == 4  # the last sync is shortened to the run's length
    assert len({site["state_hash"] for site in report["sites"]}) == 1
    assert report["state_hash"] == report["sites"][0]["state_hash"]
    assert report["bits_per_byte_after"] < report["bits_per_byte_before"]
    assert all(site["sent_bytes"] > 0 for site in report["sites"])
    for line in ("commit 1: step 10", "commit 4: step 35", "evaluating on held-out text"):
        assert line in result.stderr
    assert json.loads((folder / "report.json").read_text()) == report
    assert {path.name for path in (folder / "logs").iterdir()} == {"coordinator.log", "amsterdam.log", "berlin.log"}
    assert left_behind(folder) == []
    logged = {part.title: part.lines for part in plot.read(folder / "run.db")}["held_out_loss"]
    ((name, (steps, losses)),) = logged.items()
    assert name in {f"{site}, of the outer parameters" for site in ("amsterdam", "berlin")}, "one of them evaluates"
    assert steps[-1] == 35, "the last word of a site comes to the coordinator, and is kept"
    assert steps == sorted(set(steps) & {10, 20, 30, 35})
    assert losses[-1] < losses[0]

    sampled = subprocess.run(
        [sys.executable, "-m", "atoll", "sample", str(folder / "model"), "def ", "--bytes", "20"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert sampled.stdout.startswith("def ")


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with subprocess.Popen(
        [*COMMAND, "--steps", "100000", "--keep", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None
        assert any(line.startswith("commit 1:") for line in demo.stdout)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(LIMIT_S) == 130
        said = demo.stderr.read()
    assert "atoll demo: interrupted; stopping the sites and the coordinator\n" in said
    assert re.search(rf"atoll demo: stopped after commit [1-9]\d* of 10000; .* are in {re.escape(str(folder))}\n", said)
    # A worker has its node's socket to go by: it may end a moment after its node.
    deadline = time.monotonic() + LIMIT_S
    while left_behind(folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_script_of_ones_own_beside_one_site_of_it_alone(tmp_path: Path) -> None:
    """Its arguments come to it, its losses are in the report, and its samples need no fingerprint."""
    folder, script = tmp_path / "demo", Path(__file__).parents[1] / "workers" / "loading_worker.py"
    result = subprocess.run(
        [*COMMAND, "--script", f"{script} 40 4", "--compare", "--steps", "20", *IN_JSON, "--keep", str(folder)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["commits"] == report["expected_commits"] == 2
    assert {site["state_hash"] for site in report["sites"]} == {report["state_hash"]}
    assert report["script"]["last"] < report["script"]["first"]
    assert report["script"]["alone"] < report["script"]["first"]
    assert result.stderr.count("commit 2: step 20") == 2, "of two sites, then of one"
    assert {path.name for path in (folder / "alone" / "logs").iterdir()} == {"coordinator.log", "amsterdam.log"}
    assert left_behind(folder) == []


@pytest.mark.slow  # seven training processes
def test_sites_of_three_shapes_of_which_one_is_killed_hold_the_same(tmp_path: Path) -> None:
    """The four processes of the third site are those that are killed."""
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "atoll", "demo", "--layouts", "1,fsdp=2,tp=2+pp=2", "--kill", *IN_JSON]
    result = subprocess.run(
        [*command, "--steps", "200", "--sync-every", "20", "--keep", str(folder)],
        capture_output=True,
        text=True,
        timeout=SHAPES_LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["ok"] is True
    assert {site["state_hash"] for site in report["sites"]} == {report["state_hash"]}
    assert [site["name"] for site in report["sites"] if site["note"]], "one was killed, and came back"
    for name, num_ranks in {"amsterdam": 1, "berlin": 2, "cairo": 4}.items():
        log = (folder / "sites" / name / "node.log").read_text()
        assert set(re.findall(r"\[rank (\d)\] rank \d trains on cpu", log)) == {str(n) for n in range(num_ranks)}
    assert left_behind(folder) == []
