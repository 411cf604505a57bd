"""Memory of a node (proportional set size) for N parameters, beside the formula of docs/memory.md.

Three sites, int8, Nesterov. The largest of all samples of all nodes, taken while they sync.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from benchmarks.sync import NAMES, WORKER
from tests.harness.local_run import PLAIN, LocalRun, Status

BYTES_A_PARAMETER = 20


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    parser.add_argument("--parameters", type=int, nargs="*", default=[1 << 20, 16 << 20, 64 << 20])
    args = parser.parse_args(argv)
    print(f"{'parameters':>12} {'PSS MiB':>9} {'bytes a parameter beyond the first row':>40} {'goal':>5}")
    first: tuple[int, int] | None = None
    for num_parameters in args.parameters:
        pss_bytes = _largest_pss(num_parameters)
        slope = ""
        if first is not None:
            slope = f"{(pss_bytes - first[1]) / (num_parameters - first[0]):.1f}"
        first = first or (num_parameters, pss_bytes)
        print(f"{num_parameters:12d} {pss_bytes / 2**20:9.1f} {slope:>40} {BYTES_A_PARAMETER:5d}")
        sys.stdout.flush()
    return 0


def _largest_pss(num_parameters: int) -> int:
    settings = RunSettings(
        run_id="bench",
        steps=4,
        min_sites=len(NAMES),
        data="local",
        time_limits="lan",
        sync=SyncSettings(every=1, log_commits=2, snapshots=0),
    )
    worker = [sys.executable, str(WORKER), "--tensors", f"w={num_parameters}"]
    largest = 0
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name, LocalRun(Path(name), settings, PLAIN) as run:
        run.start_coordinator()
        for site in NAMES:
            run.start_node(site, worker)

        def sample(status: Status) -> bool:
            nonlocal largest
            for process in run.nodes.values():
                largest = max(largest, _pss_bytes(process.popen.pid))
            return bool(status["finished"])

        run.wait(sample, 600, "the end of the run")
        if any(run.wait_all(60).values()):
            raise SystemExit(run.story())
    return largest


def _pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0
