"""Checkpoints of this rank's inner optimizers on the site's own disk, written beside the training.

Each rank writes its own file, in safetensors with a hash over everything, at the same steps as the others. Parameters
are not in it: they come from the outer state. See docs/decisions/0009-local-checkpoint.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.node.dataplane import safetensors_file
from atoll.node.dataplane.disk import disk_error, sync_folder
from atoll.node.local_protocol import CheckpointCounts, CheckpointId
from atoll.node.worker.optimizer_state import OptimizerState, StateTensor
from atoll.node.worker.pieces import TORCH_DTYPES
from atoll.node.worker.tensors import DTYPE_NAMES
from atoll.protocol.digest import Digest
from atoll.protocol.errors import AtollError, ConfigError, HostError

NUM_KEPT = 2
MAX_KEPT = 4
"""Of one rank, while other ranks' disks are slower."""
READ_BYTES = 64 << 20
KEY = "atoll"
"""Of the description in a file's metadata."""
_RANK = re.compile(r"rank-(\d{1,9})\.")
_NAME = re.compile(r"rank-(\d{1,9})\.(\d{1,19})-(\d{1,19})-(\d{1,19})\.safetensors")


@dataclass(frozen=True, slots=True)
class _Owner:
    """Whose state a file holds; another run, rank or layout cannot use it."""

    run_id: str
    rank: int
    world: int
    layout: dict[str, Any]


class LocalCheckpoints:
    """One rank's checkpoints.

        checkpoints = LocalCheckpoints(folder, state, run_id, rank, world)
        checkpoints.usable                  # to the node, which names the newest that every rank has, or none
        checkpoints.go_on(chosen, incarnation, generation)
        checkpoints.write(step, run_step)   # every so many steps: copies here, writes in a thread
        checkpoints.finish()

    What cannot be used or written is said on stderr with the reason, and training goes on without it.
    """

    def __init__(self, folder: Path, state: OptimizerState, run_id: str, rank: int, world: int) -> None:
        self._folder = folder
        self._state = state
        self._owner = _Owner(run_id, rank, world, state.layout())
        self._writer: threading.Thread | None = None
        self._copies: dict[str, Tensor] = {}  # in host memory, of the writer while there is one
        self._start = (0, 0)  # incarnation and generation
        self._is_off = False
        self._num_written = self._num_skipped = self._num_failed = 0
        self._said_failures: set[str] = set()  # since one was written
        for leftover in folder.glob(f"rank-{rank}.*.new"):
            _remove(leftover)
        self._num_found = 0
        self.usable = tuple(self._check(_listed(folder).get(rank, ())))
        """Whole, of this run and layout; oldest first."""

    @property
    def counts(self) -> CheckpointCounts:
        """What became of those that were due."""
        return CheckpointCounts(written=self._num_written, skipped=self._num_skipped, failed=self._num_failed)

    # --- going on from one

    def go_on(self, chosen: CheckpointId | None, incarnation: int, generation: int) -> bool:
        """Take the state from the checkpoint that every rank has; files are numbered with this start from now on.

        Returns whether the optimizers are not fresh. Raises HostError if the file is not what it was at the start.
        """
        self._start = incarnation, generation
        if chosen is None:
            if self._num_found:
                self._say("the inner optimizer starts fresh: no checkpoint is usable on every rank")
            return False
        tensors, about = self._read(self._path(chosen))
        self._state.restore(tensors, about["values"])
        if self._owner.rank == 0:
            self._say(f"the inner optimizer is restored from step {about['run_step']} of the run")
        return True

    def _check(self, ids: Iterable[CheckpointId]) -> Iterable[CheckpointId]:
        for item in sorted(ids):
            self._num_found += 1
            try:
                self._read(self._path(item), keep=False)
            except (AtollError, OSError) as error:
                self._say(f"a checkpoint of the inner optimizer is passed over: {error}")
            else:
                yield item

    def _read(self, path: Path, *, keep: bool = True) -> tuple[list[StateTensor], dict[str, Any]]:
        """Raises HostError unless all of it is as it was written, finite, and of this run, rank and layout."""
        try:
            reader = safetensors_file.Reader(path)
        except ConfigError as error:
            raise HostError(str(error)) from None
        try:
            text = reader.metadata.get(KEY, "")
            about = json.loads(text)
            self._compare(path, _Owner(**about["owner"]))
            digest = Digest("atoll/optimizer-checkpoint/v1").text(text)
            tensors = []
            for name, item in about["tensors"].items():
                shape, dtype = tuple(item.pop("shape")), item.pop("dtype")
                values = _read_tensor(reader, name, shape, dtype)
                digest.data(_bytes(values))
                if keep:
                    tensors.append(StateTensor(**item, values=values))
            if digest.finish().hex() != reader.metadata.get("hash"):
                raise HostError(f"{path}: it does not have its own hash; the disk or a crash damaged it")
            return tensors, about
        except (ConfigError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
            raise HostError(f"{path}: it cannot be read ({error})") from None
        finally:
            reader.close()

    def _compare(self, path: Path, other: _Owner) -> None:
        own = self._owner
        if other.run_id != own.run_id:
            raise HostError(f'{path}: it is of the run "{other.run_id}", this is "{own.run_id}"')
        if (other.rank, other.world) != (own.rank, own.world):
            raise HostError(
                f"{path}: rank {other.rank} of {other.world} wrote it, this is rank {own.rank} of {own.world}"
            )
        for part, value in own.layout.items():
            if other.layout.get(part) != value:
                raise HostError(f"{path}: it is of other {part}: {_difference(other.layout.get(part), value)}")

    # --- writing

    def write(self, step: int, run_step: int) -> None:
        """Copy the state to host memory and begin to write it, unless the last one is still being written."""
        if self._is_off:
            return
        if self._writer is not None and self._writer.is_alive():
            self._num_skipped += 1
            if self._num_skipped == 1:
                self._say(
                    f"a checkpoint of the inner optimizer is left out at step {run_step}: the last one is still being "
                    "written; a larger run.checkpoint_every or a faster disk avoids that"
                )
            return
        try:
            tensors = self._copy(self._state.tensors())
            values = self._state.values()
        except (ConfigError, HostError) as error:
            self._is_off = isinstance(error, ConfigError)  # the optimizer's nature, which does not change
            self._failed(f"no checkpoint of the inner optimizer is written, it starts fresh after a crash: {error}")
            return
        if not tensors and not values["state"]:
            return  # SGD without momentum: nothing to keep
        about = {
            "owner": asdict(self._owner),
            "run_step": run_step,
            "values": values,
            "tensors": {
                item.name: {
                    "optimizer": item.optimizer,
                    "parameter": item.parameter,
                    "key": item.key,
                    "is_sharded": item.is_sharded,
                    "on_cpu": item.on_cpu,
                    "shape": list(item.values.shape),
                    "dtype": DTYPE_NAMES[item.values.dtype],
                }
                for item in tensors
            },
        }
        path = self._path(CheckpointId(incarnation=self._start[0], generation=self._start[1], step=step))
        # Not a daemon: the interpreter waits for it at its end.
        self._writer = threading.Thread(
            target=self._write, args=(path, about, tensors), name="atoll-optimizer-checkpoint"
        )
        self._writer.start()

    def finish(self) -> None:
        """Until the last one is written or has failed."""
        if self._writer is not None:
            self._writer.join()

    def discard(self) -> None:
        """Remove all of this rank: what is in them led to a value that is not finite."""
        self._is_off = True
        self.finish()
        for item in _listed(self._folder).get(self._owner.rank, ()):
            _remove(self._path(item))

    def _copy(self, tensors: Sequence[StateTensor]) -> list[StateTensor]:
        """In host memory, complete when this returns. Raises HostError if there is not enough of it."""
        copies = []
        devices = set()
        for item in tensors:
            source, on_gpu = item.values, item.values.device.type == "cuda"
            copy = self._copies.get(item.name)
            if copy is None or (copy.shape, copy.dtype) != (source.shape, source.dtype):
                try:
                    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=on_gpu)
                except (RuntimeError, MemoryError) as error:
                    raise HostError(f"no host memory for a copy of {item.name} ({error})") from None
                self._copies[item.name] = copy
            copy.copy_(source, non_blocking=on_gpu)
            if on_gpu:
                devices.add(source.device)
            copies.append(replace(item, values=copy))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _write(self, path: Path, about: Mapping[str, Any], tensors: Sequence[StateTensor]) -> None:
        aside = path.with_suffix(".new")
        try:
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                _write_file(aside, about, tensors)
                os.replace(aside, path)
                sync_folder(self._folder)
                self._prune()
            except OSError as error:
                raise disk_error(error, path) from error
        except AtollError as error:
            _remove(aside)  # its room belongs to the node
            self._failed(f"a checkpoint of the inner optimizer could not be written; training goes on: {error}")
        else:
            self._num_written += 1
            if self._said_failures:
                self._say(f"checkpoints of the inner optimizer are written again; {self._num_failed} were not")
                self._said_failures.clear()

    def _prune(self) -> None:
        """Keep what is since the second newest checkpoint that all ranks have; rank 0 removes what ranks left that
        are no more."""
        listed = _listed(self._folder)
        own = sorted(listed.pop(self._owner.rank))
        common = sorted(i for i in own if all(i in listed.get(r, ()) for r in self._others()))
        oldest = common[-NUM_KEPT] if len(common) >= NUM_KEPT else own[0]
        for index, item in enumerate(own):
            if item < oldest or index < len(own) - MAX_KEPT:
                _remove(self._path(item))
        if self._owner.rank == 0:
            for path in [*self._folder.glob("rank-*.safetensors"), *self._folder.glob("rank-*.new")]:
                match = _RANK.match(path.name)
                if match is not None and int(match[1]) >= self._owner.world:
                    _remove(path)

    def _others(self) -> list[int]:
        return [rank for rank in range(self._owner.world) if rank != self._owner.rank]

    def _path(self, item: CheckpointId) -> Path:
        return self._folder / f"rank-{self._owner.rank}.{item.incarnation}-{item.generation}-{item.step}.safetensors"

    def _say(self, text: str) -> None:
        sys.stderr.write(f"atoll: {text}\n")

    def _failed(self, text: str) -> None:
        """Said once for what is the same but for numbers, until one is written again."""
        self._num_failed += 1
        kind = re.sub(r"\d+", "", text)
        if kind not in self._said_failures:
            self._said_failures.add(kind)
            self._say(text)


def _write_file(path: Path, about: Mapping[str, Any], tensors: Sequence[StateTensor]) -> None:
    """Raises HostError if it cannot be written, or would leave the node without room."""
    by_name = {item.name: _bytes(item.values) for item in tensors}
    text = json.dumps(about)
    digest = Digest("atoll/optimizer-checkpoint/v1").text(text)
    for item in tensors:
        digest.data(by_name[item.name])
    entries = safetensors_file.in_file_order(
        safetensors_file.Entry(
            item.name, DTYPE_NAMES[item.values.dtype], tuple(item.values.shape), by_name[item.name].nbytes
        )
        for item in tensors
    )
    need_bytes = sum(entry.num_bytes for entry in entries) + len(text)
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < 2 * need_bytes:
        raise HostError(
            f"{path}: {need_bytes / 2**20:.1f} MiB are needed and as much must stay free for the node, "
            f"{free_bytes / 2**20:.1f} MiB are free; make room, or choose another folder with --home"
        )
    pieces = (by_name[entry.name] for entry in entries)
    safetensors_file.write(path, entries, pieces, {KEY: text, "hash": digest.finish().hex()})


def _bytes(values: Tensor) -> memoryview:
    data: memoryview = values.reshape(-1).view(torch.uint8).numpy().data
    return data


def _read_tensor(reader: safetensors_file.Reader, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Raises HostError if a value is not finite; ConfigError or RuntimeError if there is no such tensor."""
    values = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    data = _bytes(values)
    if reader.num_bytes(name, dtype) != data.nbytes:
        raise ConfigError(f"{name!r} has {reader.num_bytes(name, dtype)} bytes, {data.nbytes} are expected")
    for first in range(0, data.nbytes, READ_BYTES):
        part = data[first : first + READ_BYTES]
        part[:] = reader.read(name, first, part.nbytes)
    if values.is_floating_point() and not torch.isfinite(values if values.itemsize > 1 else values.float()).all():
        raise HostError(f"{reader.path}: {name!r} holds values that are not finite")
    return values


def _remove(path: Path) -> None:
    with suppress(OSError):  # a file too many does no harm
        path.unlink(missing_ok=True)


def _listed(folder: Path) -> dict[int, list[CheckpointId]]:
    """What lies in the folder, by rank."""
    found: dict[int, list[CheckpointId]] = {}
    for path in folder.glob("rank-*.safetensors"):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            rank, incarnation, generation, step = (int(n) for n in match.groups())
            found.setdefault(rank, []).append(CheckpointId(incarnation=incarnation, generation=generation, step=step))
    return found


def _difference(other: Any, own: Any) -> str:
    """The first place in which two JSON values differ, in words."""
    if isinstance(other, dict) and isinstance(own, dict):
        for key in [*own, *other]:
            if key not in other or key not in own:
                return f"{key!r} is only {'here' if key in own else 'there'}"
            if other[key] != own[key]:
                return f"{key!r}: {_difference(other[key], own[key])}"
    if isinstance(other, list) and isinstance(own, list) and len(other) == len(own):
        return next(_difference(a, b) for a, b in zip(other, own, strict=True) if a != b)
    return f"{other} there, {own} here"
