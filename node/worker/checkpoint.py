"""Checkpoints of this rank's inner optimizers on the site's own disk, written beside the training.

Each rank writes its own file, in safetensors with hashes of everything, at the same steps as the others; it reads what
it needs from the files of all. Parameters are not in them: they come from the outer state. See
docs/decisions/0009-local-checkpoint.md.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from atoll.node.dataplane import safetensors_file
from atoll.node.local_protocol import CheckpointCounts, CheckpointId
from atoll.node.worker import checkpoint_file
from atoll.node.worker.checkpoint_file import KeptTensor
from atoll.node.worker.host_room import HostRoom
from atoll.node.worker.optimizer_state import OptimizerState, StateTensor
from atoll.node.worker.script_state import ScriptState, ScriptTensor
from atoll.node.worker.stored_state import StoredState, Wanted
from atoll.protocol.disk import disk_error, sync_folder
from atoll.protocol.errors import AtollError, ConfigError, HostError

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
_NAME = re.compile(r"rank-(\d{1,9})-of-(\d{1,9})\.(\d{1,19})-(\d{1,19})-(\d{1,19})\.(?:safetensors|new)")
_Loaded = tuple[list[StateTensor], StoredState]
"""What this rank needs, and all of it that is no tensor."""


@dataclass(slots=True)
class _Files:
    """Of one checkpoint, by rank."""

    world: int
    paths: dict[int, Path] = field(default_factory=dict)

    def are_all(self, here: range, world: int) -> bool:
        """That this host may have: those of its own ranks, where there are others and the layout has not changed."""
        return self.paths.keys() >= set(here if self.world == world else range(self.world))


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
        here: range | None = None,
        crashed_from: Sequence[CheckpointId] = (),
        busy: Callable[[str, float], None] = lambda what, limit_s: None,
        script: ScriptState | None = None,
    ) -> None:
        """`here`: the ranks of this host, which write into the folder. `crashed_from`: workers that went on from these
        crashed before their first step. `busy`: see LocalClient."""
        self._folder = folder
        self._state, self._script = state, script
        self._rank, self._world = rank, world
        self._here = here if here is not None else range(world)
        self._run_id = run_id
        self._writer: threading.Thread | None = None
        self._room = HostRoom()  # its contents are the writer's while there is one
        self._start = (0, 0)  # incarnation and generation
        self._is_off = False
        self._num_written = self._num_skipped = self._num_failed = 0
        self._said_failures: set[str] = set()  # since one was written
        for leftover in folder.glob(f"rank-{rank}-of-*.new"):
            _remove(leftover)
        self._busy = busy
        self._announced_at_s = -math.inf
        listed = _listed(folder)
        self._has_some = bool(listed)
        self._found = {i: files for i, files in sorted(listed.items()) if files.are_all(self._here, world)}
        self._loaded: dict[CheckpointId, _Loaded] = {}
        self.usable = tuple(self._offered(set(crashed_from)))
        """Of this run, with all that this rank needs; oldest first. The newest can be read; reading all of the others
        would take long."""

    @property
    def counts(self) -> CheckpointCounts:
        """What became of those that were due."""
        return CheckpointCounts(written=self._num_written, skipped=self._num_skipped, failed=self._num_failed)

    # --- going on from one

    def go_on(
        self,
        chosen: CheckpointId | None,
        incarnation: int,
        generation: int,
        writes: Collection[str] | None = None,
    ) -> bool:
        """Take the state from the checkpoint that every rank has; files are numbered with this start from now on.

        `writes`: of tensors that several ranks have alike, names of those that are this rank's to write; None: all.
        Returns whether the optimizers are not fresh. Raises HostError if the file is damaged.
        """
        self._start = incarnation, generation
        self._state.write_only(writes)
        loaded = None if chosen is None else self._loaded.pop(chosen, None)
        self._loaded.clear()  # its memory is needed for the other one
        if chosen is None:
            if self._has_some:
                self._say("the inner optimizer starts fresh: no checkpoint is usable on every rank")
            return False
        tensors, stored = loaded or self._load(chosen)
        is_restored = self._state.restore(tensors, stored)
        if self._script is not None:
            self._restore_script(self._script, chosen)
        if not is_restored:
            return False  # it keeps nothing, or not where optimizers of torch do
        if self._rank == 0:
            self._say(f"the inner optimizer is restored from step {stored.run_step} of the run")
        return True

    def _restore_script(self, script: ScriptState, chosen: CheckpointId) -> None:
        files = self._found[chosen]
        is_own = files.world == self._world
        path = files.paths[self._rank if is_own else 0]
        try:
            with _naming(path):
                at = partial(self._busy, f"reading the script's state in {path.name}")
                script.restore(path, is_own=is_own, at=lambda _: at(READ_LIMIT_S))
        finally:
            self._busy("", 0.0)

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
                self._wanted(item)
            except AtollError as error:
                self._pass_over(error)
            else:
                offered.append(item)
        while offered and not self._loaded:
            try:
                self._loaded[offered[-1]] = self._load(offered[-1])
            except AtollError as error:
                self._pass_over(error)
                offered.pop()
        return offered

    def _pass_over(self, reason: Exception | str) -> None:
        self._say(f"a checkpoint of the inner optimizer is passed over: {reason}")

    def _descriptions(self, item: CheckpointId) -> dict[Path, dict[str, Any]]:
        """Of all ranks' files, in the order of ranks. Raises HostError, naming the file that is not of this run."""
        found = {}
        for _, path in sorted(self._found[item].paths.items()):
            with _naming(path):
                found[path] = checkpoint_file.read_description(path)
                if (run_id := found[path]["run"]) != self._run_id:
                    raise HostError(f'it is of the run "{run_id}", this is "{self._run_id}"')
        return found

    def _wanted(self, item: CheckpointId) -> tuple[list[Wanted], StoredState]:
        """Raises HostError if the checkpoint does not have what this rank needs."""
        descriptions = self._descriptions(item)
        with _naming(min(self._found[item].paths.items())[1]):
            stored = StoredState(descriptions, self._path(item))
            return stored.wanted(self._state.needed()), stored

    @torch.no_grad()
    def _load(self, item: CheckpointId) -> _Loaded:
        """The state, where the optimizers want it. Raises HostError unless it is as it was written, and finite."""
        self._announced_at_s = -math.inf
        wanted, stored = self._wanted(item)
        num_bytes = sum(part.num_bytes for tensor in wanted for part in tensor.parts)
        done_bytes = 0
        tensors: list[StateTensor] = []
        try:
            with ExitStack() as files:
                readers: dict[Path, safetensors_file.Reader] = {}
                for tensor in wanted:
                    result = self._state.empty(tensor)
                    for part in tensor.parts:
                        with _naming(part.path):
                            if part.path not in readers:
                                reader = safetensors_file.Reader(part.path)
                                readers[part.path] = files.enter_context(closing(reader))
                            at = partial(self._announce, num_bytes, done_bytes)
                            values = checkpoint_file.read_tensor(readers[part.path], part, at)
                        done_bytes += part.num_bytes
                        taken, place = tensor.places(part)
                        result.values[place].copy_(values[taken])
                    tensors.append(result)
            return tensors, stored
        finally:
            self._busy("", 0.0)

    def _announce(self, num_bytes: int, before_bytes: int, part_bytes: int) -> None:
        """A large file on a slow disk takes longer than workers have to start. The text changes while it gets on."""
        now_s = monotonic()
        if now_s - self._announced_at_s >= ANNOUNCE_EVERY_S:
            self._announced_at_s = now_s
            done = (before_bytes + part_bytes) / max(1, num_bytes)
            what = f"reading its optimizer's checkpoint, {100 * done:.2f} % of {num_bytes / 2**30:.2f} GiB"
            self._busy(what, READ_LIMIT_S)

    # --- writing

    def _found_now(self) -> tuple[dict[str, Any] | None, list[StateTensor | ScriptTensor]]:
        """What the script keeps, and all tensors. Raises ConfigError."""
        described, of_script = self._script.taken() if self._script is not None else (None, [])
        return described, [*self._state.tensors(), *of_script]

    def prepare(self) -> None:
        """Now and then before a `write`: so that it need not wait for memory, once the optimizers have a state."""
        if self._is_off:
            return
        with suppress(ConfigError):  # `write` says it
            self._room.prepare({item.name: item.values for item in self._found_now()[1]})

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
            of_script, found = self._found_now()
            copied = self._room.copy({item.name: item.values for item in found})
            tensors: list[KeptTensor] = [replace(item, values=copied[item.name]) for item in found]
            plain = self._state.plain_values()
        except (ConfigError, HostError) as error:
            self._is_off = isinstance(error, ConfigError)  # the optimizer's nature, which does not change
            self._failed(f"no checkpoint of the inner optimizer is written, it starts fresh after a crash: {error}")
            return
        if not tensors and not plain and of_script is None and self._world == 1:
            return  # SGD without momentum: nothing to keep; other ranks may need this one's file to go on from theirs
        about = {"run": self._run_id, "run_step": run_step, "plain": plain, **self._state.about()}
        if of_script is not None:
            about["script"] = of_script
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
        for files in _listed(self._folder).values():
            _remove(files.paths.get(self._rank))

    def _write(self, item: CheckpointId, about: Mapping[str, Any], tensors: Sequence[KeptTensor]) -> None:
        path = self._path(item)
        aside = path.with_suffix(".new")
        try:
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                text = checkpoint_file.describe(about, tensors)
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
        site_bytes = need_bytes * len(self._here)
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
        """Keep what is since the second newest checkpoint that all ranks wrote; of more than MAX_KEPT the newest that
        all wrote and what slower ranks are writing first. The first rank here removes what ranks left that are no
        more."""
        listed, being_written = _listed(self._folder), _listed(self._folder, "new")
        own = sorted(item for item, files in listed.items() if self._rank in files.paths)
        complete = sorted(item for item, files in listed.items() if files.are_all(self._here, self._world))
        oldest = complete[-NUM_KEPT] if len(complete) >= NUM_KEPT else min(listed)
        slower = [i for i in own if i in being_written and being_written[i].paths.keys() - {self._rank}]
        kept = list(dict.fromkeys([*complete[-1:], *reversed(slower), *reversed(own)]))[:MAX_KEPT]
        for item in own:
            if item < oldest or item not in kept:
                _remove(listed[item].paths[self._rank])
        if self._rank == self._here.start:
            older = (files for item, files in listed.items() if item < oldest)
            for files in (*older, *being_written.values()):
                for rank, path in files.paths.items():
                    if rank >= self._world:
                        _remove(path)

    def _others(self) -> list[int]:
        return [rank for rank in self._here if rank != self._rank]

    def _path(self, item: CheckpointId, rank: int | None = None) -> Path:
        rank = self._rank if rank is None else rank
        start = f"{item.incarnation}-{item.generation}"
        return self._folder / f"rank-{rank}-of-{self._world}.{start}-{item.step}.safetensors"

    def _say(self, text: str) -> None:
        sys.stderr.write(f"atoll: {text}\n")

    def _failed(self, text: str) -> None:
        """Said once for what is the same but for numbers, until one is written again."""
        self._num_failed += 1
        kind = re.sub(r"\d+", "", text)
        if kind not in self._said_failures:
            self._said_failures.add(kind)
            self._say(text)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raises HostError with the path for whatever is wrong with the file."""
    try:
        yield
    except (HostError, OSError, *UNREADABLE) as error:
        raise HostError(f"{path}: {error}") from None


def _remove(path: Path | None) -> None:
    with suppress(OSError):  # a file too many does no harm
        if path is not None:
            path.unlink(missing_ok=True)


def _listed(folder: Path, kind: str = "safetensors") -> dict[CheckpointId, _Files]:
    """What lies in the folder; "new": what is being written."""
    found: dict[CheckpointId, _Files] = {}
    for path in folder.glob(f"rank-*.{kind}"):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            rank, world, incarnation, generation, step = (int(n) for n in match.groups())
            item = CheckpointId(incarnation=incarnation, generation=generation, step=step)
            found.setdefault(item, _Files(world)).paths[rank] = path
    return found
