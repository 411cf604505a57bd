"""Whole runs in which one site has two processes and another has one: the example, and the built-in trainer."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.protocol.model_settings import ModelSettings, TrainerSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import LocalRun

LIMIT_S = 100.0
DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
SETTINGS = RunSettings(
    run_id="ranks", steps=40, min_sites=2, data="local", time_limits="local", sync=SyncSettings(every=10)
)
pytestmark = pytest.mark.timeout(240)


def ends_well(run: LocalRun, tokens_a_sample: int) -> None:
    assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0}
    hashes = run.hashes(4)
    assert sorted(hashes) == ["one", "two"]
    assert len(set(hashes.values())) == 1, hashes
    status = run.status()
    assert status["state_hash"] == hashes["one"]
    assert {site["num_ranks"] for site in status["sites"]} == {1, 2}
    samples = {line["site"]: line["num_done"] for line in status["data"]}
    assert sorted(samples) == ["one", "two"]
    assert sum(samples.values()) * tokens_a_sample == status["run_tokens"]


def test_the_example_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        run.start_node("one", [str(DIGITS)], launcher="python")
        run.start_node("two", [str(DIGITS)], launcher="python", extra=["--ranks", "2"])
        ends_well(run, 1)
        for name in ("one", "two"):
            log = (run.home(name) / "node.log").read_text()
            found = re.search(r"\[rank 0\] step 40: ([0-9.]+)% of 360 test images are right", log)
            assert found, log
            assert float(found[1]) > 80, "an untrained model has 10"


def test_the_built_in_trainer_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    settings = replace(
        SETTINGS,
        model=ModelSettings(dim=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=64, max_sequence=32),
        trainer=TrainerSettings(batch_size=4, sequence=32),
    )
    with LocalRun(tmp_path, settings) as run:
        run.start_coordinator()
        run.start_node("one", launcher="python", extra=["--data", str(text)])
        run.start_node("two", launcher="python", extra=["--data", str(text), "--ranks", "2"])
        ends_well(run, settings.trainer.sequence)
