"""The demo's figures, its verdict, and the recorded baselines beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.demo import DemoOptions
from atoll.cli.demo_report import Baselines, Report, SiteReport, as_document, as_text, data_parallel_bytes, failures
from atoll.cli.demo_script import losses_of, script_command
from atoll.cli.demo_setup import demo_settings, layouts, node_command, site_names
from atoll.cli.recorded import default_file, find_recorded, read_entries
from atoll.cli.words import count, duration, share
from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import MODELS
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.text import byte_count
from benchmarks.record import add_entry

HASH = "ab" * 32


def site(name: str) -> SiteReport:
    return SiteReport(
        name=name, state_hash=HASH, commit=15, sent_bytes=20 << 20, received_bytes=21 << 20, utilization=0.91
    )


GOOD = Report(
    run_id="demo-1",
    num_parameters=1_000_000,
    steps=300,
    sync_every=20,
    longest_window=20,
    codec="int8",
    expected_commits=15,
    commits=15,
    bits_per_byte_before=8.7,
    bits_per_byte_after=2.4,
    baselines=Baselines(alone=2.66, data_parallel=2.12, source="recorded: Python 3.11.9, some machine"),
    sites=(site("amsterdam"), site("berlin"), site("cairo")),
    state_hash=HASH,
    model_folder="atoll-demo/model",
    elapsed_s=83.0,
)


def test_a_good_run_has_no_failures() -> None:
    assert failures(GOOD) == []
    assert as_document(GOOD)["ok"] is True


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"commits": 14}, "14 commits happened, 15 were expected"),
        ({"sites": (site("a"), replace(site("b"), commit=14))}, "b saved the model of commit 14, the run ended at 15"),
        ({"sites": (site("a"), replace(site("b"), commit=None, state_hash=""))}, "b saved no model"),
        ({"sites": (site("a"), replace(site("b"), state_hash="cd" * 32))}, "b saved another state than the run's"),
        (
            {"sites": (site("a"), replace(site("b"), num_crashes=3))},
            "the workers of b crashed or hung 3 times; logs/b.log",
        ),
        ({"state_hash": ""}, "another state than the run's, which is unknown"),
        ({"bits_per_byte_after": None}, "could not be loaded"),
        ({"bits_per_byte_after": 8.7}, "did not fall: 8.700 before, 8.700 after"),
        ({"bits_per_byte_after": float("nan")}, "did not fall"),
        ({"returned": False, "killed": "killed at commit 5"}, "was not back before the end"),
    ],
)
def test_each_broken_promise_fails_with_its_reason(changes: dict[str, object], reason: str) -> None:
    report = replace(GOOD, **changes)  # type: ignore[arg-type]
    assert any(reason in text for text in failures(report))
    assert "FAILED:" in as_text(report)
    assert reason in as_text(report)
    assert as_document(report)["ok"] is False


def test_what_data_parallel_would_have_sent() -> None:
    # A ring all-reduce of n sites sends 2 (n - 1) / n of the gradients, at each step.
    assert data_parallel_bytes(3, 900, 10, 4) == 2 * 2 * 300 * 4 * 10
    assert data_parallel_bytes(1, 900, 10, 4) == 0


def test_the_text_says_everything_that_was_promised() -> None:
    text = as_text(GOOD)
    for part in ("8.700", "2.400", "2.660", "2.120", "recorded: Python 3.11.9", "15 of 15", "91 %", "20.0 MiB"):
        assert part in text
    assert text.count(HASH) == 3
    assert "1.5 GiB in fp32, 76 times as much" in text
    assert "762.9 MiB in bf16, 38 times as much" in text
    assert 'atoll sample atoll-demo/model "def "' in text


def test_windows_that_grow_are_said() -> None:
    assert "a sync every 20 as int8" in as_text(GOOD)
    assert "a sync every 1 to 4 as int8" in as_text(replace(GOOD, sync_every=1, longest_window=4))


def test_without_baselines_the_text_says_so() -> None:
    assert "no recorded baselines for these settings" in as_text(replace(GOOD, baselines=None))


def test_one_site_exchanges_nothing() -> None:
    assert "exchanges nothing" in as_text(replace(GOOD, sites=(site("amsterdam"),)))


def test_the_document_is_json() -> None:
    document = json.loads(json.dumps(as_document(GOOD)))
    assert document["data_parallel_sent_bytes"] == {"fp32": 1_600_000_000, "bf16": 800_000_000}
    assert [s["state_hash"] for s in document["sites"]] == [HASH] * 3


SETTINGS = RunSettings(run_id="demo-1")
FIGURES = Baselines(alone=2.6, data_parallel=2.1, source="recorded: Python 3.11.9, m")


def test_recorded_figures_are_for_equal_settings_only(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    assert find_recorded(SETTINGS, 3, path) is None
    add_entry(path, SETTINGS, 3, FIGURES)
    assert find_recorded(replace(SETTINGS, run_id="demo-2"), 3, path) == FIGURES
    # How the sites meet does not change what the baselines reach.
    assert find_recorded(replace(SETTINGS, sync=SyncSettings(every=50, codec="fp32")), 3, path) == FIGURES
    for other in (
        replace(SETTINGS, steps=301),
        replace(SETTINGS, seed=2),
        replace(SETTINGS, data="demo"),
        replace(SETTINGS, model=MODELS["nano"]),
    ):
        assert find_recorded(other, 3, path) is None
    assert find_recorded(SETTINGS, 2, path) is None


def test_recording_again_replaces(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    add_entry(path, SETTINGS, 3, FIGURES)
    add_entry(path, SETTINGS, 2, FIGURES)
    add_entry(path, SETTINGS, 3, replace(FIGURES, alone=1.0))
    found = find_recorded(SETTINGS, 3, path)
    assert found is not None
    assert found.alone == 1.0
    assert len(read_entries(path)) == 2


def test_damaged_records_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    path.write_text('{"baselines": [{"figures": {"alone": 1}}]}')
    with pytest.raises(ConfigError, match="is damaged"):
        find_recorded(SETTINGS, 3, path)


def test_what_is_recorded_in_the_repository_can_be_read() -> None:
    if default_file().exists():
        assert read_entries(default_file())


def test_words() -> None:
    assert [byte_count(n) for n in (0, 1023, 1024, 3 << 20, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 MiB",
        "5.0 TiB",
    ]
    assert (duration(9.6), duration(200)) == ("10 s", "3 min 20 s")
    assert (count(999), count(951_424), count(1_050_000), count(2_000_000_000)) == (
        "999", "951424", "1.05 million", "2.00 billion",
    )  # fmt: skip
    assert (share(None), share(0.987)) == ("-", "99 %")


OF_A_SCRIPT = replace(GOOD, bits_per_byte_before=None, bits_per_byte_after=None, baselines=None)


def test_of_a_script_the_losses_are_shown_and_judged() -> None:
    good = replace(OF_A_SCRIPT, script=losses_of([None, 4.5, 3.0], [4.4, 3.25], 12.0))
    assert failures(good) == []
    text = as_text(good)
    for line in ("first window", "4.500", "last window, 3 sites", "3.000", "one site alone, same steps, 12 s", "3.250"):
        assert line in text
    assert "bits per byte" not in text
    assert " sample " not in text, "which has the built-in trainer's models alone"
    assert failures(replace(good, script=losses_of([3.0, 3.0]))) == [
        "the training loss did not fall: 3.000 in the first window, 3.000 in the last"
    ]
    nothing = replace(good, script=losses_of([None, None]))
    assert failures(nothing) == []
    assert "the script gives site.step no loss=" in as_text(nothing)


def test_a_script_and_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "my train.py"
    script.touch()
    assert script_command(f"'{script}' --lr 3e-4 --name 'a b'") == [str(script), "--lr", "3e-4", "--name", "a b"]
    for text in ("", "nowhere.py", f"'{script} --lr 1", str(tmp_path)):
        with pytest.raises(ConfigError, match="--script"):
            script_command(text)


@pytest.mark.parametrize("options", [{"script": "train.py", "data": (Path("/"),)}, {"compare": True}])
def test_options_that_a_script_does_not_go_with(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--script"):
        demo_settings(DemoOptions(**options))


def test_a_site_of_the_demo_has_as_many_ranks_as_its_layout_names(tmp_path: Path) -> None:
    assert [str(layout) for layout in layouts(DemoOptions(num_sites=2, layouts="1,fsdp=2+ep=-1"))] == [
        "",
        "dp_shard=2,ep=2",
    ]
    options = DemoOptions(num_sites=3, layouts="1,fsdp=2,tp=2+pp=2")
    told = [" ".join(node_command(options, tmp_path, name)) for name in site_names(3)]
    assert "--parallel" not in told[0]
    assert "--parallel dp_shard=2 " in told[1]
    assert "--parallel tp=2,pp=2 " in told[2]
    one, other = layouts(DemoOptions(num_sites=2, layouts="1,precision=bf16"))
    assert (one.precision, other.precision, other.num_ranks(1)) == ("fp32", "bf16", 1)
    for text, said in (
        ("1,tp=-1+pp=2", r"--layouts tp=-1\+pp=2: .* give each size a number"),
        ("1,tp=2+fsdp", r'--layouts tp=2\+fsdp: .* say "dp_shard=..." with a value'),
        ("1,", "--layouts: a site without a layout; 1 is one rank"),
        ("1,1,1", "--layouts 1,1,1 names 3 of 2 sites; say --sites 3"),
    ):
        with pytest.raises(ConfigError, match=said):
            layouts(DemoOptions(num_sites=2, layouts=text))


def test_the_table_says_in_how_many_commits_a_site_is_and_that_its_workers_crashed() -> None:
    sites = (site("amsterdam"), replace(site("berlin"), num_commits=2, num_crashes=3))
    lines = as_text(replace(GOOD, sites=sites)).splitlines()
    (row,) = [line for line in lines if line.startswith("berlin")]
    assert row.split()[-5:] == ["2", HASH, "(workers", "crashed:", "3)"]


def test_the_baselines_of_the_repository_are_those_of_the_demo_as_it_is() -> None:
    """A setting that is new is in no record: where it is at its default, the record has it by hand."""
    found = find_recorded(RunSettings(run_id="demo", steps=300), 3, default_file())
    assert found is not None
    assert found.data_parallel < found.alone
