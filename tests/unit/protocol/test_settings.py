"""Settings as they travel: equal on both sides, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.errors import InvalidMessage
from atoll.protocol.settings import (
    MAX_SETTINGS_CHARACTERS,
    MODELS,
    OuterSettings,
    RunSettings,
    SyncSettings,
    settings_from_json,
    settings_to_json,
    validate,
)

SETTINGS = RunSettings(run_id="r", data="ü", sync=SyncSettings(every=7), outer=OuterSettings(momentum=0.1))


def test_round_trip() -> None:
    assert settings_from_json(settings_to_json(SETTINGS)) == SETTINGS


@given(
    rate=st.floats(min_value=1e-30, max_value=100),
    momentum=st.floats(min_value=0, max_value=1, exclude_max=True),
    seed=st.integers(0, (1 << 63) - 1),
)
def test_floats_and_large_integers_keep_every_bit(rate: float, momentum: float, seed: int) -> None:
    settings = replace(SETTINGS, seed=seed, outer=OuterSettings(learning_rate=rate, momentum=momentum))
    assert settings_from_json(settings_to_json(settings)) == settings


def changed(**changes: Any) -> str:
    table = json.loads(settings_to_json(SETTINGS))
    for path, value in changes.items():
        *parents, key = path.split("__")
        target = table
        for parent in parents:
            target = target[parent]
        if value is None:
            del target[key]
        else:
            target[key] = value
    return json.dumps(table)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed(extra=1), 'unknown key "extra"'),
        (changed(sync__evry=1), 'unknown key "evry"; did you mean "every"'),
        (changed(sync__every=None), '"every" is missing'),
        (changed(sync__every="7"), "every must be an integer"),
        (changed(sync__every=True), "every must be an integer"),
        (changed(sync__every=1.5), "every must be an integer"),
        (changed(sync=3), "sync must be a table"),
        (changed(sync__codec="pickle"), "sync.codec"),
        (changed(sync__chunk_elements=1 << 40), "sync.chunk_elements"),
        (changed(outer__learning_rate=float("nan")), "NaN is not a finite number"),
        (changed(seed=10**400), "run.seed"),
        (changed(outer__momentum=10**400), "outer: momentum"),
        ('{"run_id": "a", "run_id": "b"}', "given twice"),
        ("[]", "not a JSON object"),
        ("", "Expecting value"),
        ("[" * 60_000, "settings"),
        (" " * (MAX_SETTINGS_CHARACTERS + 1), "at most"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidMessage, match=message):
        settings_from_json(text)


@pytest.mark.parametrize("name", MODELS)
def test_named_models_are_valid(name: str) -> None:
    validate(RunSettings(run_id="r", model=MODELS[name]))
