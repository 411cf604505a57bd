"""A coordinator on one core with many simulated sites: CPU, memory, lag, and how long it takes to plan and to commit.

The sites are clients in one process, over real gRPC on loopback. Ready to Plan: from the last Ready of a sync until a
site has its plan; Done to Commit alike.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.time_limits import time_limits
from atoll.protocol.transport import Handshake
from atoll.protocol.trust.invites import from_text
from tests.harness.load_sites import Fleet, joined, manifest, name_of
from tests.harness.local_run import PLAIN, LocalRun

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks load", description=__doc__)
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--syncs", type=int, default=10)
    parser.add_argument("--parameters", type=int, default=1 << 30, help="of the model, in chunks of 1 Mi")
    parser.add_argument("--train-s", type=float, default=5.0, help="from a commit to Ready")
    parser.add_argument("--secured", action="store_true", help="with certificates: each site joins first")
    parser.add_argument("--time-limits", default="lan", help="preset: heartbeats come four times a lease")
    args = parser.parse_args(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    cores = sorted(os.sched_getaffinity(0))
    settings = RunSettings(
        run_id="load",
        max_sites=max(args.sites, RunSettings(run_id="load").max_sites),
        steps=args.syncs,
        min_sites=args.sites,
        data="local",
        time_limits=args.time_limits,
        sync=SyncSettings(every=1),
    )
    with (
        tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder,
        LocalRun(Path(folder), settings, PLAIN, secured=args.secured) as run,
    ):
        # All of them come from loopback.
        extra = ["--connections-per-address", str(2 * args.sites)] if args.secured else []
        coordinator = run.start_coordinator(prefix=["taskset", "-c", str(cores[0])], extra=extra)
        os.sched_setaffinity(0, set(cores[1:] or cores))
        fleet = Fleet(
            address=run.address,
            run_id="load",
            manifest=manifest(args.parameters),
            heartbeat_s=time_limits(args.time_limits).heartbeat_s,
            train_s=args.train_s,
            handshakes=asyncio.run(_invited(run, args.sites)) if args.secured else {},
        )
        started, before_s = time.monotonic(), cpu_s(coordinator.popen.pid)
        joined_s, joined_cpu_s = asyncio.run(_measure(fleet, args.sites, coordinator.popen.pid, started))
        whole_s, used_s = time.monotonic() - started, cpu_s(coordinator.popen.pid) - before_s
        status = run.status()
        print(f"{args.sites} sites, {args.syncs} syncs, {args.parameters >> 20} chunks, {len(cores)} cores in all")
        print(f"joins: {args.sites} in {joined_s:.1f} s, {joined_cpu_s - before_s:.1f} s of the coordinator's CPU")
        syncs_s = whole_s - joined_s
        sync_cpu_s = used_s - (joined_cpu_s - before_s)
        print(
            f"syncs: {args.syncs} in {syncs_s:.1f} s, {sync_cpu_s:.1f} s of CPU, {sync_cpu_s / syncs_s:.0%} of a core, "
            f"heartbeats included ({args.sites / fleet.heartbeat_s:.0f} and more a second)"
        )
        for name, values in (("Ready to Plan", fleet.ready_to_plan_s()), ("Done to Commit", fleet.done_to_commit_s())):
            print(f"{name}: p50 {percentile(values, 50):.3f} s, p99 {percentile(values, 99):.3f} s")
        print(f"received by a site and sync: {fleet.received_bytes / args.sites / args.syncs / 1000:.1f} kB")
        lag = status["event_loop"]
        print(f"lag of its event loop: 99.9 % within {lag['lag_p999_s']:.3f} s, at most {lag['worst_lag_s']:.3f} s")
        print(f"memory of the coordinator: {peak_mib(coordinator.popen.pid):.0f} MiB")
        print(f"commits: {status['last_commit']}, evicted: {status['num_evicted']}, attempts: {status['num_attempts']}")
        sound = status["finished"] and status["last_commit"] == args.syncs and status["num_evicted"] == 0
        return 0 if sound else 1


async def _invited(run: LocalRun, num_sites: int) -> dict[str, Handshake]:
    return {name: await joined(from_text(run.invite(name).read_text())) for name in map(name_of, range(num_sites))}


async def _measure(fleet: Fleet, num_sites: int, pid: int, started: float) -> tuple[float, float]:
    """Runs all of it; when the first sync opened, and the coordinator's CPU until then."""
    joined = asyncio.create_task(_first_ready(fleet, pid, started))
    await fleet.run(num_sites)
    return await joined


async def _first_ready(fleet: Fleet, pid: int, started: float) -> tuple[float, float]:
    while not fleet.last_ready:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return time.monotonic() - started - fleet.train_s, cpu_s(pid)


def percentile(values: list[float], percent: int) -> float:
    return values[min(len(values) * percent // 100, len(values) - 1)]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def peak_mib(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
