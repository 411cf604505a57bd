"""What the loss of one of three sites costs the others: real processes, kill -9 and SIGSTOP, in several phases.

From the loss to the next commit, and how much longer the time between two commits was than it is undisturbed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chaos import PLAIN_WORKER, ChaosRun, settings
from tests.harness.data_account import LEASED
from tests.harness.local_run import PLAIN, Status

PATIENCE_S = 120.0
FAULTS = (("kill -9", "training"), ("kill -9", "exchanging"), ("SIGSTOP", "training"), ("SIGSTOP", "exchanging"))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks recovery", description=__doc__)
    parser.add_argument("--parameters", type=int, default=4 << 20)
    parser.add_argument("--window-s", type=float, default=0.3, help="of training between two syncs, at least")
    parser.add_argument("--times", type=int, default=5, help="each fault")
    parser.add_argument("--undisturbed", type=int, default=15, help="commits to compare with")
    args = parser.parse_args(argv)
    worker = [sys.executable, str(PLAIN_WORKER), "--tensors", f"w={args.parameters}", *LEASED]
    worker += ["--step-delay-s", str(args.window_s)]
    run_settings = replace(settings(min_sites=3), sync=SyncSettings(every=1))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
        run = stack.enter_context(ChaosRun(folder, run_settings, worker, program=PLAIN))
        run.begin("abc")
        run.wait_for_contributors("abc")
        names = (f"c{number}" for number in count(1))
        times = _times(run.wait_for_commits(args.undisturbed, PATIENCE_S))[-args.undisturbed :]
        normal_s = statistics.median(b - a for a, b in pairwise(times))
        exchange_s = statistics.median(line["exchange_s"] for line in run.journal("a", "commit")[-args.undisturbed :])
        print(f"3 sites, {args.parameters} parameters, int8, preset local: a commit every {normal_s:.2f} s, "
              f"exchange {exchange_s:.2f} s, {args.times} times each")  # fmt: skip
        print(f"{'fault':>8} {'in phase':>11} {'to next commit s':>25} {'window longer by s':>25}")
        run.kill_site("c")
        run.wait_for_contributors("ab")
        for fault, phase in FAULTS:
            _print_row(fault, phase, [_measure(run, next(names), fault, phase) for _ in range(args.times)], normal_s)
        run.end_well(timeout_s=PATIENCE_S)
    return 0


def _measure(run: ChaosRun, name: str, fault: str, phase: str) -> tuple[float, float]:
    """From the loss of a third site to the next commit, and between the commits around it. The site is new each time:
    one that is lost in exchanges again and again contributes more and more rarely."""
    run.start_site(name)
    run.wait_for_contributors(["a", "b", name], PATIENCE_S)
    run.wait_for_commits(2, PATIENCE_S)
    run.wait_for_phase(name, phase)
    lost_at = time.time()
    if fault == "kill -9":
        run.kill_site(name)
        around = _around(run, lost_at)
    else:
        with run.frozen(run.nodes[name]):
            around = _around(run, lost_at)
        run.kill_site(name)
    return around[1] - lost_at, around[1] - around[0]


def _around(run: ChaosRun, lost_at: float) -> tuple[float, float]:
    """When the last commit before and the first after were decided; the coordinator is on the same machine."""
    status = run.wait(lambda s: _times(s)[-1] > lost_at, PATIENCE_S, "a commit after the loss")
    times = _times(status)
    after = next(i for i, t in enumerate(times) if t > lost_at)
    return times[after - 1], times[after]


def _times(status: Status) -> list[float]:
    return [commit["time"] for commit in status["commits"] if commit["time"]]  # none until it is stored


def _print_row(fault: str, phase: str, measured: list[tuple[float, float]], normal_s: float) -> None:
    texts = []
    for values in ([m[0] for m in measured], [m[1] - normal_s for m in measured]):
        texts.append(f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
    print(f"{fault:>8} {phase:>11} {texts[0]:>25} {texts[1]:>25}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
