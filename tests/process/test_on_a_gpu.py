"""A run of a site on a GPU and one on a CPU, with the built-in trainer: they hold the same bits, kills included."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.coordinator import admin
from atoll.protocol.model_settings import ModelSettings, TrainerSettings
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import LocalRun

LIMIT_S = 150.0
SETTINGS = RunSettings(
    run_id="mixed",
    steps=100_000,
    min_sites=1,
    data="local",
    time_limits="local",
    checkpoint_every=5,
    model=ModelSettings(dim=64, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=128, max_sequence=64),
    trainer=TrainerSettings(batch_size=4, sequence=64),
    outer=OuterSettings(learning_rate=0.7, momentum=0.3),
    sync=SyncSettings(every=10, overlap_steps=5, codec="int8", up="sign1", error_feedback=0.9),
)
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


def test_a_site_on_a_gpu_that_is_killed_comes_back_to_one_on_a_cpu(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 4000)
    data = ["--data", str(text)]
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        run.start_node("cpu", launcher="python", extra=data, environment={"CUDA_VISIBLE_DEVICES": ""})
        run.start_node("gpu", launcher="python", extra=data)
        run.wait(lambda status: len(status["commits"]) > 2 and both(status["commits"][-1]), LIMIT_S, "both contribute")
        run.nodes["gpu"].kill()
        run.start_node("gpu", launcher="python", extra=data)
        back = run.wait(lambda status: not both(status["commits"][-1]), LIMIT_S, "the other one goes on")["last_commit"]
        run.wait(lambda s: s["last_commit"] > back and both(s["commits"][-1]), LIMIT_S, "both contribute again")
        admin.ask(run.toml.with_name("run.db"), "stop", reason="the test is over")
        assert run.wait_all(LIMIT_S) == {"cpu": 0, "gpu": 0}
        last = run.status()["last_commit"]
        hashes = run.hashes(last)
        assert sorted(hashes) == ["cpu", "gpu"]
        assert len(set(hashes.values())) == 1, hashes
        losses = [line["loss"] for line in run.journal("gpu", "window") if line["loss"] is not None]
        assert losses[-1] < 0.7 * losses[0]
        assert "rank 0 trains on cuda:0 (" in (run.home("gpu") / "node.log").read_text()
        assert "rank 0 trains on cpu (" in (run.home("cpu") / "node.log").read_text()


def both(commit: dict[str, list[str]]) -> bool:
    return set(commit["contributors"]) == {"cpu", "gpu"}
