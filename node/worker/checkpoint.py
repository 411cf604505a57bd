"""Checkpoints of this rank's inner optimizers on the site's own disk, written beside the training.

Each rank writes its own file, in safetensors with hashes of everything, at the same steps as the others; it reads what
it needs from the files of all. Parameters are not in them: they come from the outer state. See
docs/decisions/0009-local-checkpoint.md.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.node.local_protocol import CheckpointCounts, CheckpointId
from atoll.node.worker import checkpoint_file
from atoll.node.worker.checkpoint_file import KeptTensor
from atoll.node.worker.checkpoint_files import listed, path_of, remove
from atoll.node.worker.checkpoint_reading import CheckpointReader, OfRank
from atoll.node.worker.checkpoint_together import ReaderOfHosts
from atoll.node.worker.host_room import HostRoom
from atoll.node.worker.optimizer_state import OptimizerState, StateTensor
from atoll.node.worker.ranks_together import RanksTogether
from atoll.node.worker.script_state import ScriptState, ScriptTensor, not_kept
from atoll.protocol.disk import disk_error, sync_folder
from atoll.protocol.errors import AtollError, ConfigError, HostError

NUM_KEPT = 2
MAX_KEPT = 4
"""Of one rank, while other ranks' disks are slower."""


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
        together: RanksTogether | None = None,
    ) -> None:
        """`here`: the ranks of this host, which write into the folder. `crashed_from`: workers that went on from these
        crashed before their first step. `busy`: see LocalClient. `together`: all ranks make theirs at the same time;
        None: this one reads what its own host has."""
        self._folder = folder
        self._state, self._script = state, script
        self._rank, self._world = rank, world
        self._here = here if here is not None else range(world)
        self._run_id = run_id
        self._writer: threading.Thread | None = None
        self._room = HostRoom()  # its contents are the writer's while there is one
        self._start = (0, 0)  # incarnation and generation
        self._is_off = False
        self._has_looked = False  # for schedulers that are not kept
        self._num_written = self._num_skipped = self._num_failed = 0
        self._said_failures: set[str] = set()  # since one was written
        for leftover in folder.glob(f"rank-{rank}-of-*.new"):
            remove(leftover)
        of = OfRank(
            folder=folder,
            state=state,
            run_id=run_id,
            rank=rank,
            world=world,
            here=self._here,
            crashed_from=crashed_from,
            busy=busy,
        )
        self._kept = (
            ReaderOfHosts(of, together, has_script_state=script is not None)
            if together is not None
            else CheckpointReader(of)
        )
        self.usable = self._kept.usable
        """Of this run, with all that this rank needs; oldest first."""

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
    ) -> int | None:
        """Take the state from the checkpoint that every rank has; files are numbered with this start from now on.

        `writes`: of tensors that several ranks have alike, names of those that are this rank's to write; None: all.
        Returns at which step of the run it was written; None: the optimizers are fresh. Raises HostError if the file is
        damaged.
        """
        self._start = incarnation, generation
        self._state.write_only(writes)
        if chosen is None:
            self._kept.forget()
            if self._kept.has_some:
                self._say("the inner optimizer starts fresh: no checkpoint is usable on every rank")
            elif generation > 1 and self._rank == 0:
                self._say("the inner optimizer starts fresh: no checkpoint was written before (run.checkpoint_every)")
            return None
        tensors, stored = self._kept.take(chosen)
        is_restored = self._state.restore(tensors, stored)
        if self._script is not None:
            self._kept.restore_script(self._script, chosen)
        if not is_restored:
            return None  # it keeps nothing, or not where optimizers of torch do
        if self._rank == 0:
            self._say(f"the inner optimizer is restored from step {stored.run_step} of the run")
        return stored.run_step

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
        if not self._has_looked and self._rank == 0 and (text := not_kept(self._state.optimizers, self._script)):
            self._say(text)
        self._has_looked = True
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
        for files in listed(self._folder).values():
            remove(files.paths.get(self._rank))

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
            remove(aside)  # its room belongs to the node
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
        all wrote and what slower ranks are writing first. Disks of other hosts may be slower, too: what is since the
        last MAX_KEPT is kept for their ranks. The first rank here removes what ranks left that are no more."""
        found, being_written = listed(self._folder), listed(self._folder, "new")
        own = sorted(item for item, files in found.items() if self._rank in files.paths)
        complete = sorted(item for item, files in found.items() if files.are_all(self._here, self._world))
        num_kept = MAX_KEPT if self._world > len(self._here) else NUM_KEPT
        oldest = complete[-num_kept] if len(complete) >= num_kept else min(found)
        slower = [i for i in own if i in being_written and being_written[i].paths.keys() - {self._rank}]
        kept = list(dict.fromkeys([*complete[-1:], *reversed(slower), *reversed(own)]))[:MAX_KEPT]
        for item in own:
            if item < oldest or item not in kept:
                remove(found[item].paths[self._rank])
        if self._rank == self._here.start:
            older = (files for item, files in found.items() if item < oldest)
            for files in (*older, *being_written.values()):
                for rank, path in files.paths.items():
                    if rank >= self._world:
                        remove(path)

    def _others(self) -> list[int]:
        return [rank for rank in self._here if rank != self._rank]

    def _path(self, item: CheckpointId, rank: int | None = None) -> Path:
        return path_of(self._folder, item, self._rank if rank is None else rank, self._world)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"atoll: {text}\n")

    def _failed(self, text: str) -> None:
        """Said once for what is the same but for numbers, until one is written again."""
        self._num_failed += 1
        kind = re.sub(r"\d+", "", text)
        if kind not in self._said_failures:
            self._said_failures.add(kind)
            self._say(text)
