"""kill -9 of every kind of process of a run, in every phase of a sync: the others go on, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.node.daemon.rank_commands import STORE_MODULE
from tests.harness.chaos import LARGE, LARGE_WORKER, LIMIT_S, ChaosRun, command_line, descendants, settings

pytestmark = pytest.mark.timeout(400)

TORCH_WORKER = (str(Path(__file__).parents[1] / "workers" / "torch_worker.py"), "--step-delay-s", "0.02")


@pytest.mark.parametrize("phase", [pytest.param("training", marks=pytest.mark.slow), "exchanging", "applying"])
def test_a_node_is_killed(tmp_path: Path, phase: str) -> None:
    """With three contributors each of them reduces a third of the chunks: a reducer is lost too."""
    with ChaosRun(tmp_path, LARGE, LARGE_WORKER) as run:
        run.begin("abc")
        run.wait_for_contributors("abc")
        run.kill_in_phase("c", phase)
        run.wait_for_contributors("ab")
        run.start_site("c")
        run.wait_for_contributors("abc")
        run.end_well()
        numbers = {line["commit"] for line in run.journal("a", "commit")}
        first = min(numbers)  # on a busy machine the others may begin without it
        assert numbers == set(range(first, max(numbers) + 1)), "a applied every commit"


@pytest.mark.parametrize("phase", ["training", "exchanging", "waiting for commit"])
def test_the_coordinator_is_killed(tmp_path: Path, phase: str) -> None:
    with ChaosRun(tmp_path, LARGE, LARGE_WORKER) as run:
        before = run.begin("ab")
        run.wait_for_phase("b", phase)
        run.kill_coordinator()
        run.nodes["a"].wait_for_line("lost the coordinator", LIMIT_S)
        run.start_coordinator()
        after = run.wait_for_commits(2)
        assert after["term"] == before["term"] + 1
        run.end_well()
        for name in "ab":
            numbers = [line["commit"] for line in run.journal(name, "commit")]
            assert numbers == list(range(1, len(numbers) + 1)), "none twice, none lost"


def test_a_node_and_the_coordinator_are_killed_at_once(tmp_path: Path) -> None:
    with ChaosRun(tmp_path, LARGE, LARGE_WORKER) as run:
        run.begin("abc")
        run.wait_for_phase("c", "exchanging")
        run.kill_coordinator()
        run.kill_site("c")
        run.start_coordinator()
        run.wait_for_contributors("ab")
        run.start_site("c")
        run.wait_for_contributors("abc")
        run.end_well()


def test_workers_are_killed(tmp_path: Path) -> None:
    """The first ones while they train, the next ones as their snapshot is exchanged: it stays in the sync."""
    with ChaosRun(tmp_path, replace(LARGE, time_limits="wan"), LARGE_WORKER) as run:
        run.begin("ab")
        for phase in ("training", "exchanging"):
            failures = len(run.journal("b", "WorkersFailed"))
            run.wait_for_phase("b", phase)
            assert run.kill_below("b", "plain_worker")
            run.wait_for_journal("b", "WorkersFailed", failures + 1)  # a commit may be faster
            run.wait_for_contributors("ab")
            assert len(run.journal("b", "WorkersFailed")) == failures + 1
        run.end_well()
        assert run.status()["num_evicted"] == 0, "the site stayed in the run"
        assert not run.journal("a", "WorkersFailed")


def test_torchrun_and_its_guard_are_killed(tmp_path: Path) -> None:
    """The rank dies with either of them, and the node starts all of it again."""
    with ChaosRun(tmp_path, settings(min_sites=2)) as run:
        run.start_coordinator()
        run.start_site("a")
        run.start_node("b", run.worker[1:], launcher="torchrun")
        run.wait_for_contributors("ab")
        for word in ("torch.distributed.run", "child.py"):
            before = descendants(run.nodes["b"].popen.pid)
            failures = len(run.journal("b", "WorkersFailed"))
            assert run.kill_below("b", word)
            run.wait_for_journal("b", "WorkersFailed", failures + 1)
            run.wait_for_contributors("ab")
            assert not [pid for pid in before if command_line(pid)]
        run.end_well()


def test_the_store_of_a_sites_ranks_is_killed(tmp_path: Path) -> None:
    """Ranks would wait in it for ever once they form another group: the node starts all of them again."""
    with ChaosRun(tmp_path, settings(min_sites=1, data="numbers")) as run:
        run.start_coordinator()
        run.start_node("a", [*TORCH_WORKER, "--ddp"], launcher="python", extra=["--ranks", "2"])
        run.wait_for_contributors("a")
        before = descendants(run.nodes["a"].popen.pid)
        assert len(run.kill_below("a", STORE_MODULE)) == 1
        run.nodes["a"].wait_for_line("the store of the workers' process groups was killed by SIGKILL", LIMIT_S)
        run.wait_for_contributors("a")
        assert not [pid for pid in before if command_line(pid)]
        run.end_well()
        assert len(run.journal("a", "WorkersFailed")) == 1


def test_several_sites_at_once_down_to_one(tmp_path: Path) -> None:
    with ChaosRun(tmp_path, settings(min_sites=4)) as run:
        run.begin("abcd")
        run.kill_sites("cd")
        run.wait_for_contributors("ab")
        for name in "cd":
            run.start_site(name)
        run.wait_for_contributors("abcd")
        run.kill_sites("abc")
        run.wait_for_contributors("d")
        for name in "abc":
            run.start_site(name)
        run.wait_for_contributors("abcd")
        run.end_well()


def test_below_its_quorum_the_run_pauses_and_goes_on_when_sites_return(tmp_path: Path) -> None:
    with ChaosRun(tmp_path, settings(min_sites=3, quorum=2)) as run:
        run.begin("abc")
        run.kill_sites("bc")
        paused = run.wait(lambda s: s["state_kind"] == "paused", LIMIT_S, "it pauses")
        assert "1 of the 2 contributors of the quorum" in paused["state"]
        assert run.status()["last_commit"] == paused["last_commit"]
        run.start_site("b")
        run.wait_for_contributors("ab")
        run.start_site("c")
        run.wait_for_contributors("abc")
        run.end_well()


def test_every_process_is_killed_and_the_run_goes_on_from_its_disks(tmp_path: Path) -> None:
    with ChaosRun(tmp_path, settings(min_sites=2)) as run:
        before = run.begin("ab", num_commits=3)
        run.kill_sites("ab")
        run.kill_coordinator()
        run.start_coordinator()
        for name in "ab":
            run.start_site(name)
        after = run.wait_for_contributors("ab")
        assert after["last_commit"] > before["last_commit"]
        assert after["term"] == before["term"] + 1
        run.end_well()


def test_ctrl_c_without_a_coordinator_keeps_the_state_and_a_second_one_ends_at_once(tmp_path: Path) -> None:
    with ChaosRun(tmp_path, settings(min_sites=2)) as run:
        run.begin("ab", num_commits=2)
        run.kill_coordinator()
        for name in "ab":
            run.nodes[name].wait_for_line("lost the coordinator", LIMIT_S)
            run.nodes[name].interrupt()
            run.nodes[name].wait_for_line("again to leave now", LIMIT_S)
            run.nodes[name].interrupt()
            assert run.nodes[name].wait(LIMIT_S) == 130
        held = max(run.journal(name, "commit")[-1]["commit"] for name in "ab")
        run.start_coordinator()
        for name in "ab":
            run.start_site(name)
        assert run.wait_for_contributors("ab")["last_commit"] > held, "the run goes on from there"
        run.end_well()
