"""A run that is told to a tracker and keeps its best model, over another start of its coordinator."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from atoll.coordinator.tracking.tensorboard import scalar
from atoll.protocol.figures import PHASES
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import LocalRun, Status
from tests.unit.coordinator.test_tracking import records

LIMIT_S = 150.0
BEST = 3
PLAIN = Path(__file__).parents[1] / "workers" / "plain_worker.py"
WORKER = [sys.executable, str(PLAIN), "--step-delay-s", "0.1", "--best-commit", str(BEST)]
SETTINGS = RunSettings(
    run_id="tracked",
    data="local",
    steps=100_000,
    min_sites=2,
    quorum=2,
    time_limits="wan",
    best_by="val_loss",
    save_every=1,
    keep_models=512,
    sync=SyncSettings(every=4, codec="fp32", log_commits=512),
)
TAG = "val_loss of the outer parameters"
pytestmark = pytest.mark.timeout(400)


def steps_told(board: Path, site: str) -> list[int]:
    """Of the outer parameters' curve, as TensorBoard reads them."""
    found = [record for file in sorted((board / "sites" / site).iterdir()) for record in records(file.read_bytes())]
    by_step = {scalar(TAG, step, 0.0, float(abs(step // 4 - BEST)))[9:]: step for step in range(0, 4 * 500, 4)}
    return [by_step[record[9:]] for record in found if record[9:] in by_step]


def test_the_best_model_is_kept_and_each_value_told_once(tmp_path: Path) -> None:
    board = tmp_path / "board"
    with LocalRun(tmp_path, SETTINGS) as run:
        coordinator = run.start_coordinator(extra=["--tensorboard", str(board)])
        for name in "ab":
            run.start_node(name, WORKER)

        def is_kept(status: Status) -> bool:
            kept = [run.home(name) / "model.best" / "manifest.json" for name in "ab"]
            is_best = status["best"] is not None and status["best"]["commit"] == BEST
            return is_best and all(path.is_file() and json.loads(path.read_text())["commit"] == BEST for path in kept)

        status = run.wait(is_kept, LIMIT_S, "the best model is kept")
        assert status["trackers"] == [status["trackers"][0] | {"name": "tensorboard", "problem": "", "dropped": 0}]
        coordinator.ask_to_end()
        assert coordinator.wait(LIMIT_S) == 0
        before = steps_told(board, "a")
        text = run.toml.read_text()
        assert 'tensorboard = ""' in text
        run.toml.write_text(text.replace('tensorboard = ""', f'tensorboard = "{board}"'))  # which is the same
        run.start_coordinator()
        last = run.status()["last_commit"]

        def has_gone_on(status: Status) -> bool:
            """A value comes after the commit that it is of: with one of its heartbeats a site says its newest ones."""
            of_a = [one for site in status["sites"] if site["name"] == "a" for one in site["logged"]]
            is_told = any(one["of_outer"] and one["step"] > before[-1] for one in of_a)
            return is_told and any(span["phases"] and span["commit"] > last for span in status["timeline"])

        status = run.wait(has_gone_on, LIMIT_S, "the run goes on, and sites say what syncs took")
        assert status["best"]["commit"] == BEST, "known to another start of the coordinator"
        (span, *_) = [span for span in status["timeline"] if span["phases"]]
        assert set(span["phases"]) == set(PHASES)
        assert span["phases"]["train"] > 0
        assert run.coordinator is not None
        run.coordinator.ask_to_end()
        assert run.coordinator.wait(LIMIT_S) == 0
        for node in run.nodes.values():
            node.kill()  # asked to end, without a coordinator, it would give its script 20 s
        after = steps_told(board, "a")
        assert before == after[: len(before)]
        assert after == sorted(set(after)), "each once"
        assert 4 * BEST in after
        assert after[-1] > before[-1]
        log = (run.home("a") / "node.log").read_text()
        assert re.search(rf"^\S+ \S+ I tracked a [1-9]\d* commit {BEST}\b", log, re.MULTILINE), log[-2000:]
