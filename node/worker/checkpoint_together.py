"""What a rank reads of a checkpoint whose files lie on several hosts: the ranks read for each other, in rounds.

For a site of several hosts that comes back in another layout. In the same one each rank has all it needs on its own
host, and reads that by itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.node.dataplane import safetensors_file
from atoll.node.local_protocol import CheckpointId
from atoll.node.worker import checkpoint_file
from atoll.node.worker.checkpoint_files import UNREADABLE, Files
from atoll.node.worker.checkpoint_reading import CheckpointReader, OfRank
from atoll.node.worker.optimizer_state import OptimizerState, StateTensor
from atoll.node.worker.ranks_together import RanksTogether
from atoll.node.worker.reading_rounds import Asked, Piece, rounds_of
from atoll.node.worker.script_state import ScriptState, parts_of_script
from atoll.node.worker.stored_state import Part, Wanted
from atoll.node.worker.tensors import TORCH_DTYPES
from atoll.protocol.errors import AtollError, HostError
from atoll.protocol.layout import DTYPE_BYTES

PIECE_BYTES = 16 << 20
"""That a rank reads for others at once."""

_Descriptions = dict[int, dict[str, Any]]
"""Of all files of a checkpoint, by the rank that wrote them."""


class ReaderOfHosts(CheckpointReader):
    """One rank's, beside those of all others."""

    def __init__(self, of: OfRank, together: RanksTogether, *, has_script_state: bool) -> None:
        """`has_script_state`: what the script keeps is wanted too."""
        self._together, self._has_script_state = together, has_script_state
        self._of_script: dict[CheckpointId, tuple[dict[str, Any], dict[str, Tensor]]] = {}  # description and tensors
        super().__init__(of)

    def forget(self) -> None:
        super().forget()
        self._of_script.clear()

    def restore_script(self, script: ScriptState, chosen: CheckpointId) -> None:
        if chosen not in self._of_script:
            super().restore_script(script, chosen)
            return
        described, values = self._of_script.pop(chosen)
        path = self._of.path(chosen, self._writer_of_script(chosen), self._found[chosen].world)
        script.restore(path, described, lambda part: values[part.name], is_own=self._is_own(chosen))

    def _offered(self) -> list[CheckpointId]:
        """Those of this host if each rank of the site can go on by its own host; else the newest that all can read."""
        newest = max(self._found.keys() - self._left_alone(self._found), default=None)
        try:
            if newest is not None:
                _, stored = self._wanted(newest, self._descriptions(newest))
                if not all(stored.tells_of(needed) for needed in self._of.state.needed()):
                    newest = None
        except AtollError:
            newest = None
        mine = _numbers(newest) if newest is not None else []
        told = self._together.told({"newest": mine, "has_some": self.has_some})
        self.has_some = any(each["has_some"] for each in told)
        if not self.has_some or (mine and all(each["newest"] == mine for each in told)):
            return super()._offered()
        return self._offered_together()

    def _offered_together(self) -> list[CheckpointId]:
        of = self._of
        own = [[_numbers(item), files.world, *files.paths] for item, files in self._listed.items()]
        is_first = of.rank == of.here.start
        told = self._together.told({"here": [of.here.start, of.here.stop], "files": own if is_first else []})
        holders: dict[tuple[CheckpointId, int], dict[int, range]] = {}
        for of_rank in told:
            for (incarnation, generation, step), world, *ranks in of_rank["files"]:
                item = CheckpointId(incarnation=incarnation, generation=generation, step=step)
                holders.setdefault((item, world), {}).update(dict.fromkeys(ranks, range(*of_rank["here"])))
        found = {item: world for (item, world), of_files in holders.items() if of_files.keys() >= set(range(world))}
        left_alone = self._left_alone(found)
        for item, world in sorted(found.items(), reverse=True):
            if item in left_alone:
                self._say_left_alone(item)
                continue
            listed = self._listed.get(item)
            self._found[item] = listed if listed is not None and listed.world == world else Files(world)
            try:
                if self._load_together(item, world, holders[item, world]):
                    return [item]
            except HostError as error:  # ranks have more to say than they can: all of them raise it
                self._pass_over(error)
        return []

    def _load_together(self, item: CheckpointId, world: int, holders: Mapping[int, range]) -> bool:
        """Whether all ranks could."""
        of, together = self._of, self._together
        described = self._described_by_all(item, holders)
        if not described:
            return False
        reading = None
        try:
            wanted, stored = self._wanted(item, described)
            writer = self._writer_of_script(item)
            path, about_script = of.path(item, writer, world), described[writer]
            of_script = parts_of_script(path, about_script) if self._has_script_state else ()
            writers = {of.path(item, rank, world): rank for rank in described}
            reading = _Reading(of.state, wanted, of_script, writers)
        except AtollError as error:
            self._pass_over(error)
        told = together.told(reading.asked if reading is not None else None)
        if reading is None or None in told:
            return False
        asked = [[(int(rank), str(name)) for rank, name in of_rank] for of_rank in told]
        sizes = {each: _num_bytes(described[each[0]]["tensors"][each[1]]) for of_rank in asked for each in of_rank}
        rounds = rounds_of(asked, sizes, holders, PIECE_BYTES)
        own_bytes = sum(sizes[each] for each in asked[of.rank])
        try:
            for number, pieces in enumerate(rounds):
                self._announce(own_bytes, own_bytes * number // len(rounds), 0)
                problem = reading.read(pieces, together)
                if problem:
                    self._pass_over(problem)
                if not together.all_say(yes=not problem):  # and so no rank gets far ahead of another
                    return False
        finally:
            reading.close()
            of.busy("", 0.0)
        self._loaded[item] = reading.tensors, stored
        if self._has_script_state:
            self._of_script[item] = about_script, reading.of_script
        return True

    def _described_by_all(self, item: CheckpointId, holders: Mapping[int, range]) -> _Descriptions:
        """Empty if a host cannot read one of its files. Those of this host first: of what several wrote alike, the
        first is read."""
        here, own, is_read = self._of.here, {}, True
        if self._of.rank == here.start:
            try:
                found = self._descriptions(item)
                own = {rank: about for rank, about in found.items() if holders[rank] == here}
            except AtollError as error:
                self._pass_over(error)
                is_read = False
        told = self._together.told({"is_read": is_read, "files": own})
        if not all(each["is_read"] for each in told):
            return {}
        described = {int(rank): about for each in told for rank, about in each["files"].items()}
        return {rank: described[rank] for rank in sorted(described, key=lambda rank: (holders[rank] != here, rank))}


class _Reading:
    """By one rank, for itself and for others: what it takes goes to its place, a tensor at a time."""

    def __init__(
        self, state: OptimizerState, wanted: Sequence[Wanted], of_script: Sequence[Part], writers: Mapping[Path, int]
    ) -> None:
        """`writers`: of the files, which rank wrote it."""
        self.tensors: list[StateTensor] = []
        self.of_script: dict[str, Tensor] = {}
        self._paths = {rank: path for path, rank in writers.items()}
        self._readers: dict[Path, safetensors_file.Reader] = {}
        self._into: dict[Asked, list[tuple[Part, Tensor, Wanted]]] = defaultdict(list)
        self._script_parts = {(writers[part.path], part.name): part for part in of_script}
        for each in wanted:
            self.tensors.append(state.empty(each))
            for part in each.parts:
                self._into[writers[part.path], part.name].append((part, self.tensors[-1].values, each))
        self._values = torch.empty(0)
        self.asked: list[Asked] = sorted(self._into.keys() | self._script_parts.keys())
        """What this rank takes, in whichever order."""

    def read(self, pieces: Iterable[Piece], together: RanksTogether) -> str:
        """This rank's part in a round. What was wrong with a file; empty if nothing was."""
        me = together.rank
        piece = next((piece for piece in pieces if me in (piece.reader, *piece.takers)), None)
        if piece is None:
            return ""
        problem, data = "", torch.zeros(piece.num_bytes, dtype=torch.uint8)
        try:
            if me == piece.reader:
                data.numpy()[:] = memoryview(self._from_file(piece))
        except (AtollError, OSError, *UNREADABLE) as error:
            problem = str(error)
        if piece.num_bytes and me == piece.reader:  # also what could not be read: it is waited for
            together.send(data, [rank for rank in piece.takers if rank != me])
        elif piece.num_bytes:
            data = together.receive(piece.num_bytes, piece.reader)
        try:
            if me in piece.takers and not problem:
                self._take(piece, data)
        except (AtollError, *UNREADABLE) as error:
            problem = str(error)
        return problem

    def _from_file(self, piece: Piece) -> bytes:
        path = self._paths[piece.of[0]]
        if path not in self._readers:
            self._readers[path] = safetensors_file.Reader(path)
        return self._readers[path].read(piece.of[1], piece.first_byte, piece.num_bytes)

    @torch.no_grad()
    def _take(self, piece: Piece, data: Tensor) -> None:
        of_script = self._script_parts.get(piece.of)
        places = self._into[piece.of]
        part = of_script or places[0][0]
        if piece.first_byte == 0:
            self._values = torch.empty(part.shape, dtype=TORCH_DTYPES[part.dtype])
        checkpoint_file.as_bytes(self._values)[piece.first_byte :][: piece.num_bytes] = data.numpy().data
        if not piece.is_last:
            return
        checkpoint_file.check(self._values, part, is_finite=of_script is None)
        for each, values, wanted in places:
            taken, place = wanted.places(each)
            values[place].copy_(self._values[taken])
        if of_script is not None:
            self.of_script[part.name] = self._values
        self._values = torch.empty(0)  # before there is room for the next one

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


def _numbers(item: CheckpointId) -> list[int]:
    return [item.incarnation, item.generation, item.step]


def _num_bytes(described: Mapping[str, Any]) -> int:
    shape: list[int] = described["shape"]
    return math.prod(shape) * DTYPE_BYTES[described["dtype"]]
