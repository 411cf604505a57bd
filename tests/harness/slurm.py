"""A Slurm of this machine alone: its controller and one machine's daemon, on loopback, which believe whoever asks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which

import pytest

from tests.harness.sockets import free_address, listening, outside_loopback

LIMIT_S = 60.0
POLL_S = 0.1
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
needed = pytest.mark.skipif(
    os.geteuid() != 0 or any(which(program) is None for program in PROGRAMS),
    reason="needs root and the Debian packages slurmctld and slurmd",
)
# A job that is queued again begins when what it was started with is out of date, after two minutes if nothing is said.
SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={daemon_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SchedulerParameters=sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    settings: Path

    def ask(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        told = {**os.environ, **(environment or {}), "SLURM_CONF": str(self.settings)}
        done = subprocess.run(command, env=told, check=False, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, words: Sequence[str], environment: Mapping[str, str]) -> str:
        """The number of the job."""
        return self.ask("sbatch", "--parsable", *words, environment=environment).strip()

    def state_of(self, job: str) -> str:
        found = re.search(r"JobState=(\w+)", self.ask("scontrol", "show", "job", job))
        return found[1] if found else ""

    def has_begun(self) -> bool:
        with suppress(AssertionError, subprocess.TimeoutExpired):  # the controller does not answer yet
            return "State=IDLE" in self.ask("scontrol", "show", "node")
        return False


@contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    slurm = Slurm(folder / "slurm.conf")
    text = SETTINGS.format(
        folder=folder,
        host=socket.gethostname().partition(".")[0],
        controller_port=free_address().rpartition(":")[2],
        daemon_port=free_address().rpartition(":")[2],
    )
    slurm.settings.write_text(text)
    log = folder / "slurm.log"
    with log.open("w") as file, ExitStack() as stack:
        processes = []
        for program in ("slurmctld", "slurmd"):
            process = subprocess.Popen([program, "-D", "-f", str(slurm.settings)], stdout=file, stderr=file)
            stack.callback(_end, process)
            processes.append(process)
        deadline = time.monotonic() + LIMIT_S
        while not slurm.has_begun():
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(POLL_S)
        # It runs what it is asked to, as root, whoever asks.
        assert not outside_loopback(listening(process.pid for process in processes))
        stack.callback(_end_jobs, slurm)
        yield slurm


def _end_jobs(slurm: Slurm) -> None:
    with suppress(AssertionError, subprocess.TimeoutExpired):
        slurm.ask("scancel", "--signal=KILL", "--full", "--user=root")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(LIMIT_S)
    process.kill()
    process.wait()
