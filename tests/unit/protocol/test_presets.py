"""Presets: each makes a run, and gives way to what a run.toml says itself."""

from __future__ import annotations

import pytest

from atoll.cli.config import Tables, run_settings
from atoll.protocol.errors import ConfigError
from atoll.protocol.outer_settings import AUTO, OuterSettings
from atoll.protocol.presets import PRESETS, against_preset, with_preset
from atoll.protocol.sync_settings import SyncSettings


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_makes_a_run(name: str) -> None:
    preset = PRESETS[name]
    settings = run_settings({"run": {"run_id": "r", "preset": name}}, "here")
    assert settings.preset == name
    assert settings.sync == SyncSettings(**preset.sync) != SyncSettings()
    assert settings.outer == OuterSettings(**preset.outer)
    assert "arXiv" in preset.source
    assert preset.what


def test_what_a_file_says_counts() -> None:
    tables: Tables = {"run": {"run_id": "r", "preset": "sparseloco"}, "sync": {"every": 30, "codec": "bf16"}}
    settings = run_settings(tables, "here")
    assert (settings.sync.every, settings.sync.codec, settings.sync.error_feedback) == (30, "bf16", 0.95)
    assert tables["sync"] == {"every": 30, "codec": "bf16"}, "and stays as it is"
    outer = {"optimizer": "nesterov", "momentum": 0.5}
    assert run_settings({**tables, "outer": outer}, "here").outer == OuterSettings(momentum=0.5)
    assert with_preset("", {"run": {"steps": 3}}) == {"run": {"steps": 3}}


def test_a_file_that_says_nothing_of_the_outer_step_leaves_it_to_be_chosen() -> None:
    run: Tables = {"run": {"run_id": "r"}}
    assert run_settings(run, "here").outer == OuterSettings(optimizer=AUTO)
    assert run_settings({**run, "outer": {"warmup": 0.1}}, "here").outer == OuterSettings(optimizer=AUTO, warmup=0.1)
    for outer in ({"learning_rate": 0.5}, {"momentum": 0.2}, {"optimizer": "nesterov"}):
        assert run_settings({**run, "outer": outer}, "here").outer == OuterSettings(**outer)


def test_another_deciding_setting_takes_the_presets_others_with_it() -> None:
    run = {"run_id": "r", "preset": "diloco"}
    outer = run_settings({"run": run, "outer": {"optimizer": "sgd"}}, "here").outer
    assert outer == OuterSettings(optimizer="sgd")
    assert run_settings({"run": run, "outer": {"optimizer": AUTO}}, "here").outer == OuterSettings(optimizer=AUTO)
    sync = run_settings({"run": {**run, "preset": "streaming"}, "sync": {"merge": "keep"}}, "here").sync
    assert (sync.merge, sync.alpha, sync.fragments) == ("keep", 0.0, 4)


def test_what_counts_against_a_preset_is_said(caplog: pytest.LogCaptureFixture) -> None:
    tables: Tables = {"run": {"run_id": "r", "preset": "sparseloco"}, "sync": {"every": 15, "codec": "int8"}}
    assert against_preset("sparseloco", tables) == [("sync.codec", "int8", "topk2")]
    run_settings(tables, "run.toml")
    assert "run.toml: sync.codec = int8 counts; preset sparseloco has topk2" in caplog.text


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match='did you mean "sparseloco"'):
        run_settings({"run": {"run_id": "r", "preset": "sparsloco"}}, "here")


def test_a_refusal_names_the_preset_that_a_value_is_of() -> None:
    tables: Tables = {"run": {"run_id": "r", "preset": "streaming"}, "sync": {"every": 4}}
    with pytest.raises(
        ConfigError,
        match=r"\(sync.overlap_steps = 5 is of preset streaming: choose sync.every 5 or more, or write another "
        r"sync.overlap_steps\)$",
    ):
        run_settings(tables, "run.toml")
    with pytest.raises(ConfigError, match=r"choose at most 4$"):
        run_settings({**tables, "sync": {"every": 4, "overlap_steps": 5}}, "run.toml")
