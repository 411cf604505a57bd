"""Memory of a node for N parameters, beside the formula of docs/memory.md.

Three sites, int8, Nesterov. The largest of all samples of all nodes, taken while they sync, counted whole: memory of
its own, what it shares with its worker, and what is mapped of files. Of the bytes a parameter the same, in this order.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from benchmarks.sync import NAMES, WORKER
from tests.harness.local_run import PLAIN, LocalRun, Status


class Resident(NamedTuple):
    """Of a process, in bytes."""

    own: int
    shared: int
    """SNAPSHOT and PUBLISH."""
    mapped: int
    """Of files: the outer state, which the kernel can write back and drop, and libraries."""

    @property
    def whole(self) -> int:
        return sum(self)


NOTHING = Resident(0, 0, 0)
BYTES_A_PARAMETER = 14


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    parser.add_argument("--parameters", type=int, nargs="*", default=[1 << 20, 16 << 20, 64 << 20])
    args = parser.parse_args(argv)
    print(f"{'parameters':>12} {'MiB':>9} {'bytes a parameter beyond the first row':>48} {'goal':>5}")
    first: tuple[int, Resident] | None = None
    for num_parameters in args.parameters:
        found = _largest(num_parameters)
        slope = ""
        if first is not None:
            more = num_parameters - first[0]
            parts = ", ".join(f"{(now - was) / more:.2f}" for now, was in zip(found, first[1], strict=True))
            slope = f"{(found.whole - first[1].whole) / more:.2f} ({parts})"
        first = first or (num_parameters, found)
        print(f"{num_parameters:12d} {found.whole / 2**20:9.1f} {slope:>48} {BYTES_A_PARAMETER:5d}")
        sys.stdout.flush()
    return 0


def _largest(num_parameters: int) -> Resident:
    settings = RunSettings(
        run_id="bench",
        steps=4,
        min_sites=len(NAMES),
        data="local",
        time_limits="lan",
        sync=SyncSettings(every=1, log_commits=2, snapshots=0),
    )
    worker = [sys.executable, str(WORKER), "--tensors", f"w={num_parameters}"]
    largest = NOTHING
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name, LocalRun(Path(name), settings, PLAIN) as run:
        run.start_coordinator()
        for site in NAMES:
            run.start_node(site, worker)

        def sample(status: Status) -> bool:
            nonlocal largest
            for process in run.nodes.values():
                largest = max(largest, resident(process.popen.pid), key=lambda found: found.whole)
            return bool(status["finished"])

        run.wait(sample, 600, "the end of the run")
        if any(run.wait_all(60).values()):
            raise SystemExit(run.story())
    return largest


def resident(pid: int) -> Resident:
    """Nothing if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return NOTHING
    found = dict(re.findall(r"^(Rss\w+):\s+(\d+) kB", text, re.MULTILINE))
    return Resident(*(int(found.get(name, 0)) * 1024 for name in ("RssAnon", "RssShmem", "RssFile")))
