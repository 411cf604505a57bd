"""What two hostile members cost three honest sites: commits a second beside them, and before they came.

Real processes, one run for each kind (mute: never ready; ready: exchanges nothing; waiting: as a reducer it only says
that it waits). The pace beside them is measured from the tenth commit after both are members on, as a ratio to the pace
of the same run without them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chaos import PLAIN_WORKER, ChaosRun, settings
from tests.harness.data_account import LEASED
from tests.harness.hostile import KINDS
from tests.harness.local_run import PLAIN, Status

HOSTILE_NODE = str(Path(__file__).parents[1] / "tests" / "workers" / "hostile_node.py")
PATIENCE_S = 300.0
SYNCS_BEFORE = 10
NUM_STEPS = 10


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks hostile", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--measured-s", type=float, default=60.0, help="each of the two paces")
    parser.add_argument("--window-s", type=float, default=1.0, help="of training between two syncs, at least")
    args = parser.parse_args(argv)
    print(f"three honest sites, {args.window_s:g} s of training a sync, preset local; {args.measured_s:g} s each")
    print(f"{'two that are':>12} {'alone, commits/s':>17} {'ten syncs later':>16} {'remains':>8}  honest sites evicted")
    for kind in args.kinds:
        alone, beside, evicted = measure(kind, args.measured_s, args.window_s)
        row = f"{kind:>12} {alone:>17.2f} {beside:>16.2f} {beside / alone:>8.0%}"
        print(f"{row}  {', '.join(evicted) or 'none'}", flush=True)
    return 0


def measure(kind: str, measured_s: float, window_s: float) -> tuple[float, float, list[str]]:
    """Commits a second without and beside them, and which honest sites were evicted."""
    worker = [sys.executable, str(PLAIN_WORKER), "--tensors", "a=300x40,b=10", *LEASED]
    worker += ["--step-delay-s", str(window_s / NUM_STEPS)]
    run_settings = replace(settings(min_sites=3), sync=SyncSettings(every=NUM_STEPS, chunk_elements=1000))
    with (
        tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder,
        ChaosRun(Path(folder), run_settings, worker, program=PLAIN) as run,
    ):
        run.begin("abc", SYNCS_BEFORE)
        alone = pace(run, measured_s)
        for name in "xy":
            run.start_node(name, worker, program=(HOSTILE_NODE, kind))
        run.wait(_are_members, PATIENCE_S, "both are members")
        run.wait_for_commits(SYNCS_BEFORE, PATIENCE_S)
        beside = pace(run, measured_s)
        assert run.coordinator is not None
        evicted = [name for name in "abc" if any(f"evicted {name} (" in line for line in run.coordinator.lines)]
    return alone, beside, evicted


def _are_members(status: Status) -> bool:
    return {site["name"] for site in status["sites"] if site["last_commit"] is not None} >= set("abcxy")


def pace(run: ChaosRun, seconds: float) -> float:
    """Commits a second from the next commit on."""
    first = run.wait_for_commits(1, PATIENCE_S)["last_commit"]
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        time.sleep(0.05)
    last = run.status()["last_commit"]
    return float(last - first) / (time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
