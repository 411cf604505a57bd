"""The batch script of Slurm, run directly and by a Slurm of this machine alone: a job that is told to end leaves and is
queued again, and the next one is the same site, though its machine is another one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness import slurm
from tests.harness.local_run import LocalRun, Process
from tests.process.test_secured_runs import FOREVER, LIMIT_S, MODEL, atoll, count_contributors

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "site.sbatch"

pytestmark = pytest.mark.timeout(400)


OPTIONS = ["--launcher", "exec", "--threads", "1", "--", *MODEL]


def make_programs(folder: Path, **others: str) -> Path:
    """`atoll`, and the script of each other one."""
    folder.mkdir()
    this = f'exec {sys.executable} -m tests.harness.guarded "$@"'
    for name, script in {"atoll": this, **others}.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def job(run: LocalRun, number: int) -> Process:
    programs = run.folder / "programs"
    if not programs.exists():
        make_programs(programs, scontrol=f'echo "$@" >> {run.folder}/requeued')
    disk = run.folder / f"disk-{number}"
    (disk / f"atoll-{number}" / "trust").mkdir(parents=True)  # of somebody who waits for a key
    (disk / f"atoll-{number}" / "trust" / "identity.pem").touch()
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_TMPDIR": str(disk),
        "SLURM_JOB_ID": str(number),
        "ATOLL_IDENTITY": str(run.folder / "identity"),
        "ATOLL_INVITE": str(run.folder / "berlin.invite"),
    }
    return run.start("job", ["bash", str(SCRIPT), *OPTIONS], environment)


def test_a_job_that_ends_is_queued_again_and_comes_back_as_the_same_site(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(FOREVER, min_sites=1), secured=True) as run:
        run.start_coordinator()
        run.invite("berlin")
        first = job(run, 1)
        run.start_node("paris", MODEL)
        run.wait(lambda s: count_contributors(s, 2), LIMIT_S)
        (renewed,) = run.folder.glob("disk-1/atoll-1-*/trust/coordinator.json")
        renewed.write_text(f"{renewed.read_text()}\n")  # as one that the node has renewed
        kept = renewed.read_text()
        first.popen.send_signal(signal.SIGTERM)
        assert first.wait(LIMIT_S) == 0, first.lines[-20:]
        assert (run.folder / "requeued").read_text() == "requeue 1\n"
        assert [path.name for path in (run.folder / "disk-1").iterdir()] == ["atoll-1"], "nothing is left there"
        assert (run.folder / "disk-1" / "atoll-1" / "trust" / "identity.pem").read_bytes() == b""
        identity = run.folder / "identity" / "trust"
        assert (identity / "coordinator.json").read_text() == kept
        assert sorted(path.name for path in identity.iterdir()) == ["coordinator.json", "identity.pem", "roots.pem"]
        assert not any(path.stat().st_mode & 0o077 for path in (identity, *identity.iterdir()))
        (run.folder / "berlin.invite").unlink()
        second = job(run, 2)
        run.wait(lambda s: count_contributors(s, 1), LIMIT_S)
        status = run.wait(lambda s: count_contributors(s, 2), LIMIT_S)
        berlin = next(site for site in status["sites"] if site["name"] == "berlin")
        assert berlin["incarnation"] == 2, "the same site, started again"
        assert len(status["sites"]) == 2
        second.popen.send_signal(signal.SIGTERM)
        assert second.wait(LIMIT_S) == 0


NODE = """
import os, signal, sys
signal.alarm(60)  # where its script has ended, nobody ends it
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("begun", flush=True)
for _ in range(int(sys.argv[2])):
    signal.sigwait({signal.SIGTERM})
    print("told", flush=True)
with open(sys.argv[3]) as end:
    end.read()
print("its home is there" if os.path.isdir(sys.argv[1]) else "its home is gone", flush=True)
sys.exit(5)
"""


def test_a_job_that_is_told_to_end_again_and_again_waits_until_its_node_has(tmp_path: Path) -> None:
    """As by `scancel` after the signal before its time is over: the node still leaves."""
    told = 5
    os.mkfifo(tmp_path / "end")
    (tmp_path / "node.py").write_text(NODE)
    node = f'exec {sys.executable} {tmp_path}/node.py "$3" {told} {tmp_path}/end'
    script_of_atoll = f'if [ "$1" = join ]; then mkdir "$4/trust"; else {node}; fi'
    programs = make_programs(tmp_path / "programs", atoll=script_of_atoll, scontrol='echo "$@"')
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_TMPDIR": str(tmp_path),
        "SLURM_JOB_ID": "1",
        "ATOLL_IDENTITY": str(tmp_path / "identity"),
        "ATOLL_INVITE": "berlin.invite",
    }
    with subprocess.Popen(["bash", str(SCRIPT)], env=environment, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "begun\n"
        for _ in range(told):
            script.send_signal(signal.SIGTERM)
            assert script.stdout.readline() == "told\n"
        (tmp_path / "end").write_text("")
        assert script.stdout.read().splitlines() == ["its home is there", "requeue 1"]
    assert script.returncode == 5, "that of the node"
    assert not list(tmp_path.glob("atoll-1-*"))


@slurm.needed
def test_slurm_queues_the_job_again_and_it_comes_back_as_the_same_site(tmp_path: Path) -> None:
    """`atoll drain` ends it, and it is not queued again."""
    with (
        LocalRun(tmp_path, replace(FOREVER, min_sites=1), secured=True) as run,
        slurm.running(tmp_path / "slurm") as by,
    ):
        run.start_coordinator()
        run.invite("berlin")
        programs = make_programs(run.folder / "programs")
        # A machine without GPUs and with few cores; Python of tests finds them where they lie.
        of_job = ["--gpus-per-node=0", "--cpus-per-task=1", f"--chdir={Path.cwd()}", f"--output={tmp_path}/job.log"]
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "ATOLL_IDENTITY": str(run.folder / "identity"),
            "ATOLL_INVITE": str(run.folder / "berlin.invite"),
        }
        number = by.submit([*of_job, str(SCRIPT), *OPTIONS], environment)
        run.start_node("paris", MODEL)
        run.wait(lambda s: count_contributors(s, 2), LIMIT_S)
        by.ask("scancel", "--batch", "--signal=TERM", number)
        run.wait(lambda _: by.state_of(number) == "PENDING", LIMIT_S, "it is queued again")
        run.wait(lambda s: count_contributors(s, 1), LIMIT_S)
        status = run.wait(lambda s: count_contributors(s, 2), LIMIT_S)
        berlin = next(site for site in status["sites"] if site["name"] == "berlin")
        assert (berlin["incarnation"], len(status["sites"])) == (2, 2), "the same site, started again"
        assert atoll(run, "drain", str(run.toml), "berlin").popen.returncode == 0
        run.wait(lambda _: by.state_of(number) == "COMPLETED", LIMIT_S, "it is over for good")
