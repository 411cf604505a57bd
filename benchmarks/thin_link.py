"""Steps a second of four sites on fast links, with and without a fifth one on a thin link, and what of its work counts.

Each site is in a network namespace whose link is limited, which needs root. Steps of fixed length, a timer, so that
the machine is no bottleneck. The fifth site comes and goes, so that both are measured in turns; then its link becomes
like the others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from benchmarks import netns
from tests.harness.chaos import PLAIN_WORKER
from tests.harness.local_run import PLAIN, LocalRun

FAST = "abcd"
THIN = "thin"
TOKENS_A_STEP = 5
LIMIT_S = 240.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks thin_link", description=__doc__)
    parser.add_argument("--parameters", type=int, default=120_000)
    parser.add_argument("--every", type=int, default=20, help="H, inner steps between two syncs")
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--fast-mbit", type=float, default=100.0)
    parser.add_argument("--thin-mbit", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=1, help="with both in each")
    parser.add_argument("--commits", type=int, default=8, help="counted without the thin site")
    args = parser.parse_args(argv)
    if reason := netns.available():
        print(f"not measured: {reason}", file=sys.stderr)
        return 1
    settings = RunSettings(
        run_id="bench",
        steps=1 << 30,
        min_sites=len(FAST),
        data="local",
        time_limits="lan",
        sync=SyncSettings(every=args.every, chunk_elements=1 << 13),
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
        hosts = stack.enter_context(netns.Hosts(len(FAST) + 1, int(args.fast_mbit * 1e6)))
        run = stack.enter_context(LocalRun(folder, settings, PLAIN))
        _measure(_Bench(run, hosts, args), args)
    return 0


class _Bench:
    def __init__(self, run: LocalRun, hosts: netns.Hosts, args: argparse.Namespace) -> None:
        self.run, self.hosts = run, hosts
        self.commits: list[dict[str, Any]] = []
        """All of them: the status has the newest."""
        tensors = f"w={args.parameters}"
        self._worker = [sys.executable, str(PLAIN_WORKER), "--tensors", tensors, "--step-s", str(args.step_s)]
        self._worker += ["--tokens", str(TOKENS_A_STEP)]
        run.start_coordinator(f"{hosts.bridge_address}:0")
        for host, name in enumerate(FAST):
            run.start_node(name, self._traced(name), prefix=hosts.prefix(host))

    def _traced(self, name: str) -> list[str]:
        return [*self._worker, "--trace", str(self.run.folder / f"{name}.jsonl")]

    def comes(self) -> None:
        self.run.start_node(THIN, self._traced(THIN), prefix=self.hosts.prefix(len(FAST)))

    def goes(self) -> None:
        self.run.nodes[THIN].kill()  # what it has trained since its last turn is of no use here

    def look(self) -> dict[str, Any]:
        """The status now."""
        status = self.run.status()
        newest = self.commits[-1]["commit"] if self.commits else 0
        self.commits += [c for c in status["commits"] if c["commit"] > newest]
        return status

    def until(self, num_commits: int) -> None:
        """So many more."""
        goal = len(self.commits) + num_commits
        self._wait(lambda _: len(self.commits) >= goal, f"{num_commits} more commits")

    def until_turn(self) -> int:
        """The thin site contributes after it has rested: the place of that commit."""
        first = len(self.commits)

        def turns() -> list[int]:
            later = range(max(first, 1), len(self.commits))
            return [i for i in later if self._has_thin(i) and not self._has_thin(i - 1)]

        self._wait(lambda _: bool(turns()), "a turn of the thin site")
        return turns()[0]

    def until_it_contributes_always(self, num_commits: int) -> None:
        """To so many commits in a row."""
        self._wait(
            lambda _: all(self._has_thin(i) for i in range(len(self.commits) - num_commits, len(self.commits))),
            "the site contributes to every sync",
        )

    def _has_thin(self, place: int) -> bool:
        return THIN in self.commits[place]["contributors"]

    def _wait(self, condition: Any, what: str) -> None:
        self.run.wait(condition, LIMIT_S, what, self.look)

    def steps_per_s(self, first: int, last: int) -> float:
        a, b = self.commits[first], self.commits[last]
        return float((b["run_step"] - a["run_step"]) / (b["time"] - a["time"]))

    def share(self, first: int, last: int) -> float:
        """Of the tokens that count between two commits: those of the thin site."""
        a, b = self.commits[first], self.commits[last]
        tokens, num_steps = b["run_tokens"] - a["run_tokens"], b["run_step"] - a["run_step"]
        return float(1 - len(FAST) * TOKENS_A_STEP * num_steps / tokens)

    def every(self) -> int:
        return next(int(s["contributes_every"]) for s in self.look()["sites"] if s["name"] == THIN)


def _measure(bench: _Bench, args: argparse.Namespace) -> None:
    thin_host = len(FAST)
    ratios = []
    bench.until(2)
    for _ in range(args.rounds):
        first = len(bench.commits) - 1
        bench.until(args.commits)
        without = bench.steps_per_s(first, len(bench.commits) - 1)
        print(f"four sites: {without:.3f} steps/s", flush=True)
        bench.hosts.set_rate(thin_host, int(args.thin_mbit * 1e6))
        bench.comes()
        first = bench.until_turn()
        last = bench.until_turn()
        while last - first < bench.every():  # what turns cost is still being learnt
            first, last = last, bench.until_turn()
        beside = bench.steps_per_s(first, last)
        ratios.append(beside / without)
        print(
            f"and one at {args.thin_mbit:g} Mbit/s among {args.fast_mbit:g}: {beside:.3f} steps/s from one turn to the "
            f"next, {last - first} commits; it contributes to one of {bench.every()}, and "
            f"{100 * bench.share(first, last):.1f} % of the tokens that count are its own",
            flush=True,
        )
        before = len(bench.commits)
        at = time.monotonic()
        bench.hosts.set_rate(thin_host, int(args.fast_mbit * 1e6))
        bench.until_it_contributes_always(4)
        print(
            f"its link is like the others: {time.monotonic() - at:.1f} s and {len(bench.commits) - before} commits "
            "until it has contributed to four in a row",
            flush=True,
        )
        bench.goes()
        bench.until(3)  # until the others have noticed
    ratio = statistics.median(ratios)
    print(f"step rate of the four beside the thin link over without: {ratio:.3f}  (goal: at least 0.9)")
