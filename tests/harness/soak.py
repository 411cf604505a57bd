"""A run of small sites under a seeded schedule of faults, for as long as one likes; and what it kept of its speed.

    make soak MINUTES=30
    python -m tests.harness.soak --minutes 30 --seed 7

First it runs undisturbed for a while. Ctrl-C ends the faults early; the end is checked all the same. The exit code is 1
if anything is unsound (`assert_sound`): it ends, nothing is lost, every site holds the same bits.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import grpc

from tests.harness.chaos import LIMIT_S, WORKER, ChaosRun, descendants, settings
from tests.harness.local_run import Process, Status

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
BUSY_WORKER = (*WORKER, "--step-delay-s", "0.02")
BACK_S = 120.0
"""For a site to contribute again, on a busy machine."""


@dataclass
class Measured:
    """What was seen of the run, by this machine's clock."""

    started_at: float = 0.0
    first_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def begin(self, status: Status) -> None:
        self.started_at, self.first_tokens = time.monotonic(), status["run_tokens"]

    def end(self, status: Status) -> None:
        self.seconds, self.tokens = time.monotonic() - self.started_at, status["run_tokens"] - self.first_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


class CommitTimes(threading.Thread):
    """When each commit was decided, by this machine's clock. (The status tells of the newest only.)"""

    def __init__(self, run: ChaosRun) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._times: dict[int, float] = {}
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.5):
            try:
                self.note(self._run.status())
            except grpc.RpcError:
                pass  # the coordinator is away

    def note(self, status: Status) -> None:
        self._times.update((c["commit"], c["time"]) for c in status["commits"] if c["time"])

    def longest_wait_s(self, since: float) -> float:
        """For a commit, from then on until the newest."""
        later = sorted(t for t in list(self._times.values()) if t > since)
        return max((b - a for a, b in pairwise([since, *later])), default=0.0)

    def close(self) -> None:
        self._over.set()
        self.join()


@dataclass
class Faults:
    """Provokes faults on a run whose sites are all there; each is over when they all contribute again."""

    run: ChaosRun
    times: CommitTimes
    names: Sequence[str]
    random: random.Random
    by_kind: Counter[str] = field(default_factory=Counter)
    happened: list[str] = field(default_factory=list)
    waits_s: list[tuple[float, str]] = field(default_factory=list)
    """The longest one for a commit from each fault on, until everybody contributed again."""
    restart_cpu_s: float = 0.0
    """That processes took which were started again, until their site contributed."""

    def __post_init__(self) -> None:
        self._started_at = time.monotonic()
        self._struck_at = 0.0
        self._kinds: dict[str, Callable[[], None]] = {
            "kill a node": self.kill_node,
            "kill a node as it exchanges": self.kill_node_as_it_exchanges,
            "kill a worker": self.kill_worker,
            "kill two nodes": self.kill_two_nodes,
            "kill the coordinator": self.kill_coordinator,
            "kill a node and the coordinator": self.kill_node_and_coordinator,
            "Ctrl-C a node": self.interrupt_node,
            "freeze a site for a moment": lambda: self.freeze_site(1.0),
            "freeze a site beyond its lease": lambda: self.freeze_site(5.0),
            "freeze the coordinator": self.freeze_coordinator,
        }

    def strike(self) -> None:
        """One fault, and until everybody contributes again."""
        kind = self.random.choice(list(self._kinds))
        self.by_kind[kind] += 1
        self.happened.append(f"{time.monotonic() - self._started_at:7.2f} {kind}")
        self._struck_at = time.time()
        self._kinds[kind]()
        self.times.note(self.run.wait_for_contributors(self.names, BACK_S))
        self.waits_s.append((self.times.longest_wait_s(self._struck_at), self.happened[-1].split(maxsplit=1)[1]))

    # --- what can happen

    def _pick(self) -> str:
        name = self.random.choice(self.names)
        self.happened[-1] += f": {name}"
        return name

    def _pause(self) -> None:
        """For as long as whatever was killed is away."""
        time.sleep(self.random.choice([0.0, 0.5, 4.0]))

    def _start(self, names: Sequence[str]) -> None:
        for name in names:
            self.run.start_site(name)
        self.run.wait_for_contributors(self.names, BACK_S)
        self.restart_cpu_s += sum(cpu_s(self.run.nodes[name]) for name in names)

    def kill_node(self) -> None:
        name = self._pick()
        self.run.kill_site(name)
        self._pause()
        self._start([name])

    def kill_node_as_it_exchanges(self) -> None:
        name = self._pick()
        self.run.wait_for_phase(name, "exchanging")
        self._struck_at = time.time()
        self.run.kill_site(name)
        self._pause()
        self._start([name])

    def kill_worker(self) -> None:
        name = self._pick()
        failures = len(self.run.journal(name, "WorkersFailed"))
        assert self.run.kill_below(name, "plain_worker")
        self.run.wait_for_journal(name, "WorkersFailed", failures + 1)

    def kill_two_nodes(self) -> None:
        names = self.random.sample(list(self.names), 2)
        self.happened[-1] += f": {names}"
        self.run.kill_sites(names)
        self._pause()
        self._start(names)

    def kill_coordinator(self) -> None:
        self.run.kill_coordinator()
        self._pause()
        self._start_coordinator()

    def _start_coordinator(self) -> None:
        self.restart_cpu_s += cpu_s(self.run.start_coordinator())

    def kill_node_and_coordinator(self) -> None:
        name = self._pick()
        self.run.kill_coordinator()
        self.run.kill_site(name)
        self._start_coordinator()
        self._start([name])

    def interrupt_node(self) -> None:
        name = self._pick()
        self.run.nodes[name].interrupt()
        assert self.run.nodes[name].wait(LIMIT_S) == 0
        self._start([name])

    def freeze_site(self, seconds: float) -> None:
        with self.run.frozen(self.run.nodes[self._pick()]):
            time.sleep(seconds)

    def freeze_coordinator(self) -> None:
        assert self.run.coordinator is not None
        with self.run.frozen(self.run.coordinator):
            time.sleep(4.0)


def cpu_s(process: Process) -> float:
    """Of a process and all below it that are there."""
    ticks = 0
    for pid in (process.popen.pid, *descendants(process.popen.pid)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


def play(folder: Path, seed: int, num_faults: int, num_sites: int = 3) -> Counter[str]:
    """Faults one after the other; what happened."""
    names = "abcdefghijklmnop"[:num_sites]
    with ChaosRun(folder, settings(min_sites=num_sites), BUSY_WORKER) as run:
        times = CommitTimes(run)
        faults = Faults(run, times, names, random.Random(seed))
        try:
            run.begin(names)
            run.wait_for_contributors(names, BACK_S)
            times.start()
            for _ in range(num_faults):
                faults.strike()
            times.close()
            run.end_well(names)
        except BaseException:
            say("\n".join(faults.happened))
            raise
    return faults.by_kind


def soak(folder: Path, options: argparse.Namespace) -> None:
    """Raises AssertionError for whatever is unsound."""
    names = "abcdefghijklmnop"[: options.sites]
    cores = len(os.sched_getaffinity(0))
    undisturbed, disturbed = Measured(), Measured()
    say(f"seed {options.seed}: {options.sites} sites, {options.minutes:g} minutes, {cores} cores, in {folder}")
    with ChaosRun(folder, settings(min_sites=options.sites), BUSY_WORKER) as run:
        times = CommitTimes(run)
        faults = Faults(run, times, names, random.Random(options.seed))
        try:
            run.begin(names)
            undisturbed.begin(run.wait_for_contributors(names, BACK_S))
            pause(options.minutes * 6.0)  # a tenth of it
            undisturbed.end(run.status())
            say(f"undisturbed for {undisturbed.seconds:.0f} s: {undisturbed.tokens_per_s:.1f} tokens/s")
            first_commit = run.status()["last_commit"]
            disturbed.begin(run.status())
            times.start()
            try:
                disturb(run, faults, options, disturbed.started_at)
            except KeyboardInterrupt:
                say("Ctrl-C: no more faults")
            times.close()
            if run.coordinator is None or run.coordinator.popen.poll() is not None:
                run.start_coordinator()  # a fault was interrupted
            disturbed.end(run.status())
            for name in names:
                if run.nodes[name].popen.poll() is not None:
                    run.start_site(name)
            last = run.wait_for_contributors(names, BACK_S)["last_commit"]
            status = run.end_well(names, 2 * LIMIT_S)
        except BaseException:
            say("\n".join(faults.happened))
            raise
    report(faults, undisturbed, disturbed, cores, last - first_commit)
    say(f"sound: {len(names)} sites hold commit {status['last_commit']} with hash {status['state_hash'][:12]}")


def disturb(run: ChaosRun, faults: Faults, options: argparse.Namespace, started_at: float) -> None:
    until, mean_s = started_at + 60.0 * options.minutes, 60.0 / options.faults_a_minute
    while True:
        struck = time.monotonic()
        faults.strike()
        now = time.monotonic()
        commit, what = run.status()["last_commit"], faults.happened[-1].split(maxsplit=1)[1]
        wait_s = faults.waits_s[-1][0]
        say(
            f"{now - started_at:6.0f} s: commit {commit}, fault {faults.by_kind.total()}: {what}; waited {wait_s:.2f} s"
        )
        next_at = struck + mean_s * faults.random.uniform(0.5, 1.5)
        if next_at >= until:
            pause(until - now)
            return
        pause(next_at - now)


def pause(seconds: float) -> None:
    time.sleep(max(0.0, seconds))


def report(faults: Faults, undisturbed: Measured, disturbed: Measured, cores: int, num_commits: int) -> None:
    say(f"{faults.by_kind.total()} faults in {disturbed.seconds:.0f} s:")
    for kind, count in sorted(faults.by_kind.items()):
        say(f"  {count:3} {kind}")
    kept = disturbed.tokens_per_s / undisturbed.tokens_per_s
    say(f"{num_commits} commits, {disturbed.tokens_per_s:.1f} tokens/s")
    say(f"kept of the undisturbed throughput: {kept:.1%}")
    left_s = disturbed.seconds - faults.restart_cpu_s / cores
    say(
        f"  without the time in which processes that were started again used all {cores} cores "
        f"({faults.restart_cpu_s:.0f} s of CPU): {kept * disturbed.seconds / left_s:.1%}"
    )
    longest_s, what = max(faults.waits_s, default=(0.0, "nothing"))
    say(f"longest wait for a commit after a fault: {longest_s:.2f} s ({what})")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.harness.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--sites", type=int, default=6, choices=range(3, 17), metavar="3..16")
    parser.add_argument("--faults-a-minute", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="default: a random one")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="atoll-soak-") as folder:
        try:
            soak(Path(folder), options)
        except AssertionError as error:
            say(f"UNSOUND: {error}\nagain: python -m tests.harness.soak --seed {options.seed}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
