"""Checkpoints of this rank's inner optimizers on the site's own disk, written beside the training.

Each rank writes its own file, in safetensors with a hash over everything, at the same steps as the others. Parameters
are not in it: they come from the outer state. See docs/decisions/0009-local-checkpoint.md.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from atoll.node.dataplane import safetensors_file
from atoll.node.local_protocol import CheckpointCounts, CheckpointId
from atoll.node.worker import checkpoint_file
from atoll.node.worker.host_room import HostRoom
from atoll.node.worker.optimizer_state import OptimizerState, StateTensor
from atoll.node.worker.tensors import DTYPE_NAMES
from atoll.protocol.disk import disk_error, sync_folder
from atoll.protocol.errors import AtollError, ConfigError, HostError
from atoll.protocol.text import differences

NUM_KEPT = 2
MAX_KEPT = 4
"""Of one rank, while other ranks' disks are slower."""
MAX_CRASHED_FROM = 2
"""Once workers crashed before their first step with so many checkpoints, all others are left alone too."""
ANNOUNCE_EVERY_S = 1.0
READ_LIMIT_S = 60.0
"""For the bytes between two announcements, at most READ_BYTES more than a second's."""
UNREADABLE = (ConfigError, ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, RecursionError)
"""What comes of a damaged header."""
_NAME = re.compile(r"rank-(\d{1,9})\.(\d{1,19})-(\d{1,19})-(\d{1,19})\.(?:safetensors|new)")
_Loaded = tuple[list[StateTensor], dict[str, Any]]
"""With its description."""


class LocalCheckpoints:
    """One rank's checkpoints.

        checkpoints = LocalCheckpoints(folder, state, run_id, rank, world)
        checkpoints.usable                  # to the node, which names the newest that every rank offers, or none
        checkpoints.go_on(chosen, incarnation, generation)
        checkpoints.prepare()               # some steps before,
        checkpoints.prepare_more()          # and at each step after that
        checkpoints.write(step, run_step)   # every so many steps: copies here, writes in a thread
        checkpoints.finish()

    What cannot be used or written is said on stderr with the reason, and training goes on without it.
    """

    def __init__(
        self,
        folder: Path,
        state: OptimizerState,
        run_id: str,
        rank: int,
        world: int,
        *,
        crashed_from: Sequence[CheckpointId] = (),
        busy: Callable[[str, float], None] = lambda what, limit_s: None,
    ) -> None:
        """`crashed_from`: workers that went on from these crashed before their first step. `busy`: see LocalClient."""
        self._folder = folder
        self._state = state
        self._rank, self._world = rank, world
        self._owner = {"run": run_id, "rank": f"{rank} of {world}", **state.layout()}
        self._writer: threading.Thread | None = None
        self._room = HostRoom()  # its contents are the writer's while there is one
        self._start = (0, 0)  # incarnation and generation
        self._is_off = False
        self._num_written = self._num_skipped = self._num_failed = 0
        self._said_failures: set[str] = set()  # since one was written
        for leftover in folder.glob(f"rank-{rank}.*.new"):
            _remove(leftover)
        self._busy = busy
        self._announced_at_s = -math.inf
        self._found = sorted(_listed(folder).get(rank, ()))
        self._loaded: dict[CheckpointId, _Loaded] = {}
        self.usable = tuple(self._offered(set(crashed_from)))
        """Of this run and layout; oldest first. The newest is whole; reading all of the others would take long."""

    @property
    def counts(self) -> CheckpointCounts:
        """What became of those that were due."""
        return CheckpointCounts(written=self._num_written, skipped=self._num_skipped, failed=self._num_failed)

    # --- going on from one

    def go_on(self, chosen: CheckpointId | None, incarnation: int, generation: int) -> bool:
        """Take the state from the checkpoint that every rank has; files are numbered with this start from now on.

        Returns whether the optimizers are not fresh. Raises HostError if the file is damaged.
        """
        self._start = incarnation, generation
        loaded = None if chosen is None else self._loaded.pop(chosen, None)
        self._loaded.clear()  # its memory is needed for the other one
        if chosen is None:
            if self._found:
                self._say("the inner optimizer starts fresh: no checkpoint is usable on every rank")
            return False
        tensors, about = loaded or self._load(chosen)
        if not tensors and not about["values"]["state"]:
            return False  # it keeps nothing, or not where optimizers of torch do
        self._state.restore(tensors, about["values"])
        if self._rank == 0:
            self._say(f"the inner optimizer is restored from step {about['run_step']} of the run")
        return True

    def _offered(self, crashed_from: set[CheckpointId]) -> list[CheckpointId]:
        """Headers are compared; then the newest is read whole, and only if it is damaged the one before it."""
        gives_up = len(crashed_from.intersection(self._found)) >= MAX_CRASHED_FROM
        offered = []
        for item in self._found:
            path = self._path(item)
            if gives_up or item in crashed_from:
                which = "it" if item in crashed_from else "others"
                self._pass_over(f"{path}: workers that went on from {which} crashed before their first step")
                continue
            try:
                with self._reading(path):
                    offered.append(item)
            except (AtollError, OSError) as error:
                self._pass_over(error)
        while offered and not self._loaded:
            try:
                self._loaded[offered[-1]] = self._load(offered[-1])
            except (AtollError, OSError) as error:
                self._pass_over(error)
                offered.pop()
        return offered

    def _pass_over(self, reason: Exception | str) -> None:
        self._say(f"a checkpoint of the inner optimizer is passed over: {reason}")

    @contextmanager
    def _reading(self, path: Path) -> Iterator[tuple[safetensors_file.Reader, str, dict[str, Any]]]:
        """With its description, as text and parsed. Raises HostError unless it is of this run, rank and layout, and for
        whatever is wrong with it within."""
        try:
            with closing(safetensors_file.Reader(path)) as reader:
                text = reader.metadata.get(checkpoint_file.KEY, "")
                about = json.loads(text)
                if found := differences(about["owner"], self._owner):
                    raise HostError(f"{path}: it is not of this run, rank and layout: {found[0]}")
                yield reader, text, about
        except UNREADABLE as error:
            raise HostError(f"{path}: it cannot be read ({error})") from None

    def _load(self, item: CheckpointId) -> _Loaded:
        """The state, where the optimizers want it. Raises HostError unless it is as it was written, and finite."""
        path = self._path(item)
        self._announced_at_s = -math.inf
        try:
            with self._reading(path) as (reader, text, about):
                digest = checkpoint_file.new_digest(text)
                num_bytes = path.stat().st_size
                tensors = []
                done_bytes = 0
                self._announce(num_bytes, 0, 0)
                for name, described in about["tensors"].items():
                    shape, dtype = tuple(described.pop("shape")), described.pop("dtype")
                    at = partial(self._announce, num_bytes, done_bytes)
                    values = checkpoint_file.read_tensor(reader, name, shape, dtype, at)
                    digest.data(checkpoint_file.as_bytes(values))
                    done_bytes += values.nbytes
                    tensors.append(self._state.placed(StateTensor(**described, values=values)))
                if digest.finish().hex() != reader.metadata.get(checkpoint_file.HASH_KEY):
                    raise HostError(f"{path}: it does not have its own hash; the disk or a crash damaged it")
            return tensors, about
        finally:
            self._busy("", 0.0)

    def _announce(self, num_bytes: int, before_bytes: int, part_bytes: int) -> None:
        """A large file on a slow disk takes longer than workers have to start. The text changes while it gets on."""
        now_s = monotonic()
        if now_s - self._announced_at_s >= ANNOUNCE_EVERY_S:
            self._announced_at_s = now_s
            done = (before_bytes + part_bytes) / num_bytes
            what = f"reading its optimizer's checkpoint, {100 * done:.2f} % of {num_bytes / 2**30:.2f} GiB"
            self._busy(what, READ_LIMIT_S)

    # --- writing

    def prepare(self) -> None:
        """Now and then before a `write`: so that it need not wait for memory, once the optimizers have a state."""
        if self._is_off:
            return
        with suppress(ConfigError):  # `write` says it
            self._room.prepare({item.name: item.values for item in self._state.tensors()})

    def prepare_more(self) -> None:
        if not self._is_off:
            self._room.register_part()

    def write(self, step: int, run_step: int) -> None:
        """Copy the state to host memory and begin to write it, unless the last one is still being written."""
        if self._is_off:
            return
        if self.is_writing:
            self._num_skipped += 1
            if self._num_skipped == 1:
                self._say(
                    f"a checkpoint of the inner optimizer is left out at step {run_step}: the last one is still being "
                    "written; a larger run.checkpoint_every or a faster disk avoids that"
                )
            return
        try:
            tensors = self._state.tensors()
            copied = self._room.copy({item.name: item.values for item in tensors})
            tensors = [replace(item, values=copied[item.name]) for item in tensors]
            values = self._state.values()
        except (ConfigError, HostError) as error:
            self._is_off = isinstance(error, ConfigError)  # the optimizer's nature, which does not change
            self._failed(f"no checkpoint of the inner optimizer is written, it starts fresh after a crash: {error}")
            return
        if not tensors and not values["state"] and self._world == 1:
            return  # SGD without momentum: nothing to keep; other ranks may need this one's file to go on from theirs
        about = {
            "owner": self._owner,
            "run_step": run_step,
            "values": values,
            "tensors": {
                item.name: item.described()
                | {"shape": list(item.values.shape), "dtype": DTYPE_NAMES[item.values.dtype]}
                for item in tensors
            },
        }
        item = CheckpointId(incarnation=self._start[0], generation=self._start[1], step=step)
        # Not a daemon: the interpreter waits for it at its end.
        self._writer = threading.Thread(
            target=self._write, args=(item, about, tensors), name="atoll-optimizer-checkpoint"
        )
        self._writer.start()

    @property
    def is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def finish(self) -> None:
        """Until the last one is written or has failed."""
        if self._writer is not None:
            self._writer.join()

    def discard(self) -> None:
        """Remove all of this rank: what is in them led to a value that is not finite."""
        self._is_off = True
        self.finish()
        for path in _listed(self._folder).get(self._rank, {}).values():
            _remove(path)

    def _write(self, item: CheckpointId, about: Mapping[str, Any], tensors: Sequence[StateTensor]) -> None:
        path = self._path(item)
        aside = path.with_suffix(".new")
        try:
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                text = json.dumps(about)
                self._check_room(item, sum(tensor.values.nbytes for tensor in tensors) + len(text))
                checkpoint_file.write(aside, text, tensors)
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

    def _check_room(self, item: CheckpointId, need_bytes: int) -> None:
        """Raises HostError if the files of all ranks, who write theirs now, would leave the node without room.

        Every rank asks for what it needs itself, so the one with the most asks for enough.
        """
        # Before the disk is looked at: what others write meanwhile counts twice then, and not never.
        written_bytes = sum(min(need_bytes, self._written_bytes(item, rank)) for rank in self._others())
        free_bytes = shutil.disk_usage(self._folder).free
        site_bytes = need_bytes * self._world
        if free_bytes + written_bytes < 2 * site_bytes:
            raise HostError(
                f"{self._path(item)}: {site_bytes / 2**20:.1f} MiB are needed by all ranks and as much must stay free "
                f"for the node, {(free_bytes + written_bytes) / 2**20:.1f} MiB are free; make room, or choose another "
                "folder with --home"
            )

    def _written_bytes(self, item: CheckpointId, rank: int) -> int:
        """How much another rank has written of its file of the same checkpoint."""
        path = self._path(item, rank)
        for place in (path.with_suffix(".new"), path):  # it is renamed in this direction
            with suppress(OSError):
                return place.stat().st_size
        return 0

    def _prune(self) -> None:
        """Keep what is since the second newest checkpoint that all ranks have; of more than MAX_KEPT the newest that
        all have and what slower ranks are writing first. Rank 0 removes what ranks left that are no more."""
        listed = _listed(self._folder)
        own = sorted(listed[self._rank])
        common = [i for i in own if all(i in listed.get(r, ()) for r in self._others())]
        oldest = common[-NUM_KEPT] if len(common) >= NUM_KEPT else own[0]
        being_written = _listed(self._folder, "new")
        slower = [i for i in own if any(i in being_written.get(r, ()) for r in self._others())]
        kept = list(dict.fromkeys([*common[-1:], *reversed(slower), *reversed(own)]))[:MAX_KEPT]
        for item in own:
            if item < oldest or item not in kept:
                _remove(self._path(item))
        if self._rank == 0:
            for rank, path in [(r, p) for found in (listed, being_written) for r in found for p in found[r].values()]:
                if rank >= self._world:
                    _remove(path)

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world) if rank != self._rank]

    def _path(self, item: CheckpointId, rank: int | None = None) -> Path:
        rank = self._rank if rank is None else rank
        return self._folder / f"rank-{rank}.{item.incarnation}-{item.generation}-{item.step}.safetensors"

    def _say(self, text: str) -> None:
        sys.stderr.write(f"atoll: {text}\n")

    def _failed(self, text: str) -> None:
        """Said once for what is the same but for numbers, until one is written again."""
        self._num_failed += 1
        kind = re.sub(r"\d+", "", text)
        if kind not in self._said_failures:
            self._said_failures.add(kind)
            self._say(text)


def _remove(path: Path) -> None:
    with suppress(OSError):  # a file too many does no harm
        path.unlink(missing_ok=True)


def _listed(folder: Path, kind: str = "safetensors") -> dict[int, dict[CheckpointId, Path]]:
    """What lies in the folder, by rank; "new": what is being written."""
    found: dict[int, dict[CheckpointId, Path]] = {}
    for path in folder.glob(f"rank-*.{kind}"):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            rank, incarnation, generation, step = (int(n) for n in match.groups())
            item = CheckpointId(incarnation=incarnation, generation=generation, step=step)
            found.setdefault(rank, {})[item] = path
    return found
