"""Curves for tools: each point once, each series by itself, whatever a tool does; and TensorBoard's format."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.tracking import feed as feeds
from atoll.coordinator.tracking import wandb
from atoll.coordinator.tracking.config import TrackConfig, validate
from atoll.coordinator.tracking.curves_told import Tracking
from atoll.coordinator.tracking.feed import Feed
from atoll.coordinator.tracking.opened import feeds as feeds_of
from atoll.coordinator.tracking.tensorboard import TensorBoard, crc32c, record, scalar
from atoll.coordinator.tracking.tracker import About, Point, Tracker, flat
from atoll.protocol.errors import ConfigError, HostError
from atoll.protocol.machine import REAL

LIMIT_S = 60.0
ABOUT = About(run_id="run-1", settings={"run_id": "run-1", "sync": {"every": 4}})


class Recorder:
    """What every tool is asked, in its order. It fails, or waits, as it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, float]] = []
        self.times: list[float] = []
        self.num_writes = 0
        self.closed = False
        self.fails = 0
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_asked = threading.Event()
        self.has_told = threading.Event()

    def write(self, points: Sequence[Point]) -> None:
        self.num_writes += 1
        self.is_asked.set()
        assert self.may_go.wait(LIMIT_S)
        if self.fails:
            self.fails -= 1
            raise OSError("its server is away")
        self.told += [(point.name, point.step, point.value) for point in points]
        self.times += [point.time_s for point in points]
        self.has_told.set()

    def close(self) -> None:
        self.closed = True


def a_feed(path: Path, tracker: Tracker | Exception, key: str = "run-1 here") -> Feed:
    def opened() -> Tracker:
        if isinstance(tracker, Exception):
            raise tracker
        return tracker

    found = Feed("recorder", opened, path / "recorder.told", key)
    found.start()
    return found


def points(*steps: int) -> list[Point]:
    return [Point("sites/a", "val_loss", step, 10 * step, 1000.0 + step, 1.0 / step) for step in steps]


def a_document(*steps: int, value: float = 1.0) -> dict[str, Any]:
    of_site = [(step, 10 * step, 1000.0 + step, value / step) for step in steps]
    sites = [{"site": "a", "name": "val_loss", "of_outer": outer, "points": of_site} for outer in (False, True)]
    return {"run": [(1, 10, None, 2.0)], "sites": sites}


def told_by(documents: Sequence[dict[str, Any]], feed: Feed) -> None:
    """As the coordinator looks at its curves, from its start to its end."""
    looks = iter(documents)

    async def curves() -> dict[str, Any]:
        return next(looks)

    async def main() -> None:
        tracking = Tracking([feed], curves)
        for _ in documents[:-1]:
            await tracking.tell()
        await tracking.close(asyncio.create_task(asyncio.sleep(LIMIT_S)))

    asyncio.run(main())


OF_SITE = ("sites/a/val_loss", "sites/a/val_loss of the outer parameters")


def test_each_point_is_told_once_and_a_run_that_went_back_is_told_anew(tmp_path: Path) -> None:
    recorder = Recorder()
    looks = [a_document(1, 2), a_document(1, 2, 4), a_document(1, 2, 4), a_document(1, 3, value=2.0)]
    told_by(looks, a_feed(tmp_path, recorder))
    expected = [("run/training loss", 1, 2.0)]
    for steps, value in (((1, 2), 1.0), ((4,), 1.0), ((1, 3), 2.0)):
        expected += [(name, step, value / step) for name in OF_SITE for step in steps]
    assert (recorder.told, recorder.closed) == (expected, True)


def test_another_start_of_the_coordinator_tells_what_came_since(tmp_path: Path) -> None:
    told_by([a_document(1, 2)], a_feed(tmp_path, Recorder()))
    later, elsewhere = Recorder(), Recorder()
    told_by([a_document(1, 2, 4)], a_feed(tmp_path, later))
    assert later.told == [(name, 4, 0.25) for name in OF_SITE]
    told_by([a_document(1)], a_feed(tmp_path, elsewhere, "run-1 elsewhere"))
    assert len(elsewhere.told) == 3, "what it has elsewhere says nothing of this place"


def test_another_start_tells_anew_what_a_run_that_went_back_has_trained_since(tmp_path: Path) -> None:
    told_by([a_document(1, 2, 4)], a_feed(tmp_path, Recorder()))
    went_back, later = a_document(1, 2), Recorder()
    for curve in went_back["sites"]:
        curve["points"] = [*curve["points"], (3, 30, 2000.0, 0.5)]
    told_by([went_back], a_feed(tmp_path, later))
    assert later.told == [(name, 3, 0.5) for name in OF_SITE], "the tool has steps up to 4 of what is void"


def test_nothing_is_told_until_something_has_a_time(tmp_path: Path) -> None:
    recorder = Recorder()
    told_by([{"run": [(1, 10, None, 2.0)], "sites": []}, a_document(1)], a_feed(tmp_path, recorder))
    assert recorder.told == [("run/training loss", 1, 2.0), *((name, 1, 1.0) for name in OF_SITE)]
    assert recorder.times == [1001.0] * 3


OF_AN_OLDER_VERSION = '{"key": "run-1 here", "told": {"run/training loss": 3}}'


@pytest.mark.parametrize("kept", ["", "[]", '{"key": "run-1 here", "told": 3}', "[" * 100_000, OF_AN_OLDER_VERSION])
def test_what_was_told_before_may_be_damaged(tmp_path: Path, kept: str) -> None:
    (tmp_path / "recorder.told").write_text(kept)
    recorder = Recorder()
    told_by([a_document(1)], a_feed(tmp_path, recorder))
    assert len(recorder.told) == 3


def test_a_slow_tool_keeps_nobody_waiting_and_what_it_has_no_room_for_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feeds, "MAX_WAITING", 3)
    recorder = Recorder()
    recorder.may_go.clear()
    feed = a_feed(tmp_path, recorder)
    feed.put(points(1))
    assert recorder.is_asked.wait(LIMIT_S)
    feed.put(points(2, 3))  # returns, although the tool does not
    feed.put(points(4, 5, 6))
    assert (feed.num_dropped, feed.document()["waiting"]) == (2, 3), "the oldest have gone"
    feed.close(limit_s=0.0)
    assert "2 were dropped, 3 still wait" in caplog.text
    recorder.may_go.set()
    feed.close(LIMIT_S)
    assert [step for _, step, _ in recorder.told] == [1, 4, 5, 6]
    assert feed.num_told + feed.num_dropped == 6


def test_a_tool_that_is_away_is_told_all_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feeds, "AGAIN_S", 0.0)
    recorder = Recorder()
    recorder.fails = 3
    caplog.set_level(logging.INFO)
    feed = a_feed(tmp_path, recorder)
    feed.put(points(1, 2))
    assert recorder.has_told.wait(LIMIT_S)
    feed.close(LIMIT_S)
    assert ([step for _, step, _ in recorder.told], feed.num_dropped, feed.problem) == ([1, 2], 0, "")
    assert [r.getMessage() for r in caplog.records].count(
        "recorder is not told of the run, which goes on: OSError: its server is away"
    ) == 1, "said once"


def test_a_library_that_is_missing_is_said_once_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
    config = TrackConfig(wandb="offline", mlflow="sqlite:///x.db", trackio="local")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    found = list(feeds_of(config, ABOUT, tmp_path, REAL))
    for feed in found:
        feed.start()
        feed.put(points(1))
        feed.put(points(2))
        feed.close(LIMIT_S)
        assert (feed.num_told, feed.num_dropped) == (0, 2)
    said = [record for record in caplog.records if record.levelno == logging.ERROR]
    for name, one in zip(("wandb", "mlflow", "trackio"), said, strict=True):
        assert f"{name} is not told of the run, which goes on: pip install 'atoll[{name}]'" in one.getMessage()


def test_settings_for_tools_without_tables_and_a_mode_that_is_none() -> None:
    assert flat(ABOUT.settings) == {"run_id": "run-1", "sync.every": 4}
    with pytest.raises(ConfigError, match=r'track\.wandb = "of"; write "online", "offline"'):
        validate(TrackConfig(wandb="of"))
    with pytest.raises(ConfigError, match="a name without a slash"):
        validate(TrackConfig(project="a/b"))
    for address in ("https://me:geheim@mlflow.example", "postgresql://me:geheim@db/mlflow", "http://[me:geheim@x"):
        with pytest.raises(ConfigError, match=r"track\.mlflow has a password in it") as refused:
            validate(TrackConfig(mlflow=address))
        assert "geheim" not in str(refused.value)
    for address in ("https://mlflow.example:5000", "sqlite:///mlflow.db", "databricks://me", "file:///a@b"):
        validate(TrackConfig(mlflow=address))


# --- the formats of tools, with libraries that keep what they are told


def test_wandb_has_a_row_for_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Library:
        class Settings:
            def __init__(self, **settings: object) -> None: ...

        @classmethod
        def init(cls, **said: Any) -> type[Library]:
            calls.append((said["mode"], said["project"], said["id"], said["resume"], said["config"]))
            return cls

        define_metric = staticmethod(lambda *name, step_metric="": calls.append((*name, step_metric)))
        log = staticmethod(calls.append)
        finish = staticmethod(lambda: calls.append(("finished",)))

    monkeypatch.setitem(sys.modules, "wandb", Library)
    tracker = wandb.WandbTracker("offline", "atoll", ABOUT, tmp_path)
    tracker.write([*points(1, 2), Point("run", "training loss", 2, 20, 1002.0, 3.0)])
    tracker.close()
    assert calls == [
        ("offline", "atoll", "run-1", "allow", ABOUT.settings),
        ("step", ""),
        ("*", "step"),
        {"step": 1, "tokens": 10, "sites/a/val_loss": 1.0},
        {"step": 2, "tokens": 20, "sites/a/val_loss": 0.5, "run/training loss": 3.0},
        ("finished",),
    ]


def test_names_of_curves_are_such_as_tools_take() -> None:
    """MLflow's metrics have letters, digits, spaces and _ - . / : alone."""
    taken = set("abcdefghijklmnopqrstuvwxyz0123456789_-./ :")
    for tag in ("training loss", "share of time training", "bytes sent since its node started", "a/b.c-d_e"):
        for name in (f"run/{tag}", f"sites/berlin-1/{tag} of the outer parameters"):
            assert set(name) <= taken


# --- TensorBoard


def records(data: bytes) -> Iterator[bytes]:
    """Checked as a reader does it."""
    while data:
        (length,) = struct.unpack_from("<Q", data)
        found = data[12 : 12 + length]
        assert record(found) == data[: 16 + length]
        yield found
        data = data[16 + length :]


def test_bytes_are_those_of_the_format() -> None:
    assert crc32c(b"123456789") == 0xE3069283, "the check value of CRC-32C"
    assert crc32c(bytes(32)) == 0x8A9136AA, "RFC 3720, B.4"
    assert scalar("t", 300, 1.5, 2.25).hex() == "09000000000000f83f10ac022a0a0a080a01741500001040"


def test_tensorboard_has_a_folder_for_each_series(tmp_path: Path) -> None:
    told_by([a_document(1, 2), a_document(1, 2, 4)], a_feed(tmp_path, TensorBoard(tmp_path, "events", lambda: 7.0)))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.0")) == [
        "run/events.0",
        "sites/a/events.0",
    ]
    begins, *of_site = records((tmp_path / "sites/a/events.0").read_bytes())
    assert begins.endswith(b"brain.Event:2")
    expected = {
        scalar(tag, step, 1000.0 + step, 1.0 / step)
        for step in (1, 2, 4)
        for tag in ("val_loss", "val_loss of the outer parameters")
    }
    assert (set(of_site), len(of_site)) == (expected, 6)
    _, of_run = records((tmp_path / "run/events.0").read_bytes())
    assert of_run == scalar("training loss", 1, 1001.0, 2.0), "its own time is not known: the oldest that is"
    assert json.loads((tmp_path / "recorder.told").read_bytes())["told"] == {name: [4, 1004.0] for name in OF_SITE} | {
        "run/training loss": [1, 1001.0]
    }


def test_what_cannot_be_written_is_said_and_nothing_stands_behind_a_record_that_was_cut_off(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "here", "events", lambda: 7.0)
    (tmp_path / "here").write_text("a file")
    with pytest.raises(HostError, match="here"):
        board.write([Point("run", "loss", 1, 10, 1.0, 2.0)])
    (tmp_path / "here").unlink()
    board.write([Point("run", "loss", 2, 10, 1.0, 2.0)])
    begins, written = records((tmp_path / "here/run/events.1").read_bytes())
    assert (begins.endswith(b"brain.Event:2"), written) == (True, scalar("loss", 2, 1.0, 2.0))
