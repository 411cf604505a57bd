"""run.toml and flags: what is read, what is refused, and in which words."""

from __future__ import annotations

import argparse
import dataclasses
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from atoll.cli import init
from atoll.cli.config import PARTS, load_run, read_tables, run_settings, sections
from atoll.cli.flags import field_docs
from atoll.cli.template import render, toml_value
from atoll.coordinator.config import CoordinatorConfig
from atoll.protocol.errors import ConfigError, HostError
from atoll.protocol.model_settings import MODELS
from atoll.protocol.outer_settings import AUTO, OuterSettings
from atoll.protocol.presets import PRESETS
from atoll.protocol.settings import RunSettings

MINIMAL = '[run]\nrun_id = "r"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_minimal_file_gives_the_defaults(tmp_path: Path) -> None:
    settings, coordinator = load_run(write(tmp_path, MINIMAL), store_path=tmp_path / "s.db")
    assert settings == RunSettings(run_id="r", outer=OuterSettings(optimizer=AUTO))
    assert coordinator == CoordinatorConfig(store_path=tmp_path / "s.db")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "[sync]\nevry = 3\n", r'\[sync\]: unknown key "evry"; did you mean "every"\?'),
        (MINIMAL + "codec = 'int8'\n", r'\[run\]: unknown key "codec"; it belongs into \[sync\]'),
        (MINIMAL + "[synk]\n", r'unknown section "synk"; did you mean "sync"\?'),
        ("steps = 3\n", 'unknown key outside of a section "steps"'),
        ("run = 3\n", "run must be a section"),
        (MINIMAL + "steps = '3'\n", r"\[run\]: steps must be an integer, not a string"),
        (MINIMAL + "steps = true\n", r"\[run\]: steps must be an integer, not true or false"),
        (MINIMAL + "[outer]\nmomentum = nan\n", "momentum must be a finite number"),
        (MINIMAL + "tokens = 5\n", "run.steps = 300 and run.tokens = 5: set one of them"),
        (MINIMAL + "quorum = 2\n", "run.quorum = 2 is more than run.min_sites = 1"),
        (MINIMAL + "time_limits = 'wam'\n", "time_limits = 'wam': choose one of"),
        (MINIMAL + "[sync]\nevery = 0\n", "sync.every = 0: must be at least 1"),
        (MINIMAL + "[sync]\ncodec = 'int-8'\n", r'sync.codec = "int-8"; did you mean "int8"\?'),
        (MINIMAL + "[outer]\noptimizer = 'nestrov'\n", r'did you mean "nesterov"\?'),
        (MINIMAL + '[outer]\noptimizer = "sgd"\nmomentum = 0.5\n', 'outer.optimizer = "sgd" has none'),
        (MINIMAL + "[outer]\nmomentum = 1.0\n", "outer.momentum = 1.0: must be at least 0 and less than 1"),
        (MINIMAL + "[model]\ndim = 100\nnum_heads = 3\n", "each head needs the same, even width"),
        (MINIMAL + "[trainer]\nsequence = 129\n", "longer than model.max_sequence"),
        ("[run]\nsteps = 3\n", "run_id is missing; `atoll init` writes a new one"),
        ("[run]\nrun_id = '../x'\n", r'run.run_id = "../x": 1 to 64 letters'),
        ("[run\n", "not valid TOML"),
        (MINIMAL + "[coordinator]\nlisten = 7700\n", r"\[coordinator\]: listen must be a string, not an integer"),
        (MINIMAL + "[coordinator]\nstore_path = 'x'\n", r'\[coordinator\]: unknown key "store_path"'),
    ],
)
def test_a_wrong_file_is_refused_in_words(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_run(path, store_path=tmp_path / "s.db")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value).strip()


def test_no_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file; `atoll init .*` writes one"):
        load_run(tmp_path / "run.toml", store_path=tmp_path / "s.db")


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "steps = 7\n[coordinator]\nlisten = '127.0.0.1:1'\nhttp_listen = ''\n")
    settings, coordinator = load_run(path, coordinator_flags={"listen": "127.0.0.1:3"}, store_path=tmp_path / "s")
    assert settings.steps == 7
    assert coordinator == CoordinatorConfig(store_path=tmp_path / "s", listen="127.0.0.1:3", http_listen="")


def test_every_setting_is_in_a_section() -> None:
    kinds = {field.name for field in dataclasses.fields(RunSettings)}
    assert kinds == set(sections()["run"]) | set(PARTS)


def parse_init(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    init.add_arguments(parser)
    return parser.parse_args(words)


def test_what_init_writes_are_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert init.run(parse_init(str(path), "--name", "books")) == 0
    settings, coordinator = load_run(path, store_path=tmp_path / "s.db")
    expected = RunSettings(run_id=settings.run_id, outer=OuterSettings(optimizer=AUTO))
    trainer = dataclasses.replace(expected.trainer, evaluate_every=200 // expected.sync.every)
    synced = dataclasses.replace(expected.sync, fsync=True)
    assert settings == dataclasses.replace(expected, sync=synced, trainer=trainer), "a held-out curve, too"
    assert settings.run_id.startswith("books-")
    assert coordinator == CoordinatorConfig(store_path=tmp_path / "s.db")
    document = tomllib.loads(path.read_text())
    assert {section: set(keys) for section, keys in sections().items()} == {k: set(v) for k, v in document.items()}


@pytest.mark.parametrize("name", PRESETS)
def test_init_takes_a_preset_and_leaves_its_settings_to_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.toml"
    assert init.run(parse_init(str(path), "--preset", name)) == 0
    settings, _ = load_run(path, store_path=tmp_path / "s.db")
    is_synced = "strategy" not in PRESETS[name].sync  # at every step its cost is a larger part of a sync
    synced = {"fsync": True} if is_synced else {}
    trainer = {"evaluate_every": settings.trainer.evaluate_every}
    expected = run_settings(
        {"run": {"run_id": settings.run_id, "preset": name}, "sync": synced, "trainer": trainer}, "here"
    )
    assert settings == expected
    window = settings.sync.window_steps(0, 0)
    assert trainer["evaluate_every"] == 1 or 100 < trainer["evaluate_every"] * window <= 200, "steps in between"
    text = path.read_text()
    assert f"\n# every = {PRESETS[name].sync['every']}  # by the preset\n" in text
    for other in PRESETS:  # another name is another preset
        path.write_text(text.replace(f'preset = "{name}"', f'preset = "{other}"'))
        wanted = run_settings(
            {"run": {"run_id": settings.run_id, "preset": other}, "sync": synced, "trainer": trainer}, "here"
        )
        assert load_run(path, store_path=tmp_path / "s.db")[0] == wanted
    assert init.run(parse_init(str(path), "--force", "--preset", name, "--codec", "int8")) == 0
    assert load_run(path, store_path=tmp_path / "s.db")[0].sync.codec == "int8", "a flag counts"


def test_init_refuses_a_preset_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='--preset = "sparselocos"; did you mean "sparseloco"'):
        init.run(parse_init(str(tmp_path / "run.toml"), "--preset", "sparselocos"))


def test_init_says_what_to_choose_where_the_preset_contradicts_an_option(tmp_path: Path) -> None:
    """The command has no option for the preset's value."""
    for words, said in (
        (
            ("--preset", "streaming", "--sync-every", "4"),
            r"sync.overlap_steps = 5 is more than sync.every = 4: .* "
            r"\(sync.overlap_steps = 5 is of preset streaming: choose --sync-every 5 or more, or another preset\)$",
        ),
        (
            ("--preset", "sparseloco", "--codec", "fp32"),
            r"\(sync.error_feedback = 0.95 is of preset sparseloco: choose another --codec, or another preset\)$",
        ),
        (
            ("--preset", "adamw", "--sync-every", "2"),
            r'sync.every = 2 .* \(sync.strategy = "gradient" is of preset adamw: choose another --sync-every, or '
            r"another preset\)$",
        ),
        (("--preset", "streaming", "--sync-every", "4", "--steps", "0"), "set one of them to the length of the run"),
    ):
        path = tmp_path / "run.toml"
        with pytest.raises(ConfigError, match=said):
            init.run(parse_init(str(path), *words))
        assert not path.exists()
    assert init.run(parse_init(str(path), "--preset", "streaming", "--sync-every", "5")) == 0


def test_init_says_above_how_many_sites_bundles_are_no_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, is_said in ((46, False), (47, True)):
        words = ("--force", "--preset", "sparseloco", "--min-sites", str(number))
        assert init.run(parse_init(str(tmp_path / "run.toml"), *words)) == 0
        assert ("Above 46 sites take codec int4" in capsys.readouterr().out) == is_said


def test_init_says_that_a_run_is_too_short_for_its_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps, is_said in (("500", True), ("50000", False)):
        words = ("--force", "--preset", "diloco", "--steps", steps)
        assert init.run(parse_init(str(tmp_path / "run.toml"), *words)) == 0
        assert ("the run has a single sync" in capsys.readouterr().out) == is_said


def test_init_takes_flags_and_a_folder(tmp_path: Path) -> None:
    words = ["--listen", "0.0.0.0:7700", "--data", "local", "--model", "small", "--tokens", "1000", "--sync-every", "9"]
    assert init.run(parse_init(str(tmp_path), *words, "--codec", "bf16", "--min-sites", "2")) == 0
    settings, coordinator = load_run(tmp_path / "run.toml", store_path=tmp_path / "s.db")
    assert coordinator.listen == "0.0.0.0:7700"
    assert settings.model == MODELS["small"]
    assert (settings.steps, settings.tokens) == (0, 1000)
    assert (settings.sync.every, settings.sync.codec) == (9, "bf16")
    assert (settings.data, settings.min_sites) == ("local", 2)


def test_init_does_not_overwrite(tmp_path: Path) -> None:
    path = write(tmp_path, "mine")
    with pytest.raises(ConfigError, match="is there already; --force replaces it"):
        init.run(parse_init(str(path)))
    assert path.read_text() == "mine"
    assert init.run(parse_init(str(path), "--force")) == 0


def test_init_does_not_overwrite_what_another_one_makes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the file only as it makes its own."""
    path = write(tmp_path, "of the other one")
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(ConfigError, match="is there already; --force replaces it"):
        init.run(parse_init(str(path)))
    assert path.read_text() == "of the other one"


def test_init_leaves_nothing_on_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    """A file larger than this process may write stands for one that finds the disk full half-way."""

    def init_here(*words: str, most_bytes: int) -> tuple[int, str]:
        limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes}, {most_bytes}))"
        code = f"{limited}; import sys; from atoll.cli.main import main; sys.exit(main(['init', *{words!r}]))"
        command = [sys.executable, "-B", "-c", code]
        ended = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
        return ended.returncode, ended.stderr

    code, error = init_here(most_bytes=1024)
    assert (code, error) == (HostError.exit_code, "atoll init: run.toml: File too large\n")
    assert list(tmp_path.iterdir()) == []
    assert init_here(most_bytes=1 << 20) == (0, "")
    (tmp_path / "run.toml").write_text("mine")
    assert init_here("--force", most_bytes=1024)[0] == HostError.exit_code
    assert (tmp_path / "run.toml").read_text() == "mine", "what was to be replaced"


def test_init_writes_a_file_that_others_may_read(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        assert init.run(parse_init(str(tmp_path))) == 0
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "run.toml").stat().st_mode) == 0o644


def test_init_replaces_what_a_link_leads_to_and_no_device(tmp_path: Path) -> None:
    real, link = write(tmp_path, "mine"), tmp_path / "link.toml"
    link.symlink_to(real)
    assert init.run(parse_init(str(link), "--force")) == 0
    assert link.is_symlink()
    assert "run_id" in real.read_text()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="pipe is no file"):
        init.run(parse_init(str(pipe), "--force"))
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_init_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no folder {tmp_path / 'none'}"):
        init.run(parse_init(str(tmp_path / "none" / "run.toml")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "tinny"], 'did you mean "tiny"'),
        (["--codec", "int9"], 'did you mean "int8"'),
        (["--steps", "0"], "set one of them"),
        (["--listen", "7700"], "HOST:PORT"),
    ],
)
def test_init_refuses_what_the_coordinator_would(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        init.run(parse_init(str(tmp_path), *words))
    assert not (tmp_path / "run.toml").exists()


def test_two_runs_of_one_folder_have_ids_of_their_own(tmp_path: Path) -> None:
    ids = {init.new_run_id("päth with/odd$names") for _ in range(8)}
    assert len(ids) == 8
    for run_id in ids:
        run_settings({"run": {"run_id": run_id}}, "here")


@pytest.mark.parametrize("value", ["", 'a "quoted" \\ back', "tab\tnew\nline", "ü \U0001f30d", "\x7f\x01", 1e-8, 1e22])
def test_values_survive_toml(value: str | float) -> None:
    assert tomllib.loads(f"key = {toml_value(value)}")["key"] == value


def test_comments_are_the_docstrings() -> None:
    docs = field_docs(RunSettings)
    assert docs["quorum"].startswith("A sync commits with at least")
    assert f"# {docs['quorum']}\nquorum = 1\n" in render({"run": {"run_id": "r"}})


def test_a_file_over_the_bound_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, "#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match=r"this is not a run\.toml"):
        read_tables(path)


def test_a_key_that_went_is_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that an older version wrote starts the run again."""
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL + "[sync]\nzstd_level = 3\nevery = 9\n")
    settings, _ = load_run(path, store_path=tmp_path / "run.db")
    assert settings.sync.every == 9
    assert "run.toml [sync]: zstd_level has no effect any more: zstd is a property of the codec" in caplog.text
