"""`atoll coordinator --resume`: a new run with the saved one as its parent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.coordinator import _restore, prepare
from atoll.cli.main import make_parser
from atoll.coordinator.config import CoordinatorConfig, Restore
from atoll.node.dataplane.saved_manifest import MANIFEST_NAME, SavedManifest, to_json
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings, settings_to_json


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    manifest = SavedManifest(
        run_id="first",
        commit=15,
        run_step=300,
        run_tokens=9000,
        state_hash=bytes(32),
        chunk_elements=1 << 20,
        slots=(),
        manifest=Manifest.canonical([TensorSpec(name="w", shape=(2,), dtype="F32", role=Role.TRAINABLE)]),
        info={},
    )
    path = tmp_path / MANIFEST_NAME
    path.write_text(to_json(manifest))
    return path


def test_how_many_sites_have_to_tell_for_a_restore_is_a_number_or_left_open(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nrun_id = "run"\nsteps = 10\n')

    def given(*words: str) -> int | str | None:
        args = make_parser().parse_args(["coordinator", str(path), *words])
        prepare(args)
        found: int | str | None = args.restore
        return found

    assert _restore(given()) is None
    assert _restore(given("--restore")) == Restore(None)
    assert _restore(given("--restore", "3")) == Restore(3)
    for number in ("0", "-1"):
        with pytest.raises(ConfigError, match="one site has to say what it kept, or without a number most of them"):
            given("--restore", number)


def ask(
    tmp_path: Path, run: str, saved: Path, *words: str
) -> tuple[RunSettings, CoordinatorConfig, dict[str, Any] | None]:
    path = tmp_path / "more.toml"
    path.write_text(f"[run]\n{run}\n")
    return prepare(make_parser().parse_args(["coordinator", str(path), "--resume", str(saved), *words]))


def test_the_parent_is_recorded(tmp_path: Path, saved: Path) -> None:
    settings, config, parent = ask(tmp_path, 'run_id = "second"\nsteps = 400', saved)
    assert parent == {"run_id": "first", "commit": 15, "run_step": 300, "run_tokens": 9000}
    assert settings.run_id == "second"
    assert config.store_path == tmp_path / "more.db"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ('run_id = "first"\nsteps = 400', 'run.run_id = "first" is the run that saved'),
        ('run_id = "second"\nsteps = 300', "is at step 300 and 9000 tokens, the end of this run; raise run.steps"),
        ('run_id = "second"\nsteps = 0\ntokens = 9000', "the end of this run"),
    ],
)
def test_a_run_that_could_not_go_on_is_refused(tmp_path: Path, saved: Path, run: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(tmp_path, run, saved)


def test_no_saved_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        ask(tmp_path, 'run_id = "second"', tmp_path / "none")


def test_auto_takes_the_outer_optimizer_of_the_run_that_is_resumed(tmp_path: Path, saved: Path) -> None:
    """Its slots are saved, and another optimizer could not take them. Each of these runs would be long enough."""
    run = 'run_id = "second"\nsteps = 4000'
    assert ask(tmp_path, run, saved)[0].outer == OuterSettings(optimizer="sgd")
    without_slots = OuterSettings(optimizer="sgd", learning_rate=0.5)
    settings = {"settings": json.loads(settings_to_json(RunSettings(run_id="first", outer=without_slots)))}
    plain = json.loads(saved.read_text())
    saved.write_text(json.dumps(plain | settings))
    assert ask(tmp_path, run, saved)[0].outer == without_slots
    before = OuterSettings(learning_rate=0.7, momentum=0.4)
    table = plain | {"slots": ["momentum"]}
    with_settings = {"settings": json.loads(settings_to_json(RunSettings(run_id="first", outer=before)))}
    saved.write_text(json.dumps(table | with_settings))
    assert ask(tmp_path, run, saved)[0].outer == before
    saved.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match="does not say which outer optimizer its run had"):
        ask(tmp_path, run, saved)
    nodes = f'{run}\n[sync]\nstrategy = "gradient"\nevery = 1'
    assert ask(tmp_path, nodes, saved)[0].outer == OuterSettings(optimizer="adamw", momentum=0.9)
    adamw = {"settings": json.loads(settings_to_json(ask(tmp_path, nodes, saved)[0]))}
    saved.write_text(json.dumps(table | {"slots": ["momentum", "variance"]} | adamw))
    with pytest.raises(ConfigError, match=r"outer\.optimizer = adamw, which is for gradients: say outer\.optimizer"):
        ask(tmp_path, run, saved)
    explicit = f'{run}\n[outer]\noptimizer = "nesterov"\nmomentum = 0.2'
    assert ask(tmp_path, explicit, saved)[0].outer == OuterSettings(momentum=0.2)
