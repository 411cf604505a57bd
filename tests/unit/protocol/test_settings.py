"""Settings as they travel: equal on both sides, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.codecs.table import DENSE, SPARSE
from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.model_settings import MODELS, ModelSettings
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import (
    CAPABILITIES,
    MAX_SETTINGS_CHARACTERS,
    WITHDRAWN,
    RunSettings,
    read_settings,
    settings_from_json,
    settings_to_json,
    validate,
)
from atoll.protocol.sync_settings import SyncSettings

SETTINGS = RunSettings(run_id="r", data="ü", sync=SyncSettings(every=7), outer=OuterSettings(momentum=0.1))
ADAMW = OuterSettings(optimizer="adamw", momentum=0.9)
MOMENTUM: dict[str, Any] = {"strategy": "momentum", "every": 1, "warmup_commits": 3}


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


def test_a_newer_version_adds_a_setting_and_an_older_one_lacks_one() -> None:
    """Neither is anybody's business who can do what the run needs: an upgrade ends no run."""
    assert read_settings(changed(extra=1, sync__overlap={"tau": 2})) == (SETTINGS, ("extra", "sync.overlap"))
    defaults = {"needs": None, "overrun_steps": None, "sync__max_chunks": None, "model": None}
    assert read_settings(changed(**defaults)) == (SETTINGS, ())


def test_every_setting_but_the_runs_name_may_be_left_out_as_an_older_version_does() -> None:
    assert settings_from_json('{"run_id": "r"}') == RunSettings(run_id="r")


def test_what_a_run_needs_is_named_in_its_settings() -> None:
    for codec in SPARSE:
        for mean_over, extra in (("senders", []), ("all", ["mean over all"])):
            settings = RunSettings(run_id="r", sync=SyncSettings(codec=codec, mean_over=mean_over))
            needs = json.loads(settings_to_json(settings))["needs"]
            assert needs == [f"codec {codec}", "outer optimizer nesterov", *extra]
            assert CAPABILITIES.issuperset(needs)
    for codec in DENSE:
        for down in ("", codec, "fp16"):
            settings = RunSettings(run_id="r", sync=SyncSettings(codec=codec, down=down))
            needs = json.loads(settings_to_json(settings))["needs"]
            two = ["codec fp16"] if down == "fp16" != codec else []
            each = ["a codec for each direction"] if two else []
            assert needs == [f"codec {codec}", *two, "outer optimizer nesterov", *each]
            assert CAPABILITIES.issuperset(needs)


def test_an_older_version_that_would_not_train_on_or_mix_is_told_what_the_run_needs() -> None:
    for sync, names in (
        (SyncSettings(), []),
        (SyncSettings(overlap_steps=1), ["overlap"]),
        (SyncSettings(fragments=2), ["fragments"]),
        (SyncSettings(fragments=2, overlap_steps=10), ["overlap", "fragments"]),
        (SyncSettings(fragments=2, overlap_steps=11), ["overlap", "fragments", "syncs in flight"]),
        (SyncSettings(merge="mix", alpha=0.5), ["merge mix"]),
        (SyncSettings(overlap_steps=20, merge="mix", alpha=0.5), ["overlap", "merge mix"]),
        (SyncSettings(robust="off"), []),
        (SyncSettings(strategy="gradient", every=1), ["gradient exchange"]),
        (SyncSettings(robust="clip"), ["clipped averages"]),
        (SyncSettings(robust="trim", trim=2), ["trimmed averages without the highest norms"]),
        (SyncSettings(robust="gram"), ["averages by influence"]),
        (SyncSettings(error_feedback=1.0), ["error feedback"]),
        (SyncSettings(error_feedback_down=0.5), ["error feedback of averages"]),
        (SyncSettings(**MOMENTUM, warmup_codec="int8"), ["gradient exchange", "momentum exchange"]),
        (
            SyncSettings(**MOMENTUM, warmup_codec="int8", gradient_doubling=1),
            ["gradient exchange", "momentum exchange", "phases of momenta"],
        ),
        (
            SyncSettings(**MOMENTUM, warmup_codec="int8", local_doubling=1),
            ["gradient exchange", "momentum exchange", "phases of momenta"],
        ),
    ):
        needs = json.loads(settings_to_json(RunSettings(run_id="r", sync=sync)))["needs"]
        assert needs[2:] == names
        assert CAPABILITIES.issuperset(needs)


def test_an_older_version_that_would_compute_another_model_is_told_what_the_run_needs() -> None:
    for model, names in (
        (ModelSettings(dim=256), []),
        (ModelSettings(rope_base=5e5), ["rotary base"]),
        (ModelSettings(norm_eps=1e-6), ["norm epsilon"]),
        (ModelSettings(num_experts=4), ["experts"]),
    ):
        needs = json.loads(settings_to_json(RunSettings(run_id="r", model=model)))["needs"]
        assert needs[2:] == names
        assert CAPABILITIES.issuperset(needs)


@pytest.mark.parametrize(
    ("sync", "run", "message"),
    [
        ({"overlap_steps": 8}, {}, "sync.overlap_steps = 8 is more than sync.every = 7: .*choose at most 7"),
        ({"overlap_steps": 8, "fragments": 3}, {}, "overlap_steps = 8 is more than .*same parameters.*at most 7"),
        ({"fragments": 8}, {}, "sync.fragments = 8 is more than sync.every = 7: .*choose at most 7"),
        ({"fragments": 65, "every": 100}, {}, "sync.fragments = 65: must be"),
        ({"overlap_steps": -1}, {}, "sync.overlap_steps = -1: must be at least 0"),
        ({"merge": "add"}, {}, 'sync.merge = "add"'),
        ({"merge": "mix"}, {}, 'sync.merge = "mix" and sync.alpha = 0: .*for example 0.5, or merge "keep"'),
        ({"alpha": 0.5}, {}, 'sync.alpha = 0.5: sync.merge = "keep" has no weights; choose "mix" or alpha 0'),
        ({"merge": "mix", "alpha": 1.0}, {}, "sync.alpha = 1.0: must be at least 0 and less than 1"),
        ({"merge": "mix", "alpha": -0.5}, {}, "sync.alpha = -0.5: must be at least 0 and less than 1"),
        ({"robust": "on"}, {}, 'sync.robust = "on"'),
        ({"clip": 0.5}, {}, "sync.clip = 0.5: must be at least 1"),
        ({"trim": 2}, {}, 'sync.trim = 2 with sync.robust = "warn", which cuts nothing: choose "trim"'),
        (
            {"robust": "trim", "codec": "topk2"},
            {"max_sites": 9},
            '"trim" with codec topk2, .*choose "clip", or another',
        ),
        ({}, {"keep_models": 2}, "keep_models = 2 without run.save_every: .* say with save_every how often"),
        ({"robust": "trim"}, {"max_sites": 65}, "max_sites = 65 with .* chunks of 1048576 elements: .* at most 64"),
        ({"robust": "trim", "chunk_elements": 1 << 24}, {"max_sites": 5}, 'choose at most 4, or "clip"'),
        ({"robust": "gram"}, {"max_sites": 65}, 'max_sites = 65 with sync.robust = "gram" .* at most 64, or "clip"'),
        (
            {"robust": "gram"},
            {"max_sites": 64, "min_sites": 2, "quorum": 2},
            'quorum = 2 with sync.robust = "gram": of fewer than 3 contributions nobody .* choose 3 or more',
        ),
        (
            {"robust": "gram", "codec": "dct1"},
            {"max_sites": 9, "min_sites": 3, "quorum": 3},
            "with codec dct1, where each site averages by itself: choose",
        ),
        (
            {"error_feedback": 1.0, "codec": "fp32"},
            {},
            "sync.error_feedback = 1.0 with codec fp32, which loses nothing",
        ),
        ({"error_feedback_down": 1.5}, {}, "sync.error_feedback_down = 1.5: must be"),
        (
            {"error_feedback_down": 1.0, "down": "fp32"},
            {},
            "error_feedback_down = 1.0 with averages in fp32, which loses",
        ),
        (
            {"error_feedback_down": 1.0, "codec": "topk2"},
            {},
            "error_feedback_down = 1.0 with topk2, where each site averages",
        ),
        (
            {"error_feedback_down": 1.0, "log_commits": 3, "fragments": 3},
            {},
            r"error_feedback_down = 1.0 with sync.log_commits = 3: .*more than sync.fragments \(3\)",
        ),
        ({"strategy": "ring"}, {}, 'sync.strategy = "ring"'),
        ({"strategy": "gradient"}, {}, 'sync.every = 7 with sync.strategy = "gradient", .*: choose 1'),
        ({"strategy": "gradient", "every": 1, "overlap_steps": 1}, {}, "sync.overlap_steps = 1 with .*: choose 0"),
        ({"strategy": "gradient", "every": 1, "merge": "mix", "alpha": 0.5}, {}, '"mix" with .*: choose "keep"'),
        ({"warmup_commits": 3}, {}, 'sync.warmup_commits = 3 with sync.strategy = "diloco".*choose 0, or "momentum"'),
        ({"strategy": "momentum", "every": 1}, {"outer": ADAMW}, "the variance would stay 0; choose a sixth"),
        ({"local_doubling": 3}, {}, 'sync.local_doubling = 3 with .*"diloco", .*choose 0, or "momentum"'),
        ({"gradient_doubling": 1, "strategy": "gradient", "every": 1}, {"outer": ADAMW}, "gradient_doubling = 1 with"),
        ({**MOMENTUM, "most_local_steps": 33}, {"outer": ADAMW}, "sync.most_local_steps = 33"),
        ({**MOMENTUM, "most_local_steps": 1}, {"outer": ADAMW}, "sync.most_local_steps = 1"),
        ({**MOMENTUM, "codec": "topk2"}, {"outer": ADAMW}, 'codec topk2: .*choose "gradient", or another'),
        (MOMENTUM, {"outer": OuterSettings()}, 'outer.optimizer = "nesterov" with .*1-bit Adam.: choose "adamw"'),
        ({}, {"outer": ADAMW}, 'outer.optimizer = "adamw" is for gradients: choose sync.strategy = "gradient"'),
        (
            {"strategy": "gradient", "every": 1},
            {"outer": OuterSettings(learning_rate=0.5)},
            "outer.learning_rate = 0.5 .* the one that the training script gives",
        ),
        ({"strategy": "gradient", "every": 1}, {"outer": OuterSettings(decay=0.5)}, "or a schedule of the outer step"),
        ({"overlap_steps": 5}, {"overrun_steps": 4}, "run.overrun_steps = 4 is less than .*choose 0 or at least 5"),
    ],
)
def test_what_contradicts_is_refused_with_what_to_choose(
    sync: dict[str, Any], run: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(replace(SETTINGS, sync=SyncSettings(**{"every": 7} | sync), **run))


def test_momenta_need_the_codecs_of_both_phases() -> None:
    sync = SyncSettings(**{**MOMENTUM, "codec": "int4", "up": "sign1"})
    settings = RunSettings(run_id="r", sync=sync, outer=ADAMW)
    validate(settings)
    needs = json.loads(settings_to_json(settings))["needs"]
    codecs = ["codec sign1", "codec int4", "codec bf16"]
    extra = ["a codec for each direction", "gradient exchange", "momentum exchange"]
    assert needs == [*codecs, "outer optimizer adamw", *extra]
    assert CAPABILITIES.issuperset(needs)


def test_as_many_steps_as_there_are_between_two_syncs_may_overlap() -> None:
    for overrun_steps in (0, 7):
        validate(replace(SETTINGS, sync=SyncSettings(every=7, overlap_steps=7), overrun_steps=overrun_steps))


@pytest.mark.parametrize(
    ("every", "fragments", "overlap_steps", "most"),
    [
        *((20, 1, tau, 1) for tau in (0, 10, 20)),
        *((20, 4, tau, 1) for tau in (0, 4, 5)),
        *((20, 4, tau, -(-tau // 5)) for tau in (6, 10, 11, 16, 20)),
        *((7, 3, tau, most) for tau, most in ((2, 1), (3, 2), (4, 2), (5, 3), (7, 3))),  # not more than fragments
    ],
)
def test_as_many_syncs_are_in_flight_as_begin_within_the_overlap(
    every: int, fragments: int, overlap_steps: int, most: int
) -> None:
    sync = SyncSettings(every=every, fragments=fragments, overlap_steps=overlap_steps)
    validate(replace(SETTINGS, sync=sync))
    assert sync.most_in_flight == most


@pytest.mark.parametrize(
    ("fragments", "overlap_steps", "overrun_steps", "most"), [(1, 5, 0, 7), (3, 2, 0, 3), (3, 5, 0, 5), (3, 5, 6, 6)]
)
def test_without_the_coordinator_sites_train_as_far_as_with_it_or_a_window(
    fragments: int, overlap_steps: int, overrun_steps: int, most: int
) -> None:
    sync = SyncSettings(every=7, fragments=fragments, overlap_steps=overlap_steps)
    assert replace(SETTINGS, sync=sync, overrun_steps=overrun_steps).most_overrun_steps == most


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
        (changed(run_id=None), '"run_id" is missing'),
        (changed(needs=["codec int8", "codec int3"]), "^the run needs what this version cannot do: codec int3"),
        (changed(needs="codec int8"), "needs must be a list"),
        (changed(needs=["x"] * 300), "at most 256"),
        (changed(sync__every="7"), "every must be an integer"),
        (changed(sync__every=True), "every must be an integer"),
        (changed(sync__every=1.5), "every must be an integer"),
        (changed(sync=3), "sync must be a table"),
        (changed(sync__codec="pickle"), "sync.codec"),
        (changed(sync__chunk_elements=1 << 40), "sync.chunk_elements"),
        (changed(sync__chunk_elements=0), "sync.chunk_elements"),
        (changed(sync__up="int-4"), "sync.up"),
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


@pytest.mark.parametrize(("every", "fragments"), [(20, 1), (20, 3), (7, 7), (100, 8)])
def test_windows_of_a_cycle_have_h_steps(every: int, fragments: int) -> None:
    sync = SyncSettings(every=every, fragments=fragments)
    windows = [sync.window_steps(fragment, 0) for fragment in range(fragments)]
    assert sum(windows) == every
    assert min(windows) >= 1
    assert max(windows) - min(windows) <= 1
    assert sync.window_steps(fragments, 0) == max(windows) if fragments > 1 else windows == [every]


def test_a_setting_that_went_is_passed_over_in_a_stored_run() -> None:
    table = json.loads(settings_to_json(RunSettings(run_id="r")))
    table["sync"]["zstd_level"] = 3
    assert read_settings(json.dumps(table)) == (RunSettings(run_id="r"), ())
    fields = json.loads(settings_to_json(RunSettings(run_id="r")))
    assert not [key for key in WITHDRAWN if key.split(".")[1] in fields[key.split(".")[0]]]
