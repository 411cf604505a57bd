"""What is garbage in a home, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.node.daemon.garbage import delete, garbage_in, homes_below
from atoll.node.daemon.home import Home, locked
from atoll.protocol.errors import ConfigError, HostError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Of a node that is not at work, with something of each kind in it."""
    folder = tmp_path / "atoll" / "run" / "a"
    opened = Home(folder)
    for path in (*opened.of_the_run, opened.spill_folder, opened.average_error_folder, opened.spills_of(2)[0]):
        if path != opened.manifest_file:
            path.mkdir()
            (path / "0").write_bytes(b"kept")
    opened.manifest_file.write_bytes(b"kept")
    for path in (folder / "branch.new", opened.payload_folder / "commit-1.record.new"):
        path.write_bytes(b"half")
    opened.close()
    return folder


def found(home: Path) -> set[str]:
    with locked(home):
        return {str(garbage.path.relative_to(home)) for garbage in garbage_in(home)}


LEFT = {"contributions", "average-errors", "contributions-2", "branch.new", "payloads/commit-1.record.new"}


def test_what_a_site_goes_on_with_is_garbage_once_its_run_has_ended(home: Path) -> None:
    assert found(home) == LEFT
    opened = Home(home)
    opened.note_end()
    opened.close()
    of_the_run = {path.name for path in opened.of_the_run}
    assert found(home) == (LEFT | of_the_run) - {"payloads/commit-1.record.new"}
    with locked(home):
        for garbage in garbage_in(home):
            delete(garbage)
    assert {path.name for path in home.rglob("*") if path.is_file()} == {"key", "incarnation", "lock", "ended"}
    assert found(home) == set()


def test_a_site_that_comes_back_is_in_the_run_again(home: Path) -> None:
    for is_over in (True, False):
        opened = Home(home)
        assert not opened.has_ended()
        if is_over:
            opened.note_end()
        opened.close()
        assert opened.has_ended() is is_over


def test_a_model_beside_its_place_is_garbage_only_where_another_is_in_place(home: Path) -> None:
    for name in (".model.new", ".model.old"):
        (home / name).mkdir()
        (home / name / "model.safetensors").write_bytes(b"model")
    assert found(home) == LEFT, "the node was killed before it had put it in place"
    (home / "model").mkdir()
    assert found(home) == LEFT
    (home / "model" / "manifest.json").write_bytes(b"{}")
    assert found(home) == LEFT | {".model.new", ".model.old"}


def test_a_folder_that_is_a_link_is_emptied_and_stays(home: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (home / "contributions").rename(elsewhere)
    (home / "contributions").symlink_to(elsewhere)
    (elsewhere / "1").symlink_to(tmp_path)
    (spills,) = (one for one in garbage_in(home) if one.path.name == "contributions")
    delete(spills)
    assert (home / "contributions").is_symlink()
    assert not list(elsewhere.iterdir())
    assert home.is_dir(), "links in it are not followed"


def test_a_home_in_use_is_refused_by_name_and_left_alone_among_others(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home.parents[2]))
    assert homes_below(home.parents[1]) == [home]
    with locked(home):
        assert main(["gc", "--delete", str(home)]) == HostError.exit_code
        assert "is in use by another node" in capsys.readouterr().err
        assert main(["gc", "--delete"]) == 0
        assert "left alone" in capsys.readouterr().out
    assert found(home) == LEFT


def test_a_folder_that_is_no_home_is_refused_and_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert main(["gc", str(folder)]) == ConfigError.exit_code
        assert "is no home of a node" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
