"""How soon a banned site is out of a run with certificates: real processes.

From what `atoll ban` asks of the coordinator to the end of that site's node, and to the first commit without the site.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from atoll.cli.config import default_store
from atoll.coordinator import admin
from atoll.protocol.errors import RefusedError
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chaos import PLAIN_WORKER, settings
from tests.harness.data_account import LEASED
from tests.harness.local_run import PLAIN, LocalRun

LIMIT_S = 60.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks bans", description=__doc__)
    parser.add_argument("--parameters", type=int, default=1 << 20)
    parser.add_argument("--window-s", type=float, default=0.3, help="of training between two syncs, at least")
    parser.add_argument("--times", type=int, default=7)
    args = parser.parse_args(argv)
    worker = [sys.executable, str(PLAIN_WORKER), "--tensors", f"w={args.parameters}", *LEASED]
    worker += ["--step-delay-s", str(args.window_s)]
    run_settings = replace(settings(min_sites=2), sync=SyncSettings(every=1))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
        run = stack.enter_context(LocalRun(folder, run_settings, PLAIN, secured=True))
        run.start_coordinator()
        for name in "ab":
            run.start_node(name, worker)
        measured = [_measure(run, f"c{number}", worker) for number in range(args.times)]
    print(f"3 sites with certificates, {args.parameters} parameters, {args.times} sites banned one by one")
    for what, values in zip(
        ("to the end of its node", "to a commit without it"), zip(*measured, strict=True), strict=True
    ):
        print(f"{what}: {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")
    return 0


def _measure(run: LocalRun, name: str, worker: list[str]) -> tuple[float, float]:
    node = run.start_node(name, worker)
    run.wait(lambda s: bool(s["commits"]) and name in s["commits"][-1]["contributors"], LIMIT_S, f"{name} contributes")
    asked_at, asked_wall_s = time.monotonic(), time.time()
    admin.ask(default_store(run.toml), "ban", name=name, reason="to measure it")
    code = node.wait(LIMIT_S)
    ended_s = time.monotonic() - asked_at
    if code != RefusedError.exit_code:
        raise SystemExit(f"{name} ended with {code}, not as one that is banned:\n" + "\n".join(node.lines[-20:]))
    status = run.wait(
        lambda s: any((c["time"] or 0) > asked_wall_s and name not in c["contributors"] for c in s["commits"]), LIMIT_S
    )
    without = [
        c["time"] for c in status["commits"] if (c["time"] or 0) > asked_wall_s and name not in c["contributors"]
    ]
    return ended_s, min(without) - asked_wall_s


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
