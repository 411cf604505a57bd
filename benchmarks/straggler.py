"""The step rate of a run with a site that is half as fast, against the same run before it came and after it left.

Three sites on loopback with workers that sleep instead of computing, so that the machine is no bottleneck.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chaos import PLAIN_WORKER
from tests.harness.local_run import PLAIN, LocalRun

SETTLED_COMMITS = 3
"""Not counted after somebody came or went."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks straggler", description=__doc__)
    parser.add_argument("--commits", type=int, default=8, help="counted in each of the three parts")
    parser.add_argument("--every", type=int, default=40, help="H, inner steps between two syncs")
    parser.add_argument("--step-s", type=float, default=0.1, help="a step of the fast sites")
    parser.add_argument("--slower", type=float, default=2.0, help="so many times longer a step of the slow one takes")
    args = parser.parse_args(argv)
    settings = RunSettings(
        run_id="bench",
        steps=1 << 30,
        min_sites=2,
        data="local",
        time_limits="local",
        sync=SyncSettings(every=args.every, log_commits=32),
    )
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder, LocalRun(Path(folder), settings, PLAIN) as run:
        run.start_coordinator()
        for name in "ab":
            run.start_node(name, _worker(args.step_s))
        before = _part(run, args, "two sites")
        run.start_node("slow", _worker(args.slower * args.step_s))
        run.wait(lambda s: "slow" in s["commits"][-1]["contributors"], _limit_s(args), "the slow site contributes")
        during = _part(run, args, f"and one that takes {args.slower:g} times as long")
        run.nodes["slow"].interrupt()
        run.nodes["slow"].wait(_limit_s(args))
        after = _part(run, args, "two sites again")
        ratio = during / ((before + after) / 2)
        print(f"step rate with the slow site over without: {ratio:.3f}  (goal: at least 0.95)")
    return 0


def _worker(step_s: float) -> list[str]:
    return [sys.executable, str(PLAIN_WORKER), "--tensors", "a=300x40,b=10", "--step-delay-s", str(step_s)]


def _limit_s(args: argparse.Namespace) -> float:
    return 60 + 3 * (args.commits + SETTLED_COMMITS) * args.every * args.step_s * args.slower


def _part(run: LocalRun, args: argparse.Namespace, title: str) -> float:
    """Inner steps a second of the run, over the next commits."""
    first = (run.status()["last_commit"] if run.status()["started"] else 0) + SETTLED_COMMITS
    status = run.wait(lambda s: bool(s["last_commit"] >= first + args.commits), _limit_s(args))
    commits: dict[int, dict[str, Any]] = {c["commit"]: c for c in status["commits"]}
    steps_per_s = args.every * args.commits / (commits[first + args.commits]["time"] - commits[first]["time"])
    counted = [commits[first + 1 + i] for i in range(args.commits)]
    slow = [c["tokens"] for c in counted if "slow" in c["contributors"]]
    print(f"{title}: {steps_per_s:.3f} steps/s over {args.commits} commits, the slow site in {len(slow)} of them")
    sys.stdout.flush()
    return float(steps_per_s)
