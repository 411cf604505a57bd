"""A run of the built-in trainer on packed tokens: real processes."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.main import main
from atoll.node.worker import data
from atoll.node.worker.evaluate import held_out_bits_per_byte
from atoll.node.worker.model import Transformer
from atoll.node.worker.sample import load_model
from atoll.node.worker.token_index import ShardRole
from atoll.protocol.model_settings import ModelSettings, TrainerSettings
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import LocalRun
from tests.harness.packed import TEXTS, make_tokenizer, write_packed

SETTINGS = RunSettings(
    run_id="run",
    seed=1,
    steps=30,
    data="mine",
    min_sites=2,
    time_limits="local",
    model=ModelSettings(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=32, vocab_size=300, max_sequence=16),
    trainer=TrainerSettings(batch_size=4, sequence=16, warmup_steps=2, learning_rate=0.01, evaluate_every=1),
    sync=SyncSettings(every=10, codec="fp32"),
    outer=OuterSettings(learning_rate=1.0, momentum=0.0),
)
LIMIT_S = 150.0
HELD_OUT = "held_out_loss"


def check_held_out(run: LocalRun, url: str) -> None:
    """What each site evaluated is a curve of the page, step by step as its journal has it, and the newest is in the
    status document."""
    noted: dict[str, dict[int, float]] = {}
    for name in "ab":
        for said in (value for line in run.journal(name, "logged") for value in line["values"]):
            assert (said["name"], said["of_outer"]) == (HELD_OUT, True), "the trainer logs nothing else"
            noted.setdefault(name, {})[said["step"]] = said["value"]
    steps = {step for of_site in noted.values() for step in of_site}
    assert SETTINGS.steps in steps
    assert steps <= {10, 20, 30}, "of commits; sites may take two at once"

    def curves() -> Any:
        with urllib.request.urlopen(f"{url}curves.json", timeout=60) as answer:
            return json.load(answer)

    def drawn(document: Any) -> dict[str, dict[int, float]]:
        of_outer = [curve for curve in document["sites"] if curve["of_outer"]]
        assert {curve["name"] for curve in of_outer} <= {HELD_OUT}
        return {curve["site"]: {step: value for step, _, _, value in curve["points"]} for curve in of_outer}

    def is_all_there(document: Any) -> bool:
        return any(SETTINGS.steps in of_site for of_site in drawn(document).values())

    assert drawn(run.wait(is_all_there, LIMIT_S, "the last value comes to the page", curves)) == noted
    newest = {site["name"]: one for site in run.status()["sites"] for one in site["logged"]}
    for name, of_site in noted.items():
        step = max(of_site)
        assert newest[name] == {"name": HELD_OUT, "of_outer": True, "step": step, "value": of_site[step]}


@pytest.mark.timeout(400)
def test_two_sites_train_on_tokens_and_one_with_others_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, place = make_tokenizer(tmp_path), tmp_path / "run"
    place.mkdir()
    index = write_packed(tmp_path / "packed", tokenizer, shard_tokens=2000)
    write_packed(tmp_path / "other", tokenizer, TEXTS[1:], shard_tokens=2000)
    with LocalRun(place, SETTINGS) as run:
        coordinator = run.start_coordinator(extra=("--http-listen", "127.0.0.1:0"))
        url = coordinator.wait_for_line(r"http://[0-9.:]+/", LIMIT_S)[0]
        node = run.start_node("a", launcher="python", extra=["--data", str(tmp_path / "packed")])
        node.wait_for_line("waiting for start", LIMIT_S)
        run.start_node("c", launcher="python", extra=["--data", str(tmp_path / "other")])
        assert run.wait_all(LIMIT_S, ["c"]) == {"c": 4}, "other tokens"
        run.start_node("b", launcher="python", extra=["--data", str(tmp_path / "packed")])
        assert run.wait_all(LIMIT_S, ["a", "b"]) == {"a": 0, "b": 0}
        status = run.status()
        assert status["run_tokens"] == 2 * 30 * 4 * 16
        (line,) = status["data"]
        assert line["num_samples"] == (index.totals([ShardRole.TRAINING])[0] - 1) // 16
        check_held_out(run, url)
        saved = run.home("a") / "model"
        corpus = data.load(data.source_for_run("mine", [str(tmp_path / "packed")]))
        before = held_out_bits_per_byte(Transformer(SETTINGS.model, SETTINGS.seed), corpus, 16)
        assert held_out_bits_per_byte(load_model(saved), corpus, 16) < before - 0.1
        assert main(["sample", str(saved), "the", "--tokens", "4", "--tokenizer", str(tokenizer)]) == 0
        assert capsys.readouterr().out.startswith("the")
