"""A run under a seeded schedule of faults: what is killed, stopped and sent away, and what must hold afterwards.

By hand: `python -m tests.harness.random_faults FOLDER SEED...`
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from atoll.protocol.settings import OuterSettings, RunSettings, SyncSettings
from tests.harness.data_account import DATA, LEASED, assert_account_balances
from tests.harness.local_run import LocalRun, Process

PLAIN_WORKER = Path(__file__).parents[1] / "workers" / "plain_worker.py"
SETTINGS = RunSettings(
    run_id="run",
    steps=400,
    min_sites=3,
    data="local",
    time_limits="local",
    sync=SyncSettings(every=10, chunk_elements=1000, codec="int8"),
    outer=OuterSettings(learning_rate=0.7, momentum=0.5),
)
END_S = 120.0
"""From the last fault to the end of the run."""


class RandomFaults:
    """`play` provokes the faults of `seed`; `check` asserts what must hold whatever they were."""

    def __init__(self, run: LocalRun, seed: int, num_faults: int) -> None:
        self.run = run
        self.random = random.Random(seed)
        self.num_faults = num_faults
        self.happened: list[str] = []
        self._killed: set[Process] = set()
        self._started = time.monotonic()
        self._faults: list[Callable[[], None]] = [
            self.kill_node,
            self.kill_worker,
            self.kill_coordinator,
            self.interrupt_node,
            self.stop_briefly,
            self.stop_for_longer_than_a_lease,
            self.another_site,
            self.kill_two,
            self.kill_node_and_coordinator,
        ]

    def play(self) -> None:
        self.run.start_coordinator()
        for name in "abc":
            self.start(name)
        self.run.wait(lambda s: bool(s["last_commit"] >= 1), 60, "the first commit")
        for _ in range(self.num_faults):
            time.sleep(self.random.choice([0.0, 0.3, 1.0, 1.5]))
            if self.run.status()["finished"]:
                break
            self.random.choice(self._faults)()

    def check(self) -> None:
        codes = self.run.wait_all(END_S)
        status = self.run.status()
        story = "\n".join(self.happened)
        assert status["finished"], f"{status['state']}\n{story}"
        assert all(code == 0 for code in codes.values()), f"{codes}\n{story}"
        for process in self.run.processes:
            for word in ("Traceback", "never retrieved", "was destroyed"):
                assert not any(word in line for line in process.lines), f"{process.name}\n{story}"
            if process is not self.run.coordinator and process not in self._killed:
                assert process.popen.poll() in (0, 130), f"{process.name} ended with {process.popen.poll()}\n{story}"
        hashes: dict[int, set[str]] = {}
        for name in self.run.nodes:
            for line in self.run.journal(name, "commit"):
                hashes.setdefault(line["commit"], set()).add(line["state_hash"])
        assert all(len(of_commit) == 1 for of_commit in hashes.values()), f"{hashes}\n{story}"
        numbers = [commit["commit"] for commit in status["commits"]]
        last = status["last_commit"]
        assert numbers == list(range(last - len(numbers) + 1, last + 1)), story
        assert status["run_step"] == self.run.settings.steps
        assert_account_balances(status)
        if last in hashes:
            assert status["state_hash"] in hashes[last], story

    # --- faults

    def start(self, name: str) -> None:
        worker = [sys.executable, str(PLAIN_WORKER), "--tensors", "a=300x40,b=10", "--step-delay-s", "0.02", *LEASED]
        self.run.start_node(name, worker)

    def note(self, text: str) -> None:
        self.happened.append(f"{time.monotonic() - self._started:6.2f} {text}")

    def pick(self) -> str:
        return self.random.choice(sorted(self.run.nodes))

    def kill(self, name: str) -> None:
        self._killed.add(self.run.nodes[name])
        self.run.nodes[name].kill()

    def kill_node(self) -> None:
        name, pause_s = self.pick(), self.random.choice([0.0, 0.5, 4.0])
        self.note(f"kill {name}, start it {pause_s} s later")
        self.kill(name)
        time.sleep(pause_s)
        self.start(name)

    def kill_worker(self) -> None:
        name = self.pick()
        workers = children(self.run.nodes[name].popen.pid)
        self.note(f"kill the workers of {name}: {workers}")
        for worker in workers:
            try:
                os.kill(worker, signal.SIGKILL)
            except ProcessLookupError:
                self.note("it had ended")

    def kill_coordinator(self) -> None:
        pause_s = self.random.choice([0.0, 0.5, 4.0])
        self.note(f"kill the coordinator, start it {pause_s} s later")
        assert self.run.coordinator is not None
        self._killed.add(self.run.coordinator)
        self.run.coordinator.kill()
        time.sleep(pause_s)
        self.run.start_coordinator()

    def interrupt_node(self) -> None:
        name, pause_s = self.pick(), self.random.choice([0.0, 1.0])
        self.note(f"Ctrl-C {name}, start it {pause_s} s after its end")
        self.run.nodes[name].wait_for_line(".", 30)  # before that it is Python that is starting
        self.run.nodes[name].interrupt()
        code = self.run.nodes[name].wait(60)
        self.note(f"{name} ended with {code}")
        time.sleep(pause_s)
        self.start(name)

    def stop_briefly(self) -> None:
        self._stop(1.0)

    def stop_for_longer_than_a_lease(self) -> None:
        self._stop(5.0)

    def _stop(self, pause_s: float) -> None:
        name = self.pick()
        self.note(f"stop {name} for {pause_s} s")
        node = self.run.nodes[name].popen
        if node.poll() is None:
            node.send_signal(signal.SIGSTOP)
            time.sleep(pause_s)
            node.send_signal(signal.SIGCONT)

    def another_site(self) -> None:
        if "d" in self.run.nodes:
            return self.kill_node()
        self.note("start d")
        return self.start("d")

    def kill_two(self) -> None:
        names = self.random.sample(sorted(self.run.nodes), 2)
        self.note(f"kill {names}")
        for name in names:
            self._killed.add(self.run.nodes[name])
            self.run.nodes[name].popen.kill()
        for name in names:
            self.run.nodes[name].wait(10)
            self.start(name)

    def kill_node_and_coordinator(self) -> None:
        name = self.pick()
        self.note(f"kill {name} and the coordinator")
        assert self.run.coordinator is not None
        self._killed |= {self.run.coordinator, self.run.nodes[name]}
        self.run.nodes[name].popen.kill()
        self.run.coordinator.kill()
        self.run.nodes[name].wait(10)
        self.run.start_coordinator()
        self.start(name)


def children(pid: int) -> list[int]:
    """Direct children of a process; none if it has ended."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        try:
            found.extend(int(child) for child in (thread / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def play(folder: Path, seed: int, num_faults: int) -> list[str]:
    """One run; what happened to it."""
    steps = random.Random(seed).choice([400, 600])
    with LocalRun(folder, replace(SETTINGS, steps=steps, data=DATA)) as run:
        faults = RandomFaults(run, seed, num_faults)
        try:
            faults.play()
            faults.check()
        except BaseException:
            sys.stderr.write("\n".join(faults.happened) + "\n")
            raise
    return faults.happened


def main(argv: list[str]) -> None:
    for seed in argv[1:]:
        folder = Path(tempfile.mkdtemp(prefix=f"seed-{seed}-", dir=argv[0]))
        started = time.monotonic()
        happened = play(folder, int(seed), 10)
        sys.stdout.write(f"seed {seed}: {len(happened)} in {time.monotonic() - started:.1f} s\n")


if __name__ == "__main__":
    main(sys.argv[1:])
