"""A run of the built-in trainer that starts from a folder of Hugging Face's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.node.dataplane.hugging_face_export import export
from atoll.node.worker.model import Transformer
from atoll.node.worker.sample import load_model
from atoll.protocol.model_settings import ModelSettings, TrainerSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import LocalRun
from tests.harness.saved_built_in import save

MODEL = ModelSettings(dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=32, max_sequence=16, rope_base=500.0)
HARDLY = TrainerSettings(batch_size=2, sequence=16, learning_rate=1e-12)
"""It trains, and moves nothing that fp32 tells apart from what it began with."""
SETTINGS = RunSettings(
    run_id="run",
    seed=1,
    steps=4,
    min_sites=2,
    time_limits="local",
    model=MODEL,
    trainer=HARDLY,
    sync=SyncSettings(every=2, codec="fp32"),
)
LIMIT_S = 150.0


@pytest.mark.timeout(400)
def test_all_sites_start_from_the_folder_that_one_brings(tmp_path: Path) -> None:
    pretrained = Transformer(MODEL, seed=7)
    saved, folder, place = tmp_path / "saved", tmp_path / "hf", tmp_path / "run"
    saved.mkdir()
    place.mkdir()
    save(saved, SETTINGS, pretrained)
    export(saved, folder, max_shard_bytes=1 << 30)
    with LocalRun(place, SETTINGS) as run:
        run.start_coordinator(extra=["--resume", str(folder)])
        run.start_node("b", launcher="python")
        run.wait(lambda s: "has to bring the saved model" in s["state"] and s["sites"], LIMIT_S)
        run.start_node("a", launcher="python", extra=["--from", str(folder)])
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        assert run.status()["run_step"] == 4
        assert run.status()["parent"] == {"run_id": "hf", "commit": 0, "run_step": 0, "run_tokens": 0}
        for name in ("a", "b"):
            trained = load_model(run.home(name) / "model").state_dict()
            for key, value in pretrained.state_dict().items():
                torch.testing.assert_close(trained[key], value, rtol=0, atol=1e-7)
