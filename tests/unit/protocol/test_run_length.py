"""A run that is too short for its settings is told so, in one line."""

from __future__ import annotations

import re
from typing import Any

import pytest

from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.presets import PRESETS
from atoll.protocol.run_length import too_short
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings


def of_preset(name: str, steps: int, **sync: Any) -> RunSettings:
    preset = PRESETS[name]
    parts: dict[str, Any] = {
        "sync": SyncSettings(**{**preset.sync, **sync}),
        "outer": OuterSettings(**preset.outer),
    }
    return RunSettings(run_id="r", preset=name, steps=steps, **parts)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (of_preset("diloco", 300), "with sync.every = 500 the run has a single sync"),
        (of_preset("diloco", 500), "with sync.every = 500 the run has a single sync"),
        (of_preset("diloco", 501), "the run has 2 syncs of each parameter, and preset diloco an outer momentum of 0.9"),
        (of_preset("diloco-int4", 4900), "the run has 49 syncs .*choose outer.optimizer = "),
        (of_preset("diloco-int4", 4901), ""),
        (of_preset("sparseloco", 300), ""),
        (of_preset("sparseloco", 15), "with sync.every = 15 the run has a single sync"),
        (of_preset("onebit-adam", 100), "the run has 100 commits, and sync.warmup_commits = 100: .*choose about 16"),
        (of_preset("onebit-adam", 101), ""),
        (of_preset("adamw", 1), ""),
        (of_preset("demo", 300), ""),
        (RunSettings(run_id="r"), ""),
        (RunSettings(run_id="r", outer=OuterSettings(momentum=0.9)), ""),
    ],
)
def test_what_does_not_fit_the_length_is_said_in_one_line(settings: RunSettings, text: str) -> None:
    found = too_short(settings)
    assert "\n" not in found
    assert re.search(text or "^$", found), found
