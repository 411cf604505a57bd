"""What a node's work on a sync costs the ranks of its site that train meanwhile, by how nice its threads are.

Two ranks in lock-step (DDP over gloo, one thread each) beside one process that encodes, reduces and applies as a node
does. For each niceness and number of threads, by turns with and without that work: how long a sync's work takes, what
of the ranks' time it costs, and how late the event loop beside these threads is.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.node.dataplane import kernels as outer_kernels
from atoll.node.dataplane.optim import OuterOptimizer
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.threads import giving_way
from atoll.protocol.codecs import kernels
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.messages import Commit
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings

NUM_SITES = 3
TRAVELS = spec_of(SyncSettings(), 0, 0)
OPTIMIZER = OuterOptimizer(RunSettings(run_id="bench"))
RANK = Path(__file__).parent / "giving_way_rank.py"
SETTLED_S = 0.5
"""After the work began or ended."""
TICK_S = 0.01
"""How often the event loop looks how late it is."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks giving_way", description=__doc__)
    parser.add_argument("--parameters", type=int, default=128 << 20)
    parser.add_argument("--nice", type=int, nargs="*", default=[0, 5, 10, 19])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2], help="of the node's work")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--syncs", type=int, default=5, help="measured for each pair of these")
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
        bench = Bench(folder, args.parameters)
        alone_s = {n: asyncio.run(bench.syncs(n, 0, args.syncs)).work_s for n in args.threads}
        ranks = [stack.enter_context(Rank(folder, i, args.ranks)) for i in range(args.ranks)]
        while not ranks[0].steps:
            time.sleep(0.1)
        print(f"{args.ranks} ranks on {len(os.sched_getaffinity(0))} cores; a sync of {args.parameters} parameters, "
              f"int8, {NUM_SITES} sites; medians of {args.syncs}")  # fmt: skip
        print(f"{'nice':>5} {'threads':>8} {'work alone s':>13} {'beside s':>9} {'step ms':>8} {'beside ms':>10} "
              f"{'ranks lose s a sync':>20} {'loop late ms p50, p99':>22}")  # fmt: skip
        for nice, num_threads in itertools.product(args.nice, args.threads):
            idle, busy, work, late = [], [], [], []
            for _ in range(args.syncs):
                time.sleep(SETTLED_S)
                began_s = time.monotonic()
                time.sleep(2 * alone_s[num_threads])
                between_s = time.monotonic()
                did = asyncio.run(bench.syncs(num_threads, nice, 1))
                idle.append(ranks[0].step_s(began_s, between_s))
                busy.append(ranks[0].step_s(between_s, between_s + did.work_s))
                work.append(did.work_s)
                late += did.late_s
            lost_s = [w * (1 - i / b) for w, i, b in zip(work, idle, busy, strict=True)]
            late.sort()
            print(f"{nice:5} {num_threads:8} {alone_s[num_threads]:13.2f} {statistics.median(work):9.2f} "
                  f"{statistics.median(idle) * 1e3:8.1f} {statistics.median(busy) * 1e3:10.1f} "
                  f"{_spread(lost_s):>20} {late[len(late) // 2] * 1e3:14.1f}, "
                  f"{late[len(late) * 99 // 100] * 1e3:.1f}", flush=True)  # fmt: skip
    return 0


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


class Rank:
    """Trains until the end, and writes when each step was done."""

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        self._trace = folder / f"rank-{rank}"
        command = [sys.executable, str(RANK), str(folder / "rendezvous"), str(rank), str(num_ranks), str(self._trace)]
        self._process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def steps(self) -> list[float]:
        if self._process.poll() is not None:
            raise SystemExit("a rank ended; its error is above")
        lines = self._trace.read_text().splitlines(keepends=True) if self._trace.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def step_s(self, first_s: float, last_s: float) -> float:
        """The mean step meanwhile; steps that were under way at both ends count in part."""
        while (steps := self.steps)[-1] < last_s:
            time.sleep(TICK_S)
        numbers = np.interp([first_s, last_s], steps, range(len(steps)))
        return (last_s - first_s) / float(numbers[1] - numbers[0])


@dataclass(frozen=True, slots=True)
class Did:
    work_s: float
    """The median of the syncs."""
    late_s: list[float]


class Bench:
    """Of one node of three: its encoding, its third of the averages, the outer update of everything."""

    def __init__(self, folder: Path, num_parameters: int) -> None:
        kernels.warm_up()
        outer_kernels.warm_up()
        spec = TensorSpec(name="w", shape=(num_parameters,), dtype="F32", role=Role.TRAINABLE)
        self.layout = Layout(Manifest.canonical([spec]))
        self.outer = OuterState.create(folder / "state", self.layout, OPTIMIZER.slots, "giving-way")
        self.snapshot = memoryview(bytearray(self.layout.buffer_bytes))
        random, local = np.random.default_rng(1), np.frombuffer(self.snapshot, np.float32)
        for chunk in self.layout.chunks:
            values, first = random.standard_normal(chunk.num_elements, np.float32), chunk.offset_bytes // 4
            self.outer.seed(chunk.index, values.tobytes())
            step = random.standard_normal(chunk.num_elements, np.float32)
            local[first : first + chunk.num_elements] = values + np.float32(0.01) * step
        self.commit = 0

    async def syncs(self, num_threads: int, nice: int, num_syncs: int) -> Did:
        late_s: list[float] = []
        ticking = asyncio.create_task(_tick(late_s))
        taken = []
        with giving_way(num_threads, "bench", nice) as pool:
            for _ in range(num_syncs):
                began_s = time.monotonic()
                await self._sync(pool)
                taken.append(time.monotonic() - began_s)
        ticking.cancel()
        return Did(statistics.median(taken), late_s)

    async def _sync(self, pool: Executor) -> None:
        """Contributions of all chunks; the average of a third of them; the outer update, for which this site's own
        contributions stand for the payloads of the others."""
        self.commit += 1
        record = Commit(commit=self.commit, sync=self.commit, attempt=1, term=1, contributors=(), payload_digest=b"",
                        run_step=self.commit, run_tokens=self.commit)  # fmt: skip
        data, update = SyncData(self.layout, TRAVELS, self.outer, self.snapshot, {"w": "F32"}), OPTIMIZER.at(record)
        payloads: dict[int, bytes] = {}

        def exchange(chunk: int) -> None:
            encoded = data.contribution(chunk)
            reduces = chunk % NUM_SITES == 0
            payloads[chunk] = data.reduce(chunk, [(1, encoded)] * NUM_SITES) if reduces else encoded

        loop, chunks = asyncio.get_running_loop(), range(self.layout.num_sync_chunks)
        await asyncio.gather(*(loop.run_in_executor(pool, exchange, chunk) for chunk in chunks))
        apply = self.outer.apply
        await asyncio.gather(*(loop.run_in_executor(pool, apply, c, payloads[c], update) for c in chunks))


async def _tick(late_s: list[float]) -> None:
    while True:
        due_s = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        late_s.append(time.monotonic() - due_s)
