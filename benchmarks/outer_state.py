"""What it costs where the live outer state lies: in a file on the disk, in one on tmpfs, or in the process's memory.

For each: seconds to apply a commit, bytes that reach the disk for it, and seconds until the state is there again after
an end: a file is opened and each record checked, memory is filled from a snapshot and the commits after it.
docs/decisions/0030-where-the-outer-state-lives.md
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from atoll.node.dataplane import kernels as outer_kernels
from atoll.node.dataplane import outer_update
from atoll.node.dataplane.optim import OuterOptimizer
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.dataplane.snapshot import Snapshots
from atoll.node.dataplane.store_files import Bytes
from atoll.node.threads import each
from atoll.protocol.codecs import kernels
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec, chunk_hash
from atoll.protocol.messages import Commit, Member
from atoll.protocol.plans import payload_hash
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings

RUN_ID = "outer-state"
OPTIMIZER = OuterOptimizer(RunSettings(run_id="bench"))


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    apply_s: list[float]
    written_bytes: list[int]
    return_s: list[float]


class Bench:
    def __init__(self, folder: Path, num_parameters: int, num_commits: int, num_threads: int) -> None:
        shape = (num_parameters // 1024, 1024)
        spec = TensorSpec(name="w", shape=shape, dtype="F32", role=Role.TRAINABLE)
        self.layout = Layout(Manifest.canonical([spec]))
        self.folder = folder
        self.commits = range(1, num_commits + 1)
        self.num_threads = num_threads
        self.pool = ThreadPoolExecutor(num_threads)
        self.log = PayloadLog(
            folder / "log",
            self.layout,
            RunSettings(run_id=RUN_ID, sync=SyncSettings(log_commits=num_commits, fsync=True)),
        )
        self.num_payload_bytes = sum(self._log(number) for number in self.commits) // num_commits

    def _log(self, number: int) -> int:
        """The payloads of a commit, on the disk for good; their bytes."""
        random = np.random.default_rng(number)
        file = self.log.begin(number, 1, 0)
        total = 0
        for chunk in self.layout.chunks:
            average = random.standard_normal(chunk.num_elements, np.float32) * np.float32(0.01)
            payload = kernels.encode("int8", average)
            file.put(chunk.index, payload, payload_hash(payload))
            total += len(payload)
        file.seal()
        member = Member(site_id=1, incarnation=1, address="a:1", tokens=1)
        record = Commit(
            commit=number,
            sync=number,
            attempt=0,
            term=1,
            contributors=(member,),
            payload_digest=b"",
            run_step=number,
            run_tokens=number,
        )
        self.log.commit(replace(record, payload_digest=file.digest(record)))
        return total

    def seeded(self, folder: Path) -> OuterState:
        outer = OuterState.create(folder, self.layout, OPTIMIZER.slots, RUN_ID)
        random = np.random.default_rng(0)
        for chunk in self.layout.chunks:
            outer.seed(chunk.index, random.standard_normal(chunk.num_elements, np.float32).view(np.uint8))
        return outer

    def in_a_file(self, name: str, folder: Path) -> Row:
        outer = self.seeded(folder)

        def apply(commit: int) -> None:
            update = OPTIMIZER.at(self.log.record(commit))

            def one(chunk: int) -> None:
                outer.apply(chunk, self.log.read(commit, chunk), update)

            each(one, self.layout.sync_chunks, self.pool)

        apply_s, written = self._applied(apply)
        expected = outer.state_hash()
        return_s = []
        for _ in range(3):
            began = time.perf_counter()
            again = OuterState.open(folder, self.layout, OPTIMIZER.slots, RUN_ID, num_threads=self.num_threads)
            return_s.append(time.perf_counter() - began)
            if again.state_hash() != expected:
                sys.exit(f"{name}: another state came back")
        return Row(name, apply_s, written, return_s)

    def in_memory(self, snapshots: Snapshots) -> list[Row]:
        """From the snapshot of commit 0; what comes back is timed with no commit after it, and with all."""
        spares = deque(self._array(0) for _ in range(self.num_threads))
        records: dict[int, Bytes] = {}

        def load(chunk: int) -> None:
            records[chunk] = np.frombuffer(bytearray(snapshots.files[0].read(chunk).data), np.uint8)

        def step(chunk: int, commit: int) -> None:
            new = spares.pop()
            payload, update = self.log.read(commit, chunk), OPTIMIZER.at(self.log.record(commit))
            outer_update.apply(self.layout, chunk, records[chunk], payload, update, new=new)
            chunk_hash(new.data)
            spares.append(records[chunk])
            records[chunk] = new

        def load_and_go_on(chunk: int) -> None:
            load(chunk)
            for commit in self.commits:
                step(chunk, commit)

        loaded, gone_on = [], []
        for _ in range(3):
            loaded.append(_timed(lambda: each(load, self.layout.sync_chunks, self.pool)))
            gone_on.append(_timed(lambda: each(load_and_go_on, self.layout.sync_chunks, self.pool)))
        each(load, self.layout.sync_chunks, self.pool)
        apply_s, written = self._applied(
            lambda commit: each(lambda chunk: step(chunk, commit), self.layout.sync_chunks, self.pool)
        )
        return [
            Row("memory; snapshot of the last commit", apply_s, written, loaded),
            Row(f"memory; snapshot of {len(self.commits)} commits before", apply_s, written, gone_on),
        ]

    def _array(self, chunk: int) -> Bytes:
        return np.ones(self.layout.chunks[chunk].num_bytes * (1 + len(OPTIMIZER.slots)), np.uint8)

    def _applied(self, apply: Callable[[int], object]) -> tuple[list[float], list[int]]:
        seconds, written = [], []
        for commit in self.commits:
            os.sync()  # pages are clean, as they are when commits are minutes apart
            before = _device_bytes(self.folder)
            seconds.append(_timed(partial(apply, commit)))
            os.sync()
            written.append(_device_bytes(self.folder) - before)
        return seconds, written


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _device_bytes(path: Path) -> int:
    """Written to the disk that `path` lies on, by whomever."""
    device = path.stat().st_dev
    for line in Path("/proc/diskstats").read_text(encoding="ascii").splitlines():
        words = line.split()
        if (int(words[0]), int(words[1])) == (os.major(device), os.minor(device)):
            return 512 * int(words[9])
    sys.exit(f"{path}: not on a disk that /proc/diskstats counts; choose --folder")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outer_state", description=__doc__)
    parser.add_argument("--params", type=int, default=26 << 20, help="8 bytes of outer state for each")
    parser.add_argument("--commits", type=int, default=7)
    parser.add_argument("--threads", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--folder", type=Path, default=None, help="on the disk (default: the temporary folder)")
    args = parser.parse_args(argv)
    kernels.warm_up()
    outer_kernels.warm_up()
    with tempfile.TemporaryDirectory(dir=args.folder) as on_disk, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        bench = Bench(Path(on_disk), args.params, args.commits, args.threads)
        snapshots = Snapshots(bench.folder / "snapshots", bench.layout, OPTIMIZER.slots, RUN_ID, lambda: None)
        outer = bench.seeded(bench.folder / "first")
        os.sync()
        before = _device_bytes(bench.folder)
        snapshot_s = _timed(lambda: snapshots.write(outer, 1, 0))
        snapshot_bytes = _device_bytes(bench.folder) - before
        rows = [
            bench.in_a_file("file on the disk", bench.folder / "state"),
            bench.in_a_file("file on tmpfs", Path(shm) / "state"),
            *bench.in_memory(snapshots),
        ]
        mib = 2**20
        print(
            f"{args.params} parameters, {args.threads} threads, medians of {args.commits} commits and 3 returns; "
            f"payloads {bench.num_payload_bytes / mib:.0f} MiB a commit; a snapshot {snapshot_bytes / mib:.0f} MiB "
            f"in {snapshot_s:.2f} s\n"
        )
        print("| outer state | apply, s | range | to the disk, MiB a commit | back after it is opened again, s |")
        print("| --- | --- | --- | --- | --- |")
        for row in rows:
            print(
                f"| {row.name} | {statistics.median(row.apply_s):.3f} | {min(row.apply_s):.3f} to "
                f"{max(row.apply_s):.3f} | {statistics.median(row.written_bytes) / mib:.0f} | "
                f"{statistics.median(row.return_s):.3f} |"
            )
        bench.log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
