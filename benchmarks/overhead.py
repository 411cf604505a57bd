"""The training loop with atoll attached, between syncs, against the same loop without it.

Alternating blocks in one process under a real node and coordinator; the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import PLAIN, LocalRun

WORKER = Path(__file__).parent / "overhead_worker.py"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks overhead", description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--block-steps", type=int, default=8)
    args = parser.parse_args(argv)
    settings = RunSettings(
        run_id="bench", steps=1 << 20, data="local", time_limits="local", sync=SyncSettings(every=1 << 20)
    )
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name, LocalRun(Path(name), settings, PLAIN) as run:
        result = Path(name) / "pairs.json"
        run.start_coordinator()
        run.start_node("a", [str(WORKER), str(result), str(args.pairs), str(args.block_steps)], launcher="python")
        if run.wait_all(600)["a"] != 0:
            raise SystemExit(run.story())
        pairs = json.loads(result.read_text())
    ratios = sorted(without / attached for attached, without in pairs)
    step_s = statistics.median(without for _, without in pairs) / args.block_steps
    print(
        f"default model, one thread, {len(pairs)} pairs of blocks of {args.block_steps} steps of {step_s * 1e3:.0f} ms"
    )
    print("steps/s with atoll over steps/s without, between syncs:")
    print(f"median {statistics.median(ratios):.3f}  (min {ratios[0]:.3f}, max {ratios[-1]:.3f}; goal: at least 0.97)")
    return 0
