"""A worker without torch, for tests of whole sites: it speaks the local socket as a real one does and trains a toy.

    ATOLL_SOCKET=... ATOLL_GENERATION=1 python plain_worker.py --tensors a=8x4,b=10,n=4:mean --tokens 5

Every trainable tensor is pulled towards a target that is the same at all sites; each site adds noise of its own, so
that sites differ and the loss falls. All is a pure function of the run's seed, the site's and the step. Faults are
asked for by step.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while modules load, of which nothing is garbage: two fifths of what a start takes

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.node.core.events import Answer, AnswerKind, MergeMode
from atoll.node.local_protocol import DataSet, LocalJoin, Piece, PieceHash, RankReadings, SealedReport, piece_hash
from atoll.node.worker.client import JoinedLayout, LocalClient
from atoll.node.worker.draws import LeasedBatches
from atoll.protocol.digest import Digest
from atoll.protocol.errors import AtollError
from atoll.protocol.layout import FP32_ROLES, Manifest, Role, TensorSpec, fragments_of
from atoll.protocol.logged import LoggedValue
from atoll.protocol.resources import resident_bytes
from atoll.protocol.sample_order import GLOBAL_LINE, SampleOrder
from atoll.protocol.settings import settings_from_json

Array = npt.NDArray[Any]
EXIT_CRASH = 3
ROLES = {
    "train": Role.TRAINABLE,
    "mean": Role.BUFFER_MEAN,
    "lowest": Role.BUFFER_LOWEST,
    "local": Role.BUFFER_LOCAL,
    "frozen": Role.FROZEN,
}
LEARNING_RATE = np.float32(0.05)
NOISE = np.float32(0.1)
PROGRESS_EVERY_S = 0.2
NUDGED_PARTS = 32


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", default="a=8x4,b=10", help="NAME=SIZExSIZE[:train|mean|lowest|local|frozen],...")
    parser.add_argument("--dtype", default="F32", choices=["F32", "BF16"], help="of trainable tensors in the worker")
    parser.add_argument("--shard", action="store_true", help="ranks hold rows of each tensor (default: all of it)")
    parser.add_argument("--seed", type=int, help="of first values and targets (default: the run's)")
    parser.add_argument("--tokens", type=int, default=5, help="a step and rank")
    parser.add_argument("--fingerprint", default="", help="names the data; empty: no fingerprint")
    parser.add_argument("--samples", type=int, default=0, help="of a data set that is leased; 0: none")
    parser.add_argument("--batch", type=int, default=4, help="samples a step and rank, of a leased data set")
    parser.add_argument("--fetched-ahead", type=int, default=0, help="batches that are drawn before they are needed")
    parser.add_argument("--step-delay-s", type=float, default=0.0)
    parser.add_argument("--step-s", type=float, default=0.0, help="a step lasts exactly so long, and is traced")
    parser.add_argument("--takes-copies", action="store_true", help="of outer values, and reads none in place")
    parser.add_argument("--mapped", action="store_true", help="values lie in a file: as on a GPU, not in this memory")
    parser.add_argument("--grow", type=float, default=1.0, help="what was trained since the base counts so many times")
    parser.add_argument("--start-delay-s", type=float, default=0.0, help="before joining")
    parser.add_argument("--best-commit", type=int, help="log val_loss of the outer values, the lowest at this commit")
    parser.add_argument("--trace", help="append JSON lines to this file; {rank} is replaced")
    parser.add_argument("--fault-rank", type=int, default=-1, help="only on this rank (default: all)")
    parser.add_argument("--fault-generation", type=int, default=1, help="only in this generation; 0: in every one")
    fault = parser.add_argument_group("faults, after so many steps")
    fault.add_argument("--crash-at", type=int, metavar="STEP", help=f"exit code {EXIT_CRASH}")
    fault.add_argument("--hang-at", type=int, metavar="STEP", help="connected, but silent for ever")
    fault.add_argument("--nan-at", type=int, metavar="STEP", help="the first trainable tensor becomes NaN")
    fault.add_argument("--nan-loss-at", type=int, metavar="STEP", help="the loss becomes NaN, and the worker says so")
    fault.add_argument("--fatal-at", type=int, metavar="STEP", help="give up for a wrong configuration")
    fault.add_argument("--end-at", type=int, metavar="STEP", help="the loader ends: leave properly")
    fault.add_argument("--extra-step-at", type=int, metavar="STEP", help="count one step too many")
    fault.add_argument("--drift-at", type=int, metavar="STEP", help="this rank's copy differs from then on")
    return parser.parse_args(argv)


@dataclass(frozen=True, slots=True)
class Spec:
    name: str
    shape: tuple[int, ...]
    role: Role

    @property
    def dtype(self) -> str:
        return "I64" if self.role is Role.BUFFER_LOWEST else "F32"


def parse_tensors(text: str) -> list[Spec]:
    """`a=8x4,b=10:mean,c=` -> specs; an empty shape is a scalar."""
    specs = []
    for item in text.split(","):
        name, _, rest = item.partition("=")
        shape, _, role = rest.partition(":")
        specs.append(Spec(name, tuple(int(n) for n in shape.split("x") if n), ROLES[role or "train"]))
    return sorted(specs, key=lambda s: s.name.encode())


def round_to_bf16(values: Array) -> Array:
    """To nearest, ties to even, kept in fp32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).reshape(values.shape)


def mapped(values: Array) -> Array:
    """A copy in a file of no name, which the kernel can write back."""
    with tempfile.TemporaryFile() as file:
        values.tofile(file)
        return np.memmap(file, values.dtype, "r+", shape=values.shape)


def normal(spec: Spec, *seed: int) -> Array:
    generator = np.random.default_rng([*seed, zlib.crc32(spec.name.encode())])
    return np.asarray(generator.standard_normal(spec.shape), np.float32)


class Model:
    """This rank's slices as fp32 (or int64) arrays, and how they are trained."""

    def __init__(self, specs: list[Spec], options: argparse.Namespace, seed: int, rank: int, world_size: int) -> None:
        self.specs = specs
        self.bf16 = options.dtype == "BF16"
        self.seed = seed
        self.slices: list[tuple[slice | EllipsisType, ...]] = []
        self.pieces: list[Piece] = []
        for spec in specs:
            first, last = 0, spec.shape[0] if spec.shape else 1
            sharded = options.shard and len(spec.shape) > 0
            if sharded:
                rows = -(-spec.shape[0] // world_size)  # uneven, even empty, at the end
                first, last = min(rank * rows, last), min((rank + 1) * rows, last)
            offsets = (first, *(0 for _ in spec.shape[1:])) if spec.shape else ()
            sizes = (last - first, *spec.shape[1:]) if spec.shape else ()
            self.slices.append((slice(first, last), ...) if spec.shape else (...,))
            dtype = options.dtype if spec.role is Role.TRAINABLE else spec.dtype
            self.pieces.append(Piece(name=spec.name, offsets=offsets, sizes=sizes, dtype=dtype))
        place = mapped if options.mapped else np.ndarray.copy
        self.values = [place(self._first(spec)[part]) for spec, part in zip(specs, self.slices, strict=True)]
        aimed_at = [] if options.step_s else specs  # a timed step has no target
        self.targets = [normal(spec, seed, 2)[part] for spec, part in zip(aimed_at, self.slices, strict=False)]
        for i, spec in enumerate(specs):
            if spec.role is Role.TRAINABLE:
                self.set(i, self.values[i])

    def _first(self, spec: Spec) -> Array:
        if spec.role is Role.BUFFER_LOWEST:
            return np.zeros(spec.shape, np.int64)
        return normal(spec, self.seed, 1) if spec.role in (Role.TRAINABLE, Role.FROZEN) else np.zeros(spec.shape, "f4")

    def manifest(self) -> Manifest:
        return Manifest.canonical(
            [TensorSpec(name=s.name, shape=s.shape, dtype=s.dtype, role=s.role) for s in self.specs]
        )

    def set(self, index: int, values: Array) -> None:
        rounded = round_to_bf16(values) if self.bf16 and self.specs[index].role is Role.TRAINABLE else values
        self.values[index][...] = rounded

    def step(self, step: int, data_seed: int) -> float:
        """One optimizer step; returns the loss before it."""
        total, count = 0.0, 0
        for i, (spec, part) in enumerate(zip(self.specs, self.slices, strict=True)):
            if spec.role is Role.TRAINABLE:
                error = self.values[i] - self.targets[i]
                total += float(np.square(error).sum())
                count += error.size
                self.set(i, self.values[i] - LEARNING_RATE * (error + NOISE * normal(spec, data_seed, step)[part]))
            elif spec.role is Role.BUFFER_MEAN:
                self.values[i] += np.float32(0.1) * (normal(spec, data_seed, step)[part] - self.values[i])
            elif spec.role is Role.BUFFER_LOWEST:
                self.values[i] += 1
            elif spec.role is Role.BUFFER_LOCAL:
                self.values[i][...] = data_seed % 1000
        return total / max(count, 1)

    def nudge(self, step: int) -> float:
        """A step that takes no time to speak of: one part of each tensor after the other is changed a little."""
        for values, spec in zip(self.values, self.specs, strict=True):
            if spec.role is Role.TRAINABLE:
                flat, size = values.reshape(-1), -(-values.size // NUDGED_PARTS)
                flat[step % NUDGED_PARTS * size :][:size] *= np.float32(0.999)
        return 1.0

    def digest(self) -> str:
        digest = Digest("plain-worker")
        for values in self.values:
            digest.data(values.tobytes())
        return digest.finish().hex()[:16]


class Worker:
    def __init__(self, options: argparse.Namespace, client: LocalClient, world_size: int) -> None:
        self.options = options
        self.client = client
        self.step = 0
        self.tokens = self.tokens_at_snapshot = 0  # since the base
        self.loss_sum = self.train_s = self.wait_s = 0.0
        self.num_steps = 0  # since the last report
        self.has_values = False
        self.bases: dict[int, Array] = {}  # where what is contributed grows
        self.data_epoch = 0
        self._trace = Path(options.trace.replace("{rank}", str(client.rank))) if options.trace else None
        settings = client.hello(world_size)
        run = settings_from_json(settings.settings_json)
        self.is_local, self.alpha = run.data == "local", np.float32(run.sync.alpha)
        time.sleep(options.start_delay_s)
        seed = run.seed if options.seed is None else options.seed
        self.model = Model(parse_tensors(options.tensors), options, seed, client.rank, world_size)
        self.num_fragments = run.sync.fragments
        self.fragments = fragments_of(self.model.manifest(), self.num_fragments)  # by tensor
        fingerprint = Digest("plain-worker/data").text(options.fingerprint).finish() if options.fingerprint else b""
        joined = client.join(
            LocalJoin(
                manifest=self.model.manifest(),
                pieces=tuple(self.model.pieces),
                data_fingerprint=fingerprint,
                data_rank=client.rank,
                reads_in_place=not options.takes_copies,
            )
        )
        self.told = joined.told
        self.snapshot = self._views(joined, joined.snapshot)
        self.publish = self._views(joined, joined.publish)
        self.batches: LeasedBatches | None = None
        self.fetched: deque[list[int]] = deque()
        self.trace("joined", site_id=self.told.site_id, data_seed=self.told.data_seed, owned=self.told.owned_pieces)

    def _views(self, joined: JoinedLayout, buffer: memoryview) -> list[Array]:
        """This rank's slices of each tensor in a shared buffer."""
        layout = joined.layout
        place = {spec.name: i for i, spec in enumerate(layout.manifest.tensors)}
        views = []
        for spec, part in zip(self.model.specs, self.model.slices, strict=True):
            dtype = np.float32 if spec.role in FP32_ROLES else np.dtype({"I64": "i8", "F32": "f4"}[spec.dtype])
            full = np.frombuffer(
                buffer, dtype, count=int(np.prod(spec.shape)), offset=layout.tensor_offsets_bytes[place[spec.name]]
            )
            views.append(full.reshape(spec.shape)[part])
        return views

    def trace(self, event: str, **fields: Any) -> None:
        if self._trace is not None:
            where = {"rank": self.client.rank, "generation": self.client.generation, "step": self.step}
            with self._trace.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, "at_s": time.monotonic(), **where, **fields}) + "\n")

    def digest(self) -> str:
        """Of the model; of timed steps nothing but the time is asked, and this would take some."""
        return "" if self.options.step_s else self.model.digest()

    # --- the loop

    def run(self) -> None:
        next_step = 0
        said_at = 0.0
        while True:
            if self.step >= next_step:
                answer = self.ask()
                if answer.kind is AnswerKind.STOP:
                    self.trace("stop", reason=answer.reason)
                    self.client.goodbye(answer.reason, True)
                    return
                next_step = answer.next_step
            if self.options.samples:
                self.load()
            if self.fault("end"):
                self.trace("end")
                self.client.goodbye("the loader ended", False)
                return
            self.train()
            if time.monotonic() - said_at > PROGRESS_EVERY_S:
                said_at = time.monotonic()
                trained = RankReadings(memory_bytes=resident_bytes(), trained_tokens=self.step * self.options.tokens)
                self.client.progress(self.step, self.num_steps / max(self.train_s, 1e-9), readings=trained)

    def load(self) -> None:
        """The samples of the next step, with some fetched ahead of it as a loader does."""
        if self.batches is None:
            options, told = self.options, self.told
            self.client.announce_data(
                DataSet(num_samples=options.samples, batch_size=options.batch, batches_ahead=options.fetched_ahead)
            )
            order = SampleOrder(told.run_seed, told.site_id if self.is_local else GLOBAL_LINE, options.samples)
            self.batches = LeasedBatches(
                self.client.draw,
                order,
                options.batch,
                reader=told.reader,
                num_readers=told.num_readers,
                epoch=self.data_epoch,
            )
        while True:
            while len(self.fetched) <= self.options.fetched_ahead:
                self.fetched.append(self.batches.next_batch().tolist())
            samples = self.fetched.popleft()
            if self.batches.give_out():
                self.trace("loaded", samples=samples)
                return

    def ask(self) -> Answer:
        """Do what the node says at this step until it says to train on or to stop."""
        seq = 0
        while True:
            started = time.monotonic()
            answer = self.client.boundary(self.step, seq)
            self.wait_s += time.monotonic() - started
            fields = {"next_step": answer.next_step, "version": answer.version, "mode": answer.mode.name}
            self.trace("answer", seq=seq, kind=answer.kind.name, **fields)
            if answer.kind is AnswerKind.SNAPSHOT:
                self.seal(seq, answer)
            elif answer.kind is AnswerKind.APPLY:
                self.merge(answer)
            if answer.kind is AnswerKind.STOP:
                return answer
            if answer.kind is not AnswerKind.SNAPSHOT and answer.next_step > self.step:
                return answer
            seq += 1

    def train(self) -> None:
        started = time.monotonic()
        time.sleep(self.options.step_delay_s)
        if self.options.step_s:
            loss = self.model.nudge(self.step)
            time.sleep(max(0.0, started + self.options.step_s - time.monotonic()))
        else:
            loss = self.model.step(self.step, self.told.data_seed)
        self.step += 1
        if self.options.step_s:
            self.trace("step", train_s=time.monotonic() - started)
        if self.batches is not None:
            self.batches.step()
        self.tokens += self.options.tokens
        self.loss_sum += loss
        self.num_steps += 1
        self.train_s += time.monotonic() - started
        self.fail_if_asked()

    def seal(self, seq: int, answer: Answer) -> None:
        for i, spec in enumerate(self.model.specs):
            if spec.role is Role.FROZEN:
                wanted = not self.has_values
            else:
                wanted = spec.name in self.fragments  # else it is local
                wanted = wanted and answer.fragment in (self.fragments[spec.name], self.num_fragments)
            if wanted and i in self.told.kept_pieces:
                self.snapshot[i][...] = self.grown(i)
        shared = self.told.shared_pieces if answer.hash_shared else ()
        self.tokens_at_snapshot = self.tokens
        report = SealedReport(
            step=self.step,
            seq=seq,
            fragment=answer.fragment,
            data_rank=self.client.rank,
            tokens=self.tokens,
            loss_sum=self.loss_sum,
            num_steps=self.num_steps,
            train_s=self.train_s,
            hashes=tuple(PieceHash(piece=i, hash=piece_hash(self.model.values[i].tobytes())) for i in shared),
            num_samples_used=self.batches.num_samples_used if self.batches else 0,
        )
        self.client.sealed(report)
        self.trace("sealed", tokens=self.tokens, digest=self.digest())
        self.loss_sum, self.num_steps, self.train_s = 0.0, 0, 0.0

    def grown(self, index: int) -> Array:
        values, base = self.model.values[index], self.bases.get(index)
        if base is None or self.options.grow == 1:
            return values
        return np.asarray(base + np.float32(self.options.grow) * (values - base), np.float32)

    def merge(self, answer: Answer) -> None:
        is_shift = answer.mode is MergeMode.SHIFT
        for i, spec in enumerate(self.model.specs):
            is_of = answer.fresh if spec.role is Role.FROZEN else self.fragments.get(spec.name) == answer.fragment
            if not is_of:
                continue
            local, snapshot, publish = self.model.values[i], self.snapshot[i], self.publish[i]
            is_kept = is_shift or not np.array_equal(local, snapshot)  # of a buffer
            if answer.mode is MergeMode.REPLACE or (spec.role is not Role.TRAINABLE and not is_kept):
                self.model.set(i, publish)
            elif spec.role is Role.TRAINABLE and answer.mode is MergeMode.MIX:
                self.model.set(i, self.alpha * local + (1 - self.alpha) * publish)
            elif spec.role is Role.TRAINABLE:
                self.model.set(i, publish + (local if is_shift else local - snapshot))
            if spec.role is Role.TRAINABLE and self.options.grow != 1:
                self.bases[i] = self.model.values[i].copy()
        if answer.mode is MergeMode.REPLACE:
            self.tokens = 0
        elif not is_shift:
            self.tokens -= self.tokens_at_snapshot
        self.tokens_at_snapshot = 0
        self.has_values = True
        self.data_epoch = answer.data_epoch
        if self.batches is not None:
            self.batches.begin_epoch(answer.data_epoch)
        self.client.merged(version=answer.version, step=self.step, wait_s=self.wait_s)
        if self.options.best_commit is not None:
            value = float(abs(answer.version - self.options.best_commit))
            said = LoggedValue(name="val_loss", step=answer.run_step, value=value, of_outer=True)
            self.client.logged((said,))
        self.trace("merged", version=answer.version, run_step=answer.run_step, digest=self.digest())
        self.wait_s = 0.0

    # --- faults

    def fault(self, name: str) -> bool:
        options = self.options
        return (
            getattr(options, f"{name}_at") == self.step
            and options.fault_rank in (-1, self.client.rank)
            and options.fault_generation in (0, self.client.generation)
        )

    def fail_if_asked(self) -> None:
        faults: dict[str, Callable[[], None]] = {
            "crash": self._crash,
            "hang": self._hang,
            "fatal": lambda: self._give_up("config", "this worker was told to give up"),
            "nan_loss": lambda: self._give_up("non_finite", f"the loss is nan at step {self.step}"),
            "nan": lambda: self._first_trainable().fill(np.nan),
            "extra_step": self._count_twice,
            "drift": self._drift,
        }
        for name, happen in faults.items():
            if self.fault(name):
                self.trace(name)
                happen()

    def _first_trainable(self) -> Array:
        return next(v for v, s in zip(self.model.values, self.model.specs, strict=True) if s.role is Role.TRAINABLE)

    def _crash(self) -> None:
        complain(f"crashing at step {self.step}")
        os._exit(EXIT_CRASH)

    def _hang(self) -> None:
        threading.Event().wait()

    def _give_up(self, kind: str, text: str) -> None:
        self.client.fatal(kind, text)
        sys.exit(f"plain worker: {text}")

    def _count_twice(self) -> None:
        self.step += 1

    def _drift(self) -> None:
        self._first_trainable()[...] += np.float32(1e-3)


def complain(text: str) -> None:
    sys.stderr.write(f"plain worker: {text}\n")
    sys.stderr.flush()


def main(argv: list[str]) -> int:
    client = LocalClient.from_environment()
    if client is None:
        complain("ATOLL_SOCKET is not set; start me through a node")
        return 2
    with closing(client):
        try:
            Worker(arguments(argv), client, int(os.environ.get("WORLD_SIZE", "1"))).run()
        except AtollError as error:
            complain(f"rank {client.rank}: {error}")
            return error.exit_code
    return 0


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main(sys.argv[1:]))
