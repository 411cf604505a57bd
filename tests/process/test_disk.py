"""What can go wrong with disks, in whole runs of real processes with a worker that needs no torch."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.coordinator import admin
from atoll.node.dataplane.footprint import footprint
from atoll.protocol.errors import HostError
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import GUARDED, LocalRun, Status
from tests.harness.small_disk import small_disk

WORKER = [sys.executable, str(Path(__file__).parents[1] / "workers" / "plain_worker.py"), "--tensors", "a=300x40,b=10"]
SLOW = [*WORKER, "--step-delay-s", "0.02"]
SETTINGS = RunSettings(
    run_id="run",
    steps=100,
    min_sites=3,
    data="local",
    time_limits="local",
    sync=SyncSettings(every=10, chunk_elements=1000, codec="fp32", log_commits=6, snapshots=2),
    outer=OuterSettings(learning_rate=0.7, momentum=0.5),
)
ENDLESS = replace(SETTINGS, min_sites=2, steps=1_000_000)
"""Not over before a site that comes late is refused."""
LIMIT_S = 150.0
SMALL_FILES_BYTES = 1 << 20
"""More than key, manifest and journal of a short run."""

pytestmark = pytest.mark.timeout(400)


def committed(count: int) -> Callable[[Status], bool]:
    return lambda status: bool(status["last_commit"] >= count)


@pytest.mark.root
def test_a_site_whose_disk_is_full_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    with LocalRun(tmp_path, ENDLESS) as run, small_disk(run.home("c"), 4 << 20) as fill:
        run.start_coordinator()
        for name in "abc":
            run.start_node(name, SLOW)
        run.wait(lambda s: any("c" in commit["contributors"] for commit in s["commits"][1:]), LIMIT_S, "c takes part")
        fill()
        assert run.wait_all(LIMIT_S, ["c"]) == {"c": HostError.exit_code}
        at = run.status()["last_commit"]
        run.wait(lambda s: committed(at + 2)(s) and len(s["commits"][-1]["contributors"]) == 2, LIMIT_S, "others go on")
        admin.ask(run.store_path, "stop", reason="the test is over")
        assert run.wait_all(LIMIT_S, ["a", "b"]) == {"a": 0, "b": 0}
        lines = run.nodes["c"].lines
        assert any("no space is left" in line and "make room" in line for line in lines), lines
        assert not any("Traceback" in line for line in lines), lines
        assert run.journal("c", "commit"), "it took part before"
        hashes = run.hashes(run.status()["last_commit"])
        assert set(hashes) == {"a", "b"}
        assert len(set(hashes.values())) == 1
        assert any("c (site" in text and "no space is left" in text for text in run.status()["errors"])
        assert not list(run.home("c").rglob("*.new")), "nothing half written is left"


def test_a_site_on_whose_disk_the_model_does_not_fit_is_no_member(tmp_path: Path) -> None:
    with LocalRun(tmp_path, ENDLESS) as run, small_disk(run.home("c"), 300 << 10):
        run.start_coordinator()
        for name in "abc":
            run.start_node(name, SLOW)
        assert run.nodes["c"].wait(LIMIT_S) == HostError.exit_code
        lines = run.nodes["c"].lines
        assert any("the model does not fit on the disk of" in line and "are needed" in line for line in lines), lines
        assert not run.journal("c", "commit")
        assert not any("c (site" in text and "lost" in text for text in run.status()["errors"])


SAVING = replace(
    SETTINGS, min_sites=2, save_every=1, sync=replace(SETTINGS.sync, chunk_elements=1 << 18, log_commits=3)
)
LARGE = [*WORKER[:2], "--tensors", "a=1000x1000"]


def saving_bytes() -> int:
    spec = TensorSpec(name="a", shape=(1000, 1000), dtype="F32", role=Role.TRAINABLE)
    return footprint(
        Layout(Manifest.canonical([spec]), SAVING.sync.chunk_elements), SAVING, read_in_place=True
    ).disk_bytes


@pytest.mark.root
def test_a_disk_with_the_room_that_is_told_holds_a_whole_run_with_a_model_of_each_commit(tmp_path: Path) -> None:
    """The worker's last steps and the sites' journals are small beside it; a missing copy of the model is not."""
    with LocalRun(tmp_path, SAVING) as run, small_disk(run.home("b"), saving_bytes() + SMALL_FILES_BYTES):
        run.start_coordinator()
        for name in "ab":
            run.start_node(name, LARGE)
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}, run.story()
        assert len(run.journal("b", "commit")) == 10
        assert {path.name for path in (run.home("b") / "model").iterdir()} >= {"manifest.json", "model.safetensors"}


@pytest.mark.root
def test_a_disk_without_room_for_a_second_model_is_refused_at_the_door(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SAVING) as run, small_disk(run.home("b"), saving_bytes() - SMALL_FILES_BYTES):
        run.start_coordinator()
        node = run.start_node("b", LARGE)
        assert node.wait(LIMIT_S) == HostError.exit_code
        said = next(line for line in node.lines if "the model does not fit on the disk of" in line)
        assert "a saved model, the next one and the chunks that change while it is written" in said


def test_a_file_that_may_not_grow_is_an_error_with_its_name(tmp_path: Path) -> None:
    with LocalRun(tmp_path, ENDLESS) as run:
        run.start_coordinator()
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        node = run.start_node("c", SLOW, prefix=["prlimit", f"--fsize={60 << 10}", "--"])
        assert node.wait(LIMIT_S) == HostError.exit_code
        last = run.status()["last_commit"]
        run.wait(lambda status: bool(status["last_commit"] > last), LIMIT_S, "a commit of the others, without it")
        assert any("outer.chunks: File too large" in line for line in run.nodes["c"].lines), run.nodes["c"].lines


def test_snapshots_are_taken_and_old_ones_go(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        for name in "abc":
            run.start_node(name, WORKER)
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        for name in "abc":
            found = sorted(int(p.stem.split("-")[1]) for p in (run.home(name) / "snapshots").glob("commit-*.snapshot"))
            assert len(found) == 2, found
            assert found[1] >= 10 - 6 // 3, "of a log of 6 commits, and two snapshots"
            log = {int(p.stem.split("-")[1]) for p in (run.home(name) / "payloads").glob("commit-*.record")}
            assert log >= set(range(found[0] + 1, 11)), "the log leads on from both"


LONG = replace(SETTINGS, steps=200, sync=replace(SETTINGS.sync, log_commits=30))
ON_DISK = ("state", "payloads", "snapshots")


def copied(run: LocalRun, names: str, to: Path) -> None:
    """What a power cut may leave: the files are read one after the other while they are written."""
    for name in names:
        for part in ON_DISK:
            folder = to / name / part
            folder.mkdir(parents=True)
            for path in sorted((run.home(name) / part).iterdir()):
                with suppress(FileNotFoundError):
                    shutil.copyfile(path, folder / path.name)


def put_back(run: LocalRun, names: str, source: Path) -> None:
    for name in names:
        for part in ON_DISK:
            shutil.rmtree(run.home(name) / part)
            shutil.copytree(source / name / part, run.home(name) / part)


def assert_all_end_equal(run: LocalRun, names: str, commit: int) -> None:
    assert run.wait_all(LIMIT_S, list(names)) == dict.fromkeys(names, 0)
    status = run.status()
    assert (status["last_commit"], status["finished"]) == (commit, True)
    held = {site["name"]: (site["last_commit"], site["state_hash"]) for site in status["sites"]}
    assert {held[name] for name in names} == {(commit, status["state_hash"])}


def end_once_in(run: LocalRun, name: str) -> int:
    """Stops a run that is long enough for a late site, once it contributes; the last commit."""
    run.wait(lambda s: bool(s["commits"]) and name in s["commits"][-1]["contributors"], LIMIT_S, f"{name} contributes")
    stop = run.start("stop", [sys.executable, *GUARDED, "stop", str(run.toml)])
    assert stop.wait(LIMIT_S) == 0, stop.lines
    return int(run.wait(lambda s: bool(s["finished"]), LIMIT_S)["last_commit"])


def test_all_sites_stopped_and_started_again_lose_nothing(tmp_path: Path) -> None:
    with LocalRun(tmp_path, LONG) as run:
        run.start_coordinator()
        for name in "abc":
            run.start_node(name, SLOW)
        run.wait(committed(4), LIMIT_S)
        for name in "abc":
            run.nodes[name].kill()
        for name in "abc":
            run.start_node(name, SLOW)
        assert_all_end_equal(run, "abc", 20)
        assert run.status()["branch"] == 0
        numbers = [line["commit"] for line in run.journal("a", "commit")]
        assert len(numbers) == len(set(numbers)), "no commit came twice"


def test_a_power_cut_at_all_sites_goes_back_to_the_newest_commit_that_is_left(tmp_path: Path) -> None:
    with LocalRun(tmp_path, LONG) as run:
        coordinator = run.start_coordinator()
        for name in "abc":
            run.start_node(name, SLOW)
        run.wait(committed(4), LIMIT_S)
        copied(run, "abc", tmp_path / "cut")
        run.wait(committed(run.status()["last_commit"] + 4), LIMIT_S)
        for name in "abc":
            run.nodes[name].kill()
        lost = run.status()["last_commit"]
        put_back(run, "abc", tmp_path / "cut")
        for name in "abc":
            run.start_node(name, SLOW)
        line = coordinator.wait_for_line(r"rolled back from commit (\d+) to commit (\d+), branch 1", LIMIT_S)
        assert int(line.group(1)) == lost
        assert 3 <= int(line.group(2)) < lost
        assert_all_end_equal(run, "abc", 20)
        assert run.status()["branch"] == 1
        numbers = [entry["commit"] for entry in run.journal("a", "commit")]
        assert numbers.count(int(line.group(2)) + 2) == 2, "numbered on from there"


@pytest.mark.parametrize(("log_commits", "later"), [(30, 4), (6, 10)], ids=["within the log", "older than the log"])
def test_a_site_that_may_hold_the_lost_commits_is_waited_for_until_they_are_given_up(
    tmp_path: Path, log_commits: int, later: int
) -> None:
    settings = replace(LONG, steps=100_000, sync=replace(LONG.sync, log_commits=log_commits))
    with LocalRun(tmp_path, settings) as run:
        coordinator = run.start_coordinator()
        for name in "abc":
            run.start_node(name, SLOW)
        run.wait(committed(4), LIMIT_S)
        copied(run, "ab", tmp_path / "cut")
        lost = run.status()["last_commit"] + later
        run.wait(committed(lost), LIMIT_S)
        for name in "abc":
            run.nodes[name].kill()
        put_back(run, "ab", tmp_path / "cut")
        run.start_node("a", SLOW)
        run.start_node("b", SLOW)
        waiting = run.wait(lambda s: "here. c (site" in s["unreachable"], LIMIT_S, "c alone is waited for")
        assert "may have them: start what is missing" in waiting["state"]
        assert waiting["branch"] == 0
        command = run.start("rollback", [sys.executable, *GUARDED, "rollback", str(run.toml)])
        assert command.wait(LIMIT_S) == 0, command.lines
        coordinator.wait_for_line(r"rolled back from commit \d+ to commit \d+, branch 1: atoll rollback", LIMIT_S)
        run.wait(lambda s: s["commits"][-1]["commit"] >= lost + 4, LIMIT_S, "the run goes on without c")
        run.start_node("c", SLOW)
        assert_all_end_equal(run, "abc", end_once_in(run, "c"))
        assert any("the run went back to commit" in text for text in run.nodes["c"].lines), run.nodes["c"].lines
        again = run.start("again", [sys.executable, *GUARDED, "rollback", str(run.toml)])
        assert again.wait(LIMIT_S) == HostError.exit_code
