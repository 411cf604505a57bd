"""`atoll demo` as a user runs it: real processes, real text, the report in a pipe, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.cli import plot

COMMAND = [sys.executable, "-m", "atoll", "demo", "--model", "nano", "--sites", "2", "--sync-every", "10"]
LIMIT_S = 150.0
SHAPES_LIMIT_S = 390.0

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


def test_two_sites_train_and_the_report_is_json(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    result = subprocess.run(
        [*COMMAND, "--steps", "35", "--json", "--keep", str(folder)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
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
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as demo:
        assert demo.stdout is not None
        assert any(line.startswith("commit 1:") for line in demo.stdout)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(LIMIT_S) == 130
    # A worker has its node's socket to go by: it may end a moment after its node.
    deadline = time.monotonic() + LIMIT_S
    while left_behind(folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_script_of_ones_own_beside_one_site_of_it_alone(tmp_path: Path) -> None:
    """Its arguments come to it, its losses are in the report, and its samples need no fingerprint."""
    folder, script = tmp_path / "demo", Path(__file__).parents[1] / "workers" / "loading_worker.py"
    result = subprocess.run(
        [*COMMAND, "--script", f"{script} 40 4", "--compare", "--steps", "20", "--json", "--keep", str(folder)],
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
    command = [sys.executable, "-m", "atoll", "demo", "--layouts", "1,fsdp=2,tp=2+pp=2", "--kill", "--json"]
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
