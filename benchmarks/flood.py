"""What floods of somebody without a certificate cost a run: commits a second and the coordinator's memory.

Real processes: a run with certificates on one core, the attacker on another one. Each flood is measured between two
times in which the attacker only burns its core, and its pace is a ratio to theirs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chaos import PLAIN_WORKER, settings
from tests.harness.data_account import LEASED
from tests.harness.floods import KINDS
from tests.harness.local_run import PLAIN, LocalRun
from tests.harness.sockets import free_address

SAMPLE_S = 0.05
LIMIT_S = 120.0
SETTLED = 10
"""Commits before anything is measured."""
OF_PAGE = "page"
LEAST_SHARE, MOST_BYTES = 0.9, 20e6
"""Of the pace, and of the memory; else the benchmark fails."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks flood", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[kind for kind in KINDS if kind != "burn"])
    parser.add_argument("--measured-s", type=float, default=20.0, help="each")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--window-s", type=float, default=0.05, help="of training between two syncs, at least")
    parser.add_argument("--of-node", action="store_true", help="at the port of a node, in place of the coordinator's")
    parser.add_argument("--node-port", type=int, help="of that node, for a firewall's rule; else any free one")
    parser.add_argument("--source", default="127.0.0.2", help="the attacker's address; that of the sites is 127.0.0.1")
    args = parser.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("needs two cores: one for the run, one for the attacker")
    os.sched_setaffinity(0, {cores[0]})
    worker = [sys.executable, str(PLAIN_WORKER), "--tensors", "a=300x40,b=10", *LEASED]
    worker += ["--step-delay-s", str(args.window_s)]
    run_settings = replace(settings(min_sites=args.sites), sync=SyncSettings(every=1, chunk_elements=1000))
    with (
        tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder,
        LocalRun(Path(folder), run_settings, PLAIN, secured=True) as run,
    ):
        page, peer = free_address(), f"127.0.0.1:{args.node_port}" if args.node_port else free_address()
        coordinator = run.start_coordinator(extra=["--http-listen", page])
        for number in range(args.sites):
            run.start_node(f"site-{number}", worker, extra=["--listen", peer] if number == 0 else [])
        run.wait(lambda status: status["last_commit"] >= SETTLED, LIMIT_S)
        process = run.nodes["site-0"] if args.of_node else coordinator
        where = peer if args.of_node else run.address

        def measured(kind: str) -> tuple[float, float]:
            attack = ["taskset", "-c", str(cores[1]), sys.executable, "-m", "tests.harness.floods"]
            attack += [kind, page if kind == OF_PAGE else where, args.source]
            return _measure(run, attack, args.measured_s, process.popen.pid)

        print(f"{args.sites} sites and coordinator on one core, the attacker on another; {args.measured_s:g} s each")
        print(f"{'flood':>14} {'commits/s':>10} {'burning':>8} {'remains':>8} {'memory, MB':>11}", flush=True)
        before = measured("burn")[0]
        failed = False
        for kind in args.kinds:
            found, grown = measured(kind)
            after = measured("burn")[0]
            burning, before = (before + after) / 2, after
            failed |= found < LEAST_SHARE * burning or grown > MOST_BYTES
            row = f"{kind:>14} {found:>10.2f} {burning:>8.2f} {found / burning:>8.0%} {grown / 1e6:>11.1f}"
            print(row, flush=True)
    return int(failed)


def _measure(run: LocalRun, attack: list[str], seconds: float, pid: int) -> tuple[float, float]:
    """Commits a second beside it, and by how many bytes that process was larger at most than before."""
    with _grown(pid) as grown:
        attacker = run.start(f"attacker-{len(run.processes)}", attack)
        attacker.wait_for_line("flooding", LIMIT_S)
        first, began = run.status()["last_commit"], time.monotonic()
        time.sleep(seconds)
        last, ended = run.status()["last_commit"], time.monotonic()
        attacker.kill()
    return (last - first) / (ended - began), grown[0]


@contextmanager
def _grown(pid: int) -> Iterator[list[float]]:
    first = resident_bytes(pid)
    most, is_over = [0.0], threading.Event()

    def look() -> None:
        while not is_over.wait(SAMPLE_S):
            most[0] = max(most[0], resident_bytes(pid) - first)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield most
    finally:
        is_over.set()
        looking.join()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
