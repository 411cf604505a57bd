"""The batch script of Slurm, run directly: a job that is told to end leaves and is queued again, and the next one is
the same site, though its machine is another one."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.local_run import LocalRun, Process
from tests.process.test_secured_runs import FOREVER, LIMIT_S, MODEL, count_contributors

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "site.sbatch"

pytestmark = pytest.mark.timeout(400)


def job(run: LocalRun, number: int) -> Process:
    programs = run.folder / "programs"
    if not programs.exists():
        programs.mkdir()
        (programs / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {run.folder}/requeued\n')
        (programs / "atoll").write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.harness.guarded "$@"\n')
        for program in programs.iterdir():
            program.chmod(0o755)
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
    options = ["--launcher", "exec", "--threads", "1", "--", *MODEL]
    return run.start("job", ["bash", str(SCRIPT), *options], environment)


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
