"""Which checkpoint a rank can go on from by its own host's files, and what it reads of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from atoll.node.dataplane import safetensors_file
from atoll.node.local_protocol import CheckpointId
from atoll.node.worker import checkpoint_file
from atoll.node.worker.checkpoint_files import listed, naming, path_of
from atoll.node.worker.optimizer_state import OptimizerState, StateTensor
from atoll.node.worker.script_state import ScriptState
from atoll.node.worker.stored_state import StoredState, Wanted
from atoll.protocol.errors import AtollError, HostError

MAX_CRASHED_FROM = 2
"""Once workers crashed before their first step with so many checkpoints, all others are left alone too."""
ANNOUNCE_EVERY_S = 1.0
READ_LIMIT_S = 60.0
"""For the bytes between two announcements, at most READ_BYTES more than a second's."""

Described = Mapping[int, Mapping[str, Any]]
"""What the files of a checkpoint say they have, by the rank that wrote them."""
Loaded = tuple[list[StateTensor], StoredState]
"""What this rank needs, and all of it that is no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRank:
    """Whose checkpoints they are."""

    folder: Path
    state: OptimizerState
    run_id: str
    rank: int
    world: int
    here: range
    """The ranks of this host, which write into the folder."""
    crashed_from: Sequence[CheckpointId]
    """Workers that went on from these crashed before their first step."""
    busy: Callable[[str, float], None]
    """See LocalClient."""

    def path(self, item: CheckpointId, rank: int | None = None, world: int | None = None) -> Path:
        """Of this rank's file, or of that of another rank or number of ranks."""
        return path_of(self.folder, item, self.rank if rank is None else rank, world or self.world)


class CheckpointReader:
    """Of one rank. What cannot be used is said on stderr with the reason."""

    def __init__(self, of: OfRank) -> None:
        self._of = of
        self._announced_at_s = -math.inf
        self._listed = listed(of.folder)
        self.has_some = bool(self._listed)
        """There are files, whether they can be used or not."""
        self._found = {i: files for i, files in sorted(self._listed.items()) if files.are_all(of.here, of.world)}
        self._loaded: dict[CheckpointId, Loaded] = {}
        self.usable = tuple(self._offered())
        """Of this run, with all that this rank needs; oldest first. The newest can be read; reading all of the others
        would take long."""

    def take(self, chosen: CheckpointId) -> Loaded:
        """What was read, or is read now. Raises HostError if the file is damaged."""
        loaded = self._loaded.pop(chosen, None)
        self._loaded.clear()  # its memory is needed for the other one
        return loaded or self._load(chosen)

    def forget(self) -> None:
        """Of what was read nothing is wanted."""
        self._loaded.clear()

    def restore_script(self, script: ScriptState, chosen: CheckpointId) -> None:
        """What the script keeps. Raises HostError if the file is damaged."""
        path = self._found[chosen].paths[self._writer_of_script(chosen)]
        try:
            with naming(path), closing(safetensors_file.Reader(path)) as reader:
                at = partial(self._of.busy, f"reading the script's state in {path.name}")
                read = partial(checkpoint_file.read_tensor, reader, at=lambda _: at(READ_LIMIT_S), is_finite=False)
                described = checkpoint_file.read_description(path)
                script.restore(path, described, read, is_own=self._is_own(chosen))
        finally:
            self._of.busy("", 0.0)

    def _is_own(self, item: CheckpointId) -> bool:
        return self._found[item].world == self._of.world

    def _writer_of_script(self, item: CheckpointId) -> int:
        """The rank whose script's state this one takes."""
        return self._of.rank if self._is_own(item) else 0

    def _left_alone(self, items: Collection[CheckpointId]) -> set[CheckpointId]:
        """Of them."""
        crashed_from = set(items).intersection(self._of.crashed_from)
        return set(items) if len(crashed_from) >= MAX_CRASHED_FROM else crashed_from

    def _offered(self) -> list[CheckpointId]:
        """Headers are compared; then the newest is read whole, and only if it is damaged the one before it."""
        offered, left_alone = [], self._left_alone(self._found)
        for item in self._found:
            if item in left_alone:
                self._say_left_alone(item)
                continue
            try:
                self._wanted(item, self._descriptions(item))
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

    def _say_left_alone(self, item: CheckpointId) -> None:
        which = "it" if item in self._of.crashed_from else "others"
        path = self._of.path(item)
        self._pass_over(f"{path}: workers that went on from {which} crashed before their first step")

    def _pass_over(self, reason: Exception | str) -> None:
        sys.stderr.write(f"atoll: a checkpoint of the inner optimizer is passed over: {reason}\n")

    def _descriptions(self, item: CheckpointId) -> dict[int, dict[str, Any]]:
        """Of all files here, in the order of ranks. Raises HostError, naming the file that is not of this run."""
        found = {}
        for rank, path in sorted(self._found[item].paths.items()):
            with naming(path):
                found[rank] = checkpoint_file.read_description(path)
                if (run_id := found[rank]["run"]) != self._of.run_id:
                    raise HostError(f'it is of the run "{run_id}", this is "{self._of.run_id}"')
        return found

    def _wanted(self, item: CheckpointId, described: Described) -> tuple[list[Wanted], StoredState]:
        """Raises HostError if the checkpoint does not have what this rank needs."""
        files = {self._of.path(item, rank, self._found[item].world): about for rank, about in described.items()}
        with naming(next(iter(files))):
            stored = StoredState(files, self._of.path(item))
            return stored.wanted(self._of.state.needed()), stored

    @torch.no_grad()
    def _load(self, item: CheckpointId) -> Loaded:
        """The state, where the optimizers want it. Raises HostError unless it is as it was written, and finite."""
        self._announced_at_s = -math.inf
        wanted, stored = self._wanted(item, self._descriptions(item))
        num_bytes = sum(part.num_bytes for tensor in wanted for part in tensor.parts)
        done_bytes = 0
        tensors: list[StateTensor] = []
        try:
            with ExitStack() as files:
                readers: dict[Path, safetensors_file.Reader] = {}
                for tensor in wanted:
                    result = self._of.state.empty(tensor)
                    for part in tensor.parts:
                        with naming(part.path):
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
            self._of.busy("", 0.0)

    def _announce(self, num_bytes: int, before_bytes: int, part_bytes: int) -> None:
        """A large file on a slow disk takes longer than workers have to start. The text changes while it gets on."""
        now_s = monotonic()
        if now_s - self._announced_at_s >= ANNOUNCE_EVERY_S:
            self._announced_at_s = now_s
            done = (before_bytes + part_bytes) / max(1, num_bytes)
            what = f"reading its optimizer's checkpoint, {100 * done:.2f} % of {num_bytes / 2**30:.2f} GiB"
            self._of.busy(what, READ_LIMIT_S)
