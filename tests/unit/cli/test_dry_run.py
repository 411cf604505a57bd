"""`atoll node --dry-run`: facts without joining, whether or not the coordinator is there."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from atoll.cli import client, dry_run
from atoll.cli.main import main
from atoll.node.daemon.config import NodeConfig
from atoll.protocol.errors import PeerError, WorkerError
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.settings import OUTER_OPTIMIZERS, OuterSettings, RunSettings, SyncSettings, settings_to_json

CONFIG = NodeConfig(coordinator="127.0.0.1:7700", name="a")
SETTINGS = RunSettings(run_id="r", sync=SyncSettings(codec="fp32", log_commits=10))
MANIFEST = Manifest.canonical([TensorSpec(name="w", shape=(1024, 1024), dtype="F32", role=Role.TRAINABLE)])


def fake_torch(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    del kwargs
    answer = {"tensors": [["w", [1024, 1024], "F32", 1]], "tied": [], "device": "CPU"}
    return subprocess.CompletedProcess(args[0], 0, json.dumps(answer), "")


def test_memory_follows_the_formula() -> None:
    text = " ".join(line for _, line in dry_run.memory_lines(SETTINGS, MANIFEST))
    # 1 Mi parameters, Nesterov: 8 MiB shared, 8 MiB outer, 4 MiB encoded (and its headers).
    assert "170.0 MiB for the node: 8.0 MiB shared with the workers, 8.0 MiB outer state" in text
    plain = replace(SETTINGS, outer=OuterSettings(optimizer="sgd"))
    assert "4.0 MiB outer state" in dict(dry_run.memory_lines(plain, MANIFEST))["memory"]


def test_every_outer_optimizer_has_a_number_of_slots() -> None:
    from atoll.node.dataplane.optim import outer_optimizer

    for name in OUTER_OPTIMIZERS:
        made = outer_optimizer(OuterSettings(optimizer=name))
        assert dry_run.OUTER_SLOTS[name] == len(made.slots)


def test_what_a_process_with_torch_says_is_checked() -> None:
    described = dry_run.describe(SETTINGS, run=fake_torch)
    assert described.manifest == MANIFEST

    def broken(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        del kwargs
        return subprocess.CompletedProcess(args[0], 1, "", "no torch\n")

    with pytest.raises(WorkerError, match="cannot be built here: no torch"):
        dry_run.describe(SETTINGS, run=broken)


def test_a_script_of_ones_own_is_not_run() -> None:
    config = replace(
        CONFIG, command=("train.py",), num_ranks=2, num_threads=3, advertise="203.0.113.7:7000", listen="127.0.0.1:7000"
    )
    lines = dict(dry_run.facts(SETTINGS, config, dry_run.describe(SETTINGS, run=fake_torch)))
    assert "made by train.py" in lines["model"]
    assert "manifest" not in lines
    assert lines["device"] == "CPU, 2 rank(s) of 3 thread(s)"
    assert "listens on 127.0.0.1:7000, told to others as 203.0.113.7:7000" in lines["ports"]


@pytest.mark.parametrize("is_there", [True, False])
def test_with_and_without_a_coordinator(
    is_there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(address: str) -> dict[str, Any]:
        if not is_there:
            raise PeerError(f"no coordinator answers at {address}")
        return {"settings": json.loads(settings_to_json(SETTINGS)), "state": "waiting for sites 0 of 1"}

    monkeypatch.setattr(client, "fetch_status", fetch)
    monkeypatch.setattr(dry_run.describe, "__defaults__", (fake_torch,))
    code = main(["node", "--coordinator", "127.0.0.1:7700", "--name", "a", "--dry-run"])
    out = capsys.readouterr().out
    assert MANIFEST.digest.hex() in out
    assert "1 tensors, 1.05 million trainable parameters" in out
    if is_there:
        assert code == 0
        assert "r at 127.0.0.1:7700: waiting for sites 0 of 1" in out
    else:
        assert code == 5
        assert "unknown: no coordinator answers" in out
        assert "what follows is for the default settings" in out
