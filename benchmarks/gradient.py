"""A step with gradient exchange beside one of torch's DistributedDataParallel over gloo: two sites, the same model on
the same links.

On loopback, and as root between network namespaces with limited links. The model is linear layers with a small batch,
so that a step is its exchange. Prints steps/s, and what a site's interface sends in the whole run, over its steps: the
state that the second site fetches at the start is in it. With `--layers 1 --width 16` it is the fixed cost of a step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from atoll.node.worker.optimizers import kind_of
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from benchmarks import netns
from tests.harness.local_run import PLAIN, LocalRun
from tests.harness.sockets import free_address

SITES = 2
WARM_UP_STEPS = 4
RANK = Path(__file__).parent / "gradient_rank.py"
LIMIT_S = 900.0
WAYS: dict[str, dict[str, Any]] = {
    "AdamW, fp32": {"strategy": "gradient", "codec": "fp32"},
    "AdamW, bf16": {"strategy": "gradient", "codec": "bf16"},
    "AdamW, int8": {"strategy": "gradient", "codec": "int8"},
    "1-bit Adam": {
        "strategy": "momentum", "warmup_commits": WARM_UP_STEPS - 2, "codec": "sign1", "error_feedback": 1.0,
        "error_feedback_down": 1.0,
    },
    "1-bit Adam, int4 down": {
        "strategy": "momentum", "warmup_commits": WARM_UP_STEPS - 2, "codec": "int4", "up": "sign1",
        "error_feedback": 1.0,
    },
    "0/1 Adam": {
        "strategy": "momentum", "warmup_commits": WARM_UP_STEPS - 2, "local_doubling": 1, "codec": "sign1",
        "error_feedback": 1.0, "error_feedback_down": 1.0,
    },
}  # fmt: skip
"""0/1 Adam soon has 16 steps of each site in one exchange: give it some hundred --steps."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gradient", description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24, help=f"counted, after {WARM_UP_STEPS} that are not")
    parser.add_argument("--mbit", type=int, nargs="*", default=[1000, 100], help="links to limit (root)")
    parser.add_argument("--only", nargs="*", choices=tuple(WAYS), default=list(WAYS), help="ways of exchange")
    args = parser.parse_args(argv)
    print(f"{args.layers * args.width**2} parameters, {SITES} sites, AdamW, {args.steps} steps")
    print(f"{'link':>12} {'exchange':>22} {'steps/s':>9} {'of DDP':>7} {'ms a step':>10} {'MB a step':>10}", flush=True)
    reason = netns.available() if args.mbit else ""
    for mbit in (None, *(args.mbit if not reason else ())):
        link = f"{mbit} Mbit/s" if mbit else "loopback"
        base = _print_row(link, "DDP, AdamW, fp32", _measure(args, mbit, None), None)
        for name in args.only:
            _print_row(link, name, _measure(args, mbit, name), base)
    if reason:
        print(f"links with a limit: not measured ({reason})")
    return 0


class Measured(NamedTuple):
    step_s: float
    sent_bytes: float
    """Through a site's interface from the start on, over all steps; 0 on loopback."""


def _print_row(link: str, name: str, measured: Measured, base: Measured | None) -> Measured:
    share = f"{base.step_s / measured.step_s:7.2f}" if base is not None else ""
    sent = f"{measured.sent_bytes / 1e6:10.2f}" if measured.sent_bytes else ""
    print(f"{link:>12} {name:>22} {1 / measured.step_s:9.2f} {share:>7} {1e3 * measured.step_s:10.1f} {sent:>10}")
    return measured


def _measure(args: argparse.Namespace, mbit: int | None, way: str | None) -> Measured:
    num_steps = WARM_UP_STEPS + args.steps
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
        hosts = stack.enter_context(netns.Hosts(SITES, mbit * 1_000_000)) if mbit else None
        traces = [folder / f"{i}.trace" for i in range(SITES)]
        model = ["--width", str(args.width), "--layers", str(args.layers), "--steps", str(num_steps)]
        commands = [[str(RANK), str(trace), *model] for trace in traces]
        before = [hosts.sent_bytes(i) for i in range(SITES)] if hosts else []
        if way is None:
            _ddp(hosts, commands)
        else:
            _atoll(folder, hosts, commands, way, num_steps)
        sent = sum(hosts.sent_bytes(i) - was for i, was in enumerate(before)) / SITES / num_steps if hosts else 0.0
        times = [list(map(float, trace.read_text().split())) for trace in traces]
        spans = [(t[num_steps - 1] - t[WARM_UP_STEPS - 1]) / args.steps for t in times]
        return Measured(max(spans), sent)


def _ddp(hosts: netns.Hosts | None, commands: list[list[str]]) -> None:
    address = f"{hosts.address(0)}:17701" if hosts else free_address()
    processes = []
    for rank, command in enumerate(commands):
        prefix = hosts.prefix(rank) if hosts else []
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": f"{netns.PREFIX}-i{rank}" if hosts else "lo"}
        with_ddp = [*prefix, sys.executable, *command, "--ddp", str(rank), str(SITES), address]
        processes.append(subprocess.Popen(with_ddp, env=environment))
    codes = [process.wait(LIMIT_S) for process in processes]
    if any(codes):
        raise SystemExit("a process of DistributedDataParallel failed; its error is above")


def _atoll(folder: Path, hosts: netns.Hosts | None, commands: list[list[str]], way: str, num_steps: int) -> None:
    settings = RunSettings(
        run_id="bench",
        steps=num_steps,
        min_sites=SITES,
        data="local",
        time_limits="lan",
        sync=SyncSettings(every=1, **WAYS[way]),
        outer=OuterSettings(optimizer="adamw", momentum=0.9),
    )
    with LocalRun(folder, settings, PLAIN) as run:
        run.start_coordinator(f"{hosts.bridge_address}:17700" if hosts else "")
        for i, command in enumerate(commands):
            worker = [*command, "--optimizer", kind_of(settings.sync, settings.outer).__name__]
            run.start_node("ab"[i], worker, launcher="python", prefix=hosts.prefix(i) if hosts else ())
        if any(run.wait_all(LIMIT_S).values()):
            raise SystemExit(run.story())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
