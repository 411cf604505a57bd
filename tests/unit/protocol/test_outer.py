"""The outer optimizer that a run begins with, and its rates at each commit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import TrainerSettings
from atoll.protocol.outer import chosen, in_words, num_syncs, outer_at, resolved
from atoll.protocol.outer_settings import AUTO, OuterSettings
from atoll.protocol.settings import RunSettings, validate
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.data_plane import commit_record

AUTOMATIC = OuterSettings(optimizer=AUTO)
SHORT = RunSettings(run_id="r", steps=980, sync=SyncSettings(every=20), outer=AUTOMATIC)
LONG = replace(SHORT, steps=981)


def test_a_short_run_takes_the_mean_and_a_long_one_momentum() -> None:
    assert (num_syncs(SHORT), num_syncs(LONG)) == (49, 50)
    outer, why = chosen(SHORT)
    assert (outer.optimizer, outer.learning_rate, outer.momentum) == ("sgd", 1.0, 0.0)
    assert why == "a plain mean, for 49 syncs of each parameter, fewer than 50"
    outer, why = chosen(LONG)
    assert (outer.optimizer, outer.learning_rate, outer.momentum) == ("nesterov", 0.7, 0.9)
    assert why == "Nesterov 0.7/0.9 (arXiv 2311.08105), for 50 syncs of each parameter"
    coded = replace(LONG.sync, codec="sign1")
    for sync in (replace(coded, error_feedback=1.0), replace(coded, error_feedback_down=1.0)):
        outer, why = chosen(replace(LONG, sync=sync))
        assert (outer.optimizer, "error feedback" in why) == ("sgd", True)


def test_a_length_in_tokens_counts_the_steps_of_the_built_in_trainer() -> None:
    trainer = TrainerSettings(batch_size=8, sequence=128)
    settings = replace(SHORT, steps=0, tokens=2 * 1024 * 981, min_sites=2, trainer=trainer)
    assert num_syncs(settings) == 50
    assert num_syncs(replace(settings, min_sites=4)) == 25


def test_it_is_chosen_once_and_kept() -> None:
    began = resolved(SHORT)
    assert began == replace(SHORT, outer=OuterSettings(optimizer="sgd"))
    assert resolved(began) == began, "what a file says counts"
    grown = replace(LONG, outer=replace(AUTOMATIC, warmup=0.5))
    kept = resolved(grown, began.outer)
    assert kept.outer == replace(began.outer, warmup=0.5)
    assert in_words(grown, kept.outer) == "sgd, learning rate 1, momentum 0, as the run began with it"
    assert in_words(SHORT, began.outer) == chosen(SHORT)[1]
    validate(SHORT)
    for outer in (replace(AUTOMATIC, learning_rate=0.7), replace(AUTOMATIC, momentum=0.5)):
        with pytest.raises(ConfigError, match="chooses them itself"):
            validate(replace(SHORT, outer=outer))
    for outer in (OuterSettings(optimizer="sgd", momentum_decay=0.1), OuterSettings(optimizer="sgd", momentum=0.1)):
        with pytest.raises(ConfigError, match="has none"):
            validate(replace(SHORT, outer=outer))


@pytest.mark.parametrize("settings", [SHORT, replace(LONG, sync=replace(LONG.sync, codec="int2", error_feedback=1.0))])
def test_a_mean_has_no_schedule_of_a_momentum(settings: RunSettings) -> None:
    asked = replace(settings, outer=replace(AUTOMATIC, decay=0.3, momentum_decay=0.2, momentum_warmup=0.1))
    began = resolved(asked)
    validate(began)
    assert began.outer == OuterSettings(optimizer="sgd", decay=0.3)
    assert resolved(asked, began.outer) == began
    assert in_words(asked, began.outer) == chosen(asked)[1]
    assert resolved(replace(asked, steps=4000, sync=LONG.sync)).outer.momentum_decay == 0.2


def at(outer: OuterSettings, progress: float, *, in_tokens: bool = False) -> tuple[float, float]:
    record = replace(commit_record(1), run_step=round(400 * progress), run_tokens=round(4000 * progress))
    steps, tokens = (0, 4000) if in_tokens else (400, 0)
    found = outer_at(replace(SHORT, outer=outer, steps=steps, tokens=tokens), record)
    return found.learning_rate, found.momentum


@pytest.mark.parametrize("in_tokens", [False, True])
def test_rates_follow_the_commit(in_tokens: bool) -> None:
    outer = OuterSettings(
        learning_rate=0.5, momentum=0.8, warmup=0.25, decay=0.5, momentum_warmup=0.5, momentum_decay=0.25
    )
    expected = {
        0.05: (0.1, 0.08),
        0.25: (0.5, 0.4),
        0.5: (0.5, 0.8),
        0.75: (0.5 * 0.55, 0.8),
        0.875: (0.5 * (0.1 + 0.9 * 0.25), 0.4),
        1.0: (0.05, 0.0),
        1.5: (0.05, 0.0),  # beyond its length a run does not go, but for the last window
    }
    for progress, rates in expected.items():
        assert at(outer, progress, in_tokens=in_tokens) == pytest.approx(rates)
    constant = OuterSettings(learning_rate=0.5, momentum=0.8)
    assert at(constant, 0.5) == (0.5, 0.8)
    assert at(replace(constant, warmup=1.0), 0.5) == (0.25, 0.8)
    assert at(replace(constant, momentum_decay=1.0), 0.25) == pytest.approx((0.5, 0.6))
