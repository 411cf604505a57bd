"""A generation of ranks without the rest of a node's core: spoken to with plain values, or served over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from atoll.node import local_protocol as local
from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.events import Answer
from atoll.node.core.outputs import AnswerDraw, MergePieces, RefuseRank, SendLayout, ShareSnapshot
from atoll.node.core.ranks.generations import HEARS, Generations, layout_of
from atoll.node.core.ranks.group import Outcome, WorkerGroup
from atoll.node.core.ranks.liveness import StepTimes
from atoll.node.core.ranks.pieces import SitePieces, site_pieces
from atoll.node.daemon.local_server import LocalServer
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.local_protocol import (
    LOCAL_VERSION,
    NO_CHECKPOINTS,
    CheckpointCounts,
    DataSet,
    Greeting,
    LocalJoin,
    Piece,
    Said,
)
from atoll.protocol.layout import Layout, Manifest


def offer(
    manifest: Manifest, pieces: tuple[Piece, ...] = (), fingerprint: bytes = b"", data_rank: int = 0, **rest: Any
) -> LocalJoin:
    return LocalJoin(manifest=manifest, pieces=pieces, data_fingerprint=fingerprint, data_rank=data_rank, **rest)


class Ranks:
    """A group that hears each message as it comes through the wire; else as the group itself."""

    def __init__(
        self, generation: int, num_ranks: int, now: float, times: StepTimes | None = None, num_elsewhere: int = 0
    ) -> None:
        self.group = WorkerGroup(generation, num_ranks, now, times or StepTimes(), num_elsewhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def say(self, rank: int, said: Said, now: float) -> Outcome:
        heard = local.unpack(local.pack(self.group.generation, rank, said))
        return HEARS[type(heard)](self.group, rank, heard, now)

    def hello(self, rank: int, pid: int, now: float) -> Outcome:
        hello = local.LocalHello(world_size=self.group.world_size, pid=pid, protocol_version=LOCAL_VERSION)
        return self.say(rank, hello, now)

    def join(self, rank: int, offered: LocalJoin, now: float) -> Outcome:
        return self.say(rank, offered, now)

    def put_together(self, pieces: SitePieces | str) -> Outcome:
        """As the node does it in a thread, where nobody asks what it offers beside."""
        return self.group.put_together(e.PiecesMerged(generation=self.group.generation, pieces=pieces))

    def boundary(self, rank: int, step: int, seq: int, now: float) -> Outcome:
        return self.say(rank, local.Boundary(step=step, seq=seq), now)

    def sealed(self, rank: int, report: local.SealedReport, now: float) -> Outcome:
        return self.say(rank, report, now)

    def merged(self, rank: int, version: int, wait_s: float, now: float) -> Outcome:
        return self.say(rank, local.MergedReport(version=version, step=0, wait_s=wait_s), now)

    def data_set(self, rank: int, data: DataSet) -> Outcome:
        return self.say(rank, data, 0.0)

    def draw(self, rank: int, epoch: int, first: int, num_samples: int, now: float) -> Outcome:
        return self.say(rank, local.Draw(epoch=epoch, first=first, num_samples=num_samples), now)

    def fatal(self, rank: int, kind: str, text: str) -> Outcome:
        return self.say(rank, local.Fatal(kind=kind, text=text), 0.0)

    def busy(self, rank: int, what: str, limit_s: float, now: float) -> Outcome:
        return self.say(rank, local.Busy(what=what, limit_s=limit_s), now)

    def progress(
        self, rank: int, step: int, steps_per_s: float, now: float, *, checkpoints: CheckpointCounts = NO_CHECKPOINTS
    ) -> Outcome:
        return self.say(rank, local.Progress(step=step, steps_per_s=steps_per_s, checkpoints=checkpoints), now)

    def goodbye(self, rank: int, reason: str, run_over: bool) -> Outcome:
        return self.say(rank, local.Goodbye(reason=reason, run_over=run_over), 0.0)


Happened = e.OfSite | e.RankLost | out.ShareSnapshot
"""What the ranks come to together, and that one is lost."""


class ServedRanks(LocalServer):
    """A local server whose ranks are heard as by a core; what they come to goes to `on_event`."""

    def __init__(self, on_event: Callable[[Happened], None], on_failure: Callable[[BaseException], None]) -> None:
        super().__init__(self._heard, on_failure)
        self._happened = on_event
        self.ranks = Generations(0, 0.0)

    @property
    def group(self) -> WorkerGroup:
        assert self.ranks.group is not None, "no generation was begun"
        return self.ranks.group

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def serve(self, generation: int, num_ranks: int, greeting: Greeting) -> WorkerGroup:
        """From now on. Returns what is known of the ranks."""
        self.begin(generation, greeting)
        self.ranks = Generations(num_ranks, self.now())
        self.ranks.begin(generation, self.now())
        return self.group

    def _heard(self, event: e.RankEvent) -> None:
        was_over = self.group.failed
        outcome = self.ranks.heard(event, self.now())
        if isinstance(event, e.RankLost) and self.group.failed and not was_over:
            self._happened(event)
        self._follows(outcome)

    def _follows(self, outcome: Outcome) -> None:
        for item in outcome:
            match item:
                case RefuseRank() | out.AnswerWorkers() | AnswerDraw():
                    self.execute(item)
                case MergePieces():
                    self._merge(item)
                case ShareSnapshot():
                    raise AssertionError("all of its ranks are here")
                case _:
                    self._happened(item)

    def _merge(self, output: MergePieces) -> None:
        self._tasks.spawn(self._merge_in_a_thread(output))

    async def _merge_in_a_thread(self, output: MergePieces) -> None:
        pieces = await asyncio.to_thread(site_pieces, output.ranks)
        self._heard(e.PiecesMerged(generation=output.generation, pieces=pieces))

    def answer(self, generation: int, step: int, seq: int, answer: Answer) -> None:
        """As the core does."""
        if generation == self.generation:
            self.execute(self.group.answer(step, seq, answer, self.now()))

    def answer_draw(self, output: AnswerDraw) -> None:
        """As the core does."""
        if output.generation == self.generation:
            self.ranks.drawn(output, self.now())
        self.execute(output)

    async def admit(
        self,
        layout: Layout,
        snapshot: SharedBuffer,
        publish: SharedBuffer,
        *,
        site_id: int = 1,
        incarnation: int = 1,
        run_seed: int = 1,
    ) -> None:
        group = self.group
        admits = SendLayout(generation=group.generation, site_id=site_id, run_seed=run_seed)

        def told(rank: int) -> local.LocalLayout:
            return layout_of(group, admits, incarnation, layout.chunk_elements, rank)

        await self.send_layout(group.generation, told, layout, snapshot, publish)
