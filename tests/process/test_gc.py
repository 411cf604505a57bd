"""`atoll gc`: what real runs leave in the homes of their nodes, and what becomes of it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.node.daemon.garbage import garbage_in, size_of
from atoll.node.daemon.home import HomeFolders, locked, socket_folder_of
from tests.harness import chaos
from tests.harness.chaos import ChaosRun

SETTINGS = replace(chaos.SETTINGS, min_sites=2)

pytestmark = pytest.mark.timeout(150)


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (folder, *sorted(folder.rglob("*"))) if path.is_file()}


def freed(home: Path) -> set[str]:
    """Names of what is garbage there."""
    with locked(home):
        return {garbage.path.name for garbage in garbage_in(home)}


def test_what_a_killed_node_left_goes_and_its_site_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the default place of homes, where another node is at work. In the end the run is over, and what is left of
    the home is the model, the logs, and who the site is."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with ChaosRun(tmp_path, SETTINGS) as run:
        run.home = lambda name: tmp_path / "atoll" / "run" / name  # type: ignore[method-assign]
        run.start_coordinator()
        for name in "ab":
            run.start_node(name, run.worker)
        run.wait_for_commits(3)
        run.kill_site("b")
        b = HomeFolders(run.home("b"))
        sockets = socket_folder_of(b.folder)
        assert sockets is not None
        assert sockets.is_relative_to(tempfile.gettempdir())
        (b.spill_folder / "0").write_bytes(bytes(5000))  # held, had the exchange been under way
        needed = [files_in(path) for path in b.of_the_run]
        assert sum(bool(files) for files in needed) >= 3
        before = files_in(b.folder)
        assert main(["gc"]) == 0
        listed = capsys.readouterr().out
        assert f"left alone: home folder {run.home('a')} is in use" in listed
        assert f"{b.spill_folder}: a killed node held it" in listed
        assert f"{sockets}: of a node that was killed" in listed
        assert files_in(b.folder) == before, "nothing is deleted unless that is said"
        assert sockets.exists()
        assert main(["gc", "--delete"]) == 0
        assert capsys.readouterr().out.endswith("in all; deleted\n")
        assert [files_in(path) for path in b.of_the_run] == needed
        assert files_in(b.spill_folder) == {}
        assert not list(sockets.iterdir())
        run.start_node("b", run.worker)
        run.wait_for_contributors("ab")
        run.end_well()
        for name in "ab":
            model = files_in(run.home(name) / "model")
            assert model
            had = size_of(run.home(name))
            assert main(["gc", "--delete", str(run.home(name))]) == 0
            assert size_of(run.home(name)) < had / 2
            assert files_in(run.home(name) / "model") == model
            left = {path.name for path in files_in(run.home(name))}
            assert {"key", "incarnation", "journal.jsonl", "node.log"} <= left
            assert not [path for path in HomeFolders(run.home(name)).of_the_run if files_in(path)]
            assert freed(run.home(name)) == set()
