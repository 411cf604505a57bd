"""A run does not begin with a setting that has no effect beside the others."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.coordinator.core.persisted import RunRecord
from atoll.coordinator.store import run_of
from atoll.protocol.effects import check_effects
from atoll.protocol.errors import ConfigError
from atoll.protocol.outer import resolved
from atoll.protocol.outer_settings import AUTO, OuterSettings
from atoll.protocol.presets import PRESETS
from atoll.protocol.settings import RunSettings, settings_to_json, validate
from atoll.protocol.sync_settings import ROBUST, SyncSettings

GRADIENT: dict[str, Any] = {"strategy": "gradient", "every": 1}
MOMENTUM: dict[str, Any] = {"strategy": "momentum", "every": 1, "warmup_commits": 10}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "momentum": 0.9}
NONE: dict[str, Any] = {}
LONG = 100_000


def settings(sync: dict[str, Any], outer: dict[str, Any], steps: int = 300) -> RunSettings:
    parts: dict[str, Any] = {"sync": SyncSettings(**sync), "outer": OuterSettings(**outer)}
    return RunSettings(run_id="r", steps=steps, min_sites=3, quorum=3, max_sites=64, **parts)


@pytest.mark.parametrize(
    ("sync", "outer", "message"),
    [
        ({"warmup_codec": "fp32"}, NONE, 'sync.warmup_codec = "fp32" .*"diloco".*choose "momentum"'),
        ({**GRADIENT, "warmup_codec": "fp32"}, ADAMW, 'sync.warmup_codec = "fp32" .*"gradient"'),
        ({**MOMENTUM, "most_local_steps": 8}, ADAMW, "sync.most_local_steps = 8 without .*choose a local_doubling"),
        ({"robust": "off", "clip": 1.5}, NONE, 'sync.clip = 1.5 with sync.robust = "off".*choose "warn" or "clip"'),
        ({"robust": "gram", "clip": 1.5}, NONE, 'sync.clip = 1.5 with sync.robust = "gram"'),
        *(
            ({**GRADIENT}, {"optimizer": name, key: 0.5}, f'outer.{key} = 0.5: .*"{name}" has none.*choose "adamw"')
            for name in ("sgd", "nesterov", "signsgd")
            for key in ("beta2", "epsilon")
        ),
        (NONE, {"optimizer": AUTO, "beta2": 0.5}, 'beta2 = 0.5: outer.optimizer = "auto" chooses sgd, which has none'),
        (GRADIENT, {"optimizer": AUTO, "beta2": 0.5}, 'beta2 = 0.5: outer.optimizer = "auto" takes trainer.beta2'),
        (NONE, {"optimizer": AUTO, "momentum_warmup": 0.1}, "momentum_warmup = 0.1: .* chooses sgd, which has no"),
        (NONE, {"optimizer": AUTO, "momentum_decay": 0.1}, 'momentum_decay = 0.1: .*choose "nesterov"'),
        (GRADIENT, {"optimizer": "adamw"}, "outer.momentum = 0 with .*adamw.*choose 0.9"),
        (MOMENTUM, {"optimizer": "adamw"}, "outer.momentum = 0 with .*adamw.*choose 0.9"),
    ],
)
def test_what_has_no_effect_is_refused_where_a_run_begins_and_no_run_that_has_begun_with_it(
    sync: dict[str, Any], outer: dict[str, Any], message: str
) -> None:
    asked = settings(sync, outer)
    with pytest.raises(ConfigError, match=message):
        check_effects(asked)
    with pytest.raises(ConfigError, match=message):
        run_of("the store", None, asked, "")
    known = RunRecord(run_id="r", settings_json=settings_to_json(resolved(asked)), parent_json="")
    assert run_of("the store", known, asked, "")[1] == resolved(asked)


@pytest.mark.parametrize(
    ("sync", "outer", "steps"),
    [
        (NONE, NONE, 300),
        *(({"robust": mode, "clip": 1.5}, NONE, 300) for mode in ROBUST if mode not in {"off", "gram"}),
        *(({"robust": mode}, NONE, 300) for mode in ROBUST),
        ({**MOMENTUM, "warmup_codec": "fp32", "local_doubling": 5, "most_local_steps": 8}, ADAMW, 300),
        (GRADIENT, {**ADAMW, "beta2": 0.5, "epsilon": 1e-6}, 300),
        (GRADIENT, {"optimizer": AUTO, "epsilon": 1e-6}, 300),
        (GRADIENT, {"optimizer": AUTO}, 300),
        (NONE, {"optimizer": AUTO, "momentum_warmup": 0.1, "momentum_decay": 0.1}, LONG),
        (NONE, {"optimizer": AUTO, "warmup": 0.1, "decay": 0.1}, 300),
    ],
)
def test_what_has_one_is_taken(sync: dict[str, Any], outer: dict[str, Any], steps: int) -> None:
    check_effects(settings(sync, outer, steps))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_no_settings_without_effect(name: str) -> None:
    preset = PRESETS[name]
    asked = settings(dict(preset.sync), dict(preset.outer))
    validate(asked)
    check_effects(asked)
