"""Faults on the real processes of a run, and what must hold after every one of them.

    with ChaosRun(tmp_path) as run:
        run.begin("abc")
        run.kill_in_phase("c", "exchanging")
        run.wait_for_commits(2)
        run.start("c")
        run.wait_for_contributors("abc")
        run.end_well()

Phases are awaited through a site's journal. A run goes on until `end_well` stops it, so no test races against its end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.coordinator import admin
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.data_account import DATA, LEASED, assert_account_balances
from tests.harness.local_run import GUARDED, LocalRun, Process, Status
from tests.harness.warm_ranks import BESIDE_A_NODE

PLAIN_WORKER = Path(__file__).parents[1] / "workers" / "plain_worker.py"
WORKER = (sys.executable, str(PLAIN_WORKER), "--tensors", "a=300x40,b=10", "--step-delay-s", "0.05", *LEASED)
"""A commit each half second: the run goes on while a test waits for the end of a lease, and each commit of three sites
takes nearly a tenth of a second of a core."""
LARGE_WORKER = (sys.executable, str(PLAIN_WORKER), "--tensors", "a=1000x500,b=10", "--step-delay-s", "0.05", *LEASED)
"""Its exchanges and updates take long enough to be hit."""
SETTINGS = RunSettings(
    run_id="run",
    steps=1_000_000,
    min_sites=3,
    data=DATA,
    time_limits="local",
    sync=SyncSettings(every=10, chunk_elements=1000, codec="int8"),
    outer=OuterSettings(learning_rate=0.7, momentum=0.5),
)
LIMIT_S = 100.0
TRIES = 20
"""To hit a phase that lasts some milliseconds: on a busy machine one is missed now and then."""
SIGNS_OF_A_BUG = ("Traceback", "never retrieved", "was destroyed")


def settings(every: int = 10, **changes: Any) -> RunSettings:
    """Those of this folder's tests, changed."""
    changed = replace(SETTINGS, **changes)
    return replace(changed, sync=replace(changed.sync, every=every))


LARGE = replace(SETTINGS, min_sites=2, sync=replace(SETTINGS.sync, every=4, chunk_elements=4096))
"""For the large worker. With chunks as small as those above a commit of three sites takes nearly two seconds of a
core."""


class ChaosRun(LocalRun):
    """A run that lasts until it is stopped. All sites start with the same `worker`."""

    tokens_a_sample = 1
    """As its workers count."""

    def __init__(
        self,
        folder: Path,
        run_settings: RunSettings = SETTINGS,
        worker: Sequence[str] = WORKER,
        program: Sequence[str] = GUARDED,
        *,
        secured: bool = False,
    ) -> None:
        super().__init__(folder, run_settings, program, secured=secured)
        self.worker = worker
        self.store = self.toml.with_name("run.db")
        self.killed: set[Process] = set()
        """On purpose; every other process must end well."""

    def begin(self, names: Iterable[str], num_commits: int = 1) -> Status:
        self.start_coordinator()
        for name in names:
            self.start_site(name)
        return self.wait_for_commits(num_commits)

    def start_site(self, name: str) -> Process:
        return self.start_node(name, self.worker)

    # --- faults

    def kill_site(self, name: str) -> None:
        """The node, with SIGKILL; its workers end with it."""
        self.kill_sites([name])

    def kill_sites(self, names: Iterable[str]) -> None:
        """All at once."""
        processes = [self.nodes[name] for name in names]
        self.killed.update(processes)
        for process in processes:
            process.popen.kill()
        for process in processes:
            process.wait(LIMIT_S)

    def kill_coordinator(self) -> None:
        assert self.coordinator is not None
        self.killed.add(self.coordinator)
        self.coordinator.kill()

    def kill_in_phase(self, name: str, phase: str, bring_back: Callable[[], object] | None = None) -> None:
        """Kills the site's node in that phase; the journal proves it. It is started again if it was missed."""
        for _ in range(TRIES):
            self.wait_for_phase(name, phase)
            self.kill_site(name)
            if self.journal(name, "phase")[-1]["phase"] == phase:
                return
            (bring_back or (lambda: self.start_site(name)))()
        raise AssertionError(f"{name} was never killed while {phase!r}")

    def kill_below(self, name: str, word: str) -> list[int]:
        """Every process below the node that is called so: `child.py` (the guard of a worker or of torchrun),
        `torch.distributed.run`, or the worker's script. Their ids."""
        below = descendants(self.nodes[name].popen.pid)
        found = [pid for pid in below if any(word in argument for argument in command_line(pid)[1:4])]
        for pid in found:
            with suppress(ProcessLookupError):  # it has ended with one of those before it
                os.kill(pid, signal.SIGKILL)
        return found

    @contextmanager
    def frozen(self, *processes: Process) -> Iterator[None]:
        """Stopped with all that descend from them, and going on after that."""
        pids = [pid for p in processes for pid in (p.popen.pid, *descendants(p.popen.pid))]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):  # ended by somebody else meanwhile
                    os.kill(pid, signal.SIGCONT)

    # --- awaiting

    def wait_for_phase(self, name: str, phase: str) -> None:
        """The next time that the site comes into it."""
        deadline = time.monotonic() + LIMIT_S
        with open(self.home(name) / "journal.jsonl", encoding="utf-8") as file:
            file.seek(0, os.SEEK_END)
            line = ""
            while time.monotonic() < deadline:
                line += file.readline()
                if not line.endswith("\n"):
                    time.sleep(0.001)
                    continue
                found = json.loads(line)
                if found["kind"] == "phase" and found["phase"] == phase:
                    return
                line = ""
        raise AssertionError(f"{name} did not come into phase {phase!r} within {LIMIT_S:g} s")

    def wait_for_journal(self, name: str, kind: str, count: int) -> None:
        """So many lines of that kind."""
        self.wait(lambda _: len(self.journal(name, kind)) >= count, LIMIT_S, f"{count} times {kind} at {name}")

    def wait_for_commits(self, more: int, timeout_s: float = LIMIT_S) -> Status:
        """So many more than there are now."""
        target = self.status()["last_commit"] + more
        return self.wait(lambda s: bool(s["last_commit"] >= target), timeout_s, f"commit {target}")

    def wait_for_contributors(self, names: Iterable[str], timeout_s: float = LIMIT_S) -> Status:
        """A commit of exactly these, of a sync that begins after this call: one that was under way may still count a
        site that is gone."""
        wanted, under_way = sorted(names), self.status()["last_commit"] + 1

        def there(status: Status) -> bool:
            new = [c for c in status["commits"] if c["commit"] > under_way]
            return any(sorted(c["contributors"]) == wanted for c in new)

        return self.wait(there, timeout_s, f"a commit of {wanted}")

    # --- the end

    def stop(self) -> None:
        """The sync that is open is the last."""
        admin.ask(self.store, "stop", reason="the test is over")

    def end_well(self, names: Iterable[str] | None = None, timeout_s: float = LIMIT_S) -> Status:
        """Stops the run, waits for these sites (default: all that run), and asserts that all is sound."""
        self.stop()
        left = sorted(n for n, p in self.nodes.items() if p not in self.killed) if names is None else sorted(names)
        codes = self.wait_all(timeout_s, left)
        assert all(code == 0 for code in codes.values()), codes
        return assert_sound(self, left)


def assert_sound(run: ChaosRun, holders: Sequence[str]) -> Status:
    """After the end of a run: what must hold whatever happened. `holders`: sites that took part to the end.

    The run is finished; every commit is there once; sites that report a commit report the same hash; the holders
    hold the last commit with the run's hash; every sample counts once; no process met a bug.
    """
    status = run.status()
    assert status["finished"], status["state"]
    last = status["last_commit"]
    numbers = [commit["commit"] for commit in status["commits"]]
    assert numbers == list(range(last - len(numbers) + 1, last + 1)), numbers
    hashes: dict[int, dict[str, set[str]]] = {}
    for name in run.nodes:
        for line in run.journal(name, "commit"):
            hashes.setdefault(line["commit"], {}).setdefault(name, set()).add(line["state_hash"])
    for number, reports in hashes.items():
        assert len(set.union(*reports.values())) == 1, f"commit {number}: {reports}"
        assert number <= last, f"{sorted(reports)} applied commit {number}, the log ends at {last}"
    assert any(len(reports) > 1 for reports in hashes.values()) or len(run.nodes) == 1, "no commit had two reports"
    assert status["attested_commit"] == last
    held = {site["name"]: (site["last_commit"], site["state_hash"]) for site in status["sites"]}
    assert {name: held[name] for name in holders} == dict.fromkeys(holders, (last, status["state_hash"]))
    assert_account_balances(status, run.tokens_a_sample)
    for process in run.processes:
        for index, text in enumerate(process.lines):
            is_bug = any(sign in text for sign in SIGNS_OF_A_BUG)
            assert not is_bug, "\n".join([f"{process.name}:", *process.lines[max(0, index - 3) : index + 40]])
    return status


def descendants(pid: int) -> list[int]:
    """Parents first; none if it has ended. What the harness alone has beside a node is none."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children = [int(child) for child in (thread / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            found += [child, *descendants(child)] if command_line(child)[: len(BESIDE_A_NODE)] != BESIDE_A_NODE else []
    return found


def command_line(pid: int) -> list[str]:
    """Empty of one that has ended, whether or not its parent knows."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.split("\0") if text else []
