"""The built-in trainer on ranks that share the model, beside a loop that is written by hand with FSDP2.

Both in the same processes, under a real node, with a copy of the model each; alternating blocks of steps, the median of
the pairs' ratios. The built-in one draws its batches from leases, reports its steps and clips with the norm over all
meshes; the other one takes the same batch each time and clips with torch's own function.
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

RANK = Path(__file__).parent / "fsdp2_rank.py"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fsdp2", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--block-steps", type=int, default=8)
    args = parser.parse_args(argv)
    settings = RunSettings(
        run_id="bench", steps=1 << 20, data="local", time_limits="local", sync=SyncSettings(every=1 << 20)
    )
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name, LocalRun(Path(name), settings, PLAIN) as run:
        result = Path(name) / "pairs.json"
        run.start_coordinator()
        script = [str(RANK), str(result), str(args.pairs), str(args.block_steps)]
        run.start_node("a", script, launcher="python", extra=["--ranks", str(args.ranks)])
        if run.wait_all(900)["a"] != 0:
            raise SystemExit(run.story())
        pairs = json.loads(result.read_text())
    ratios = sorted(by_hand / built_in for built_in, by_hand in pairs)
    step_s = statistics.median(by_hand for _, by_hand in pairs) / args.block_steps
    print(f"default model, dp_shard = {args.ranks}, {len(pairs)} pairs of blocks of {args.block_steps} steps of "
          f"{step_s * 1e3:.0f} ms")  # fmt: skip
    print("steps/s of the built-in trainer over those of the loop by hand, between syncs:")
    print(f"median {statistics.median(ratios):.3f}  (min {ratios[0]:.3f}, max {ratios[-1]:.3f}; goal: at least 0.97)")
    return 0
