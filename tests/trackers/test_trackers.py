"""What the libraries of trackers keep of a run, read with the library itself; no network. `make test-more`."""

from __future__ import annotations

import gc
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.tracking.config import TrackConfig
from atoll.coordinator.tracking.feed import Feed
from atoll.coordinator.tracking.opened import feeds
from atoll.coordinator.tracking.tracker import About, Point
from atoll.protocol.machine import REAL

pytestmark = [
    pytest.mark.more,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # of libraries of others
]

LIMIT_S = 120.0
BLOCK_BYTES, FULL, LAST = 1 << 15, 1, 4
ABOUT = About(run_id="run-1", settings={"run_id": "run-1", "steps": 300, "sync": {"every": 4}})


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("DO_NOT_TRACK", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield
    gc.collect()  # what they have left open is theirs, and is found in this test and not in a later one


def told(config: TrackConfig, folder: Path, *steps: int) -> Feed:
    """By a start of the coordinator."""
    (feed,) = feeds(config, ABOUT, folder, REAL)
    feed.start()
    feed.put([Point("run", "training loss", step, 10 * step, 1_000.0 + step, 2.0 / step) for step in steps])
    feed.put([Point("sites/a-1", "val/loss", step, 10 * step, 1_000.0 + step, 1.0 / step) for step in steps])
    feed.close(LIMIT_S)
    assert (feed.num_told, feed.num_dropped, feed.problem) == (2 * len(steps), 0, "")
    return feed


def test_mlflow_has_one_run_with_the_sites_as_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: make test-more")
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/m.db"
    told(TrackConfig(mlflow=uri, project="islands"), tmp_path / "t", 1, 2)
    told(TrackConfig(mlflow=uri, project="islands"), tmp_path / "t", 4)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("islands")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["sync.every"]) == ("run-1", "FINISHED", "4")
    for name, first in (("run/training loss", 2.0), ("sites/a-1/val/loss", 1.0)):
        history = client.get_metric_history(run.info.run_id, name)
        found = sorted((metric.step, metric.value, metric.timestamp) for metric in history)
        assert found == [(step, first / step, 1_000_000 + 1_000 * step) for step in (1, 2, 4)]


def test_trackio_has_one_run_with_the_sites_as_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="trackio is not installed: make test-more")
    from trackio.sqlite_storage import SQLiteStorage

    told(TrackConfig(trackio="local", project="islands"), tmp_path, 1, 2)
    told(TrackConfig(trackio="local", project="islands"), tmp_path, 4)
    (run,) = trackio.Api().runs("islands")
    assert run.name == "run-1"
    for name, first in (("run/training loss", 2.0), ("sites/a-1/val/loss", 1.0)):
        rows = [row for row in SQLiteStorage.get_logs("islands", run.name) if name in row]
        assert [(row["step"], row[name]) for row in rows] == [(step, first / step) for step in (1, 2, 4)]


def test_wandb_has_one_run_with_the_sites_as_series(tmp_path: Path) -> None:
    """In the files that `wandb sync` sends."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: make test-more")
    told(TrackConfig(wandb="offline", project="islands"), tmp_path, 1, 2)
    wandb.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-run-1.wandb")
    rows, runs = [], []
    for record in _records_of_wandb(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        elif record.WhichOneof("record_type") == "run":
            runs.append((record.run.project, record.run.run_id))
    assert set(runs) == {("islands", "run-1")}
    for step in (1, 2):
        found: dict[str, Any] = {}
        for row in rows:
            found |= row if row["step"] == step else {}
        assert (found["run/training loss"], found["sites/a-1/val/loss"], found["tokens"]) == (
            2.0 / step,
            1.0 / step,
            10 * step,
        )


def _records_of_wandb(path: Path) -> Iterator[Any]:
    """The file is a log as LevelDB writes it (doc/log_format.md there), after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := BLOCK_BYTES - at % BLOCK_BYTES) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined, unused-ignore]
            record.ParseFromString(whole)
            yield record
            whole = b""
