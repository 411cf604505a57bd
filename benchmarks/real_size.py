"""Two nodes with a model of real size on one machine: both commit, one is killed and catches up to the same state.

Beside it what each node had resident at the most, counted whole, in bytes a parameter: memory of its own, what it
shares with its worker, and what is mapped of its outer file. The worker's own copy, in place of a GPU's, is in a file.
Nothing is begun where memory or disk have no room for it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from atoll.node.daemon.shared_memory import memory_limit
from atoll.node.dataplane.footprint import footprint
from atoll.protocol.disk import Disk
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.text import byte_count
from benchmarks.memory import NOTHING, Resident, resident
from tests.harness.chaos import PLAIN_WORKER, ChaosRun
from tests.harness.local_run import PLAIN, Status

NAMES = ("a", "b")
SHAPE = (2048, 4096)
"""Of each matrix of the model."""
STEP_S = 5.0
LIMIT_S = 1800.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks real_size", description=__doc__)
    parser.add_argument("--parameters", type=int, default=512 << 20, help="rounded up to whole matrices of 8 Mi")
    parser.add_argument("--folder", type=Path, help="where the nodes have their homes (default: as for any other)")
    args = parser.parse_args(argv)
    num_matrices = -(-args.parameters // (SHAPE[0] * SHAPE[1]))
    num_parameters = num_matrices * SHAPE[0] * SHAPE[1]
    names = [f"w{number:04d}" for number in range(num_matrices)]
    settings = RunSettings(
        run_id="bench",
        steps=1_000_000,
        min_sites=1,
        data="local",
        time_limits="wan",
        sync=SyncSettings(every=1, log_commits=4, snapshots=0),
    )
    manifest = Manifest.canonical([TensorSpec(name=n, shape=SHAPE, dtype="F32", role=Role.TRAINABLE) for n in names])
    needs = footprint(Layout(manifest, settings.sync.chunk_elements), settings)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=args.folder)))
        resident_bytes = needs.memory_bytes - needs.outer_bytes
        lacking = [
            f"{byte_count(len(NAMES) * wanted)} of {what} are needed, {byte_count(free)} are free"
            for what, wanted, free in (
                ("memory (beside the outer state, which the kernel can write back)", resident_bytes, _free_memory()),
                ("disk", needs.disk_bytes, Disk().free_bytes(folder)),
            )
            if len(NAMES) * wanted > free
        ]
        if lacking:
            print(f"not measured: {'; '.join(lacking)}; give fewer --parameters")
            return 1
        tensors = ",".join(f"{name}={SHAPE[0]}x{SHAPE[1]}" for name in names)
        worker = [sys.executable, str(PLAIN_WORKER), "--tensors", tensors, "--step-s", str(STEP_S), "--mapped"]
        run = stack.enter_context(ChaosRun(folder, settings, worker, program=PLAIN))
        print(f"{num_parameters} parameters, int8, Nesterov, 2 sites of 1 thread, steps of {STEP_S:g} s", flush=True)
        _play(run, num_parameters)
    return 0


def _free_memory() -> int:
    return memory_limit().available_bytes


def _play(run: ChaosRun, num_parameters: int) -> None:
    largest = dict.fromkeys(NAMES, NOTHING)

    def until(condition: Callable[[Status], bool], what: str) -> Status:
        def sampled(status: Status) -> bool:
            for name in NAMES:
                largest[name] = max(largest[name], resident(run.nodes[name].popen.pid), key=lambda found: found.whole)
            return condition(status)

        started = time.monotonic()
        status = run.wait(sampled, LIMIT_S, what)
        newest = status["last_commit"]
        print(f"{time.monotonic() - started:8.1f} s  {what} (commit {newest})", flush=True)
        return status

    def contributed(names: str, beyond: int) -> Callable[[Status], bool]:
        return lambda status: any(
            sorted(line["contributors"]) == sorted(names) for line in status["commits"] if line["commit"] > beyond
        )

    run.start_coordinator()
    for name in NAMES:
        run.start_site(name)
    status = until(contributed("ab", 0), "b has fetched the state of a, and both have contributed to a commit")
    killed = run.nodes["b"]
    run.killed.add(killed)
    killed.popen.kill()
    killed.wait(LIMIT_S)
    status = until(contributed("a", status["last_commit"] + 1), "b was killed, and a has committed alone")
    run.start_site("b")
    status = until(contributed("ab", status["last_commit"]), "b has caught up, and both have contributed to a commit")
    both = max(line["commit"] for line in status["commits"] if sorted(line["contributors"]) == ["a", "b"])
    until(lambda _: len(run.hashes(both)) == len(NAMES), f"both have applied commit {both}")
    hashes = run.hashes(both)
    if len(set(hashes.values())) != 1:
        raise SystemExit(f"commit {both}: the states differ: {hashes}\n{run.story()}")
    print(f"commit {both}: both have the state {hashes['a'][:16]}")
    for line in run.journal("a", "commit"):
        print(f"  a, commit {line['commit']}: exchanged in {line['exchange_s']:.1f} s")
    for name, found in largest.items():
        parts = ", ".join(f"{getattr(found, part) / num_parameters:.2f} {part}" for part in Resident._fields)
        print(f"{name}: {found.whole / num_parameters:.2f} bytes a parameter resident at the most: {parts}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
