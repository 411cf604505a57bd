"""One run of `utilization.py`: three nodes in namespaces with limited links, their workers' steps, their bytes."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.settings import RunSettings
from benchmarks import netns
from benchmarks.utilization_figures import NUM_SITES, Counted, Figures, Step, figures
from tests.harness.local_run import PLAIN, LocalRun

NAMES = "abc"
WARM_UP_WINDOWS = 1
COUNT_EVERY_S = 0.02
START_LIMIT_S = 120.0
PATIENCE = 4
"""A run that takes so many times as long as its steps has failed."""


@dataclass(frozen=True, slots=True)
class Trained:
    command: Sequence[str]
    """Of a site's worker; it is told by `--trace` where it writes a line for each step."""
    launcher: str
    sizes: Sequence[int]
    """Elements of each tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    every: int
    """Inner steps of a window."""
    length_s: float
    num_counted: int
    """After one that is not."""

    @property
    def first(self) -> int:
        return WARM_UP_WINDOWS * self.every

    @property
    def last(self) -> int:
        return self.first + self.num_counted * self.every


def measure(settings: RunSettings, trained: Trained, bits_per_s: int, windows: Windows, rtt_s: float = 0.0) -> Figures:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
        hosts = stack.enter_context(netns.Hosts(NUM_SITES, bits_per_s, rtt_s=rtt_s))
        run = stack.enter_context(LocalRun(folder, settings, PLAIN))
        run.start_coordinator(f"{hosts.bridge_address}:0")
        traces = [folder / f"{name}.jsonl" for name in NAMES]
        for i, (name, trace) in enumerate(zip(NAMES, traces, strict=True)):
            command = [*trained.command, "--trace", str(trace)]
            run.start_node(name, command, launcher=trained.launcher, prefix=hosts.prefix(i))
        with _counting(hosts) as links:
            limit_s = START_LIMIT_S + PATIENCE * (windows.num_counted + WARM_UP_WINDOWS) * windows.length_s
            run.wait(lambda _: all(_num_steps(t) >= windows.last for t in traces), limit_s, "the last window")
        commits = run.status()["commits"]
        for node in run.nodes.values():
            node.kill()  # there is nothing to be saved
        if lacking := [c["commit"] for c in commits[1:] if len(c["contributors"]) < NUM_SITES]:
            raise SystemExit(f"commits {lacking} are not of all sites: the run measures something else\n{run.story()}")
        return figures([_steps(t) for t in traces], links, windows.first, windows.last, windows.length_s)


@contextmanager
def _counting(hosts: netns.Hosts) -> Iterator[list[list[Counted]]]:
    """What each host's interface has sent, again and again."""
    links: list[list[Counted]] = [[] for _ in range(hosts.num_hosts)]
    is_over = threading.Event()

    def count() -> None:
        while not is_over.wait(COUNT_EVERY_S):
            for host, counted in enumerate(links):
                counted.append((time.monotonic(), hosts.sent_bytes(host)))

    counter = threading.Thread(target=count, daemon=True)
    counter.start()
    try:
        yield links
    finally:
        is_over.set()
        counter.join()


def _steps(trace: Path) -> list[Step]:
    lines = [json.loads(line) for line in trace.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [Step(step=x["step"], at_s=x["at_s"], train_s=x["train_s"]) for x in lines if x["event"] == "step"]


def _num_steps(trace: Path) -> int:
    steps = _steps(trace) if trace.exists() else []
    return steps[-1].step if steps else 0
