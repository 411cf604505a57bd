"""One generation of ranks after the other: which is served, when it counts as crashed, and what outlives it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from atoll.node import local_protocol as local
from atoll.node.core.events import (
    Answer,
    BoundaryAsked,
    LayoutSent,
    PiecesMerged,
    RankEvent,
    RankLost,
)
from atoll.node.core.host_events import SlicesArrived, SnapshotShared
from atoll.node.core.outputs import AnswerDraw, AnswerWorkers, RefuseRank, SendLayout
from atoll.node.core.ranks.group import Outcome, WorkerGroup
from atoll.node.core.ranks.liveness import StepTimes, Watch
from atoll.node.core.ranks.reports import tokens_once
from atoll.node.core.ranks.status import Due
from atoll.node.local_protocol import MAX_CHECKPOINTS, NO_CHECKPOINTS, CheckpointCounts, CheckpointId, LocalLayout
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.logged import Logged
from atoll.protocol.time_limits import TimeLimits

EXIT_GRACE_S = 1.0
"""From a rank's lost connection to the exit of the workers, which says why."""

HEARS: dict[type[local.Said], Callable[[WorkerGroup, int, Any, float], Outcome]] = {
    local.LocalHello: WorkerGroup.hello,
    local.LocalJoin: WorkerGroup.join,
    local.Boundary: WorkerGroup.boundary,
    local.SealedReport: WorkerGroup.sealed,
    local.MergedReport: WorkerGroup.merged,
    local.Fatal: WorkerGroup.fatal,
    local.Busy: WorkerGroup.busy,
    local.Progress: WorkerGroup.progress,
    local.DataSet: WorkerGroup.data_set,
    local.Draw: WorkerGroup.draw,
    local.Goodbye: WorkerGroup.goodbye,
    Logged: WorkerGroup.logged,
}
"""By the kind of a rank's message, what becomes of it."""


class Overdue(NamedTuple):
    """A rank that is lost, or hangs; `text` is for a person."""

    rank: int
    text: str


class Generations:
    """`group` is the last one that was begun, if any; to be read."""

    def __init__(self, num_ranks: int, now: float, num_elsewhere: int = 0, start_limit_s: float = 0.0) -> None:
        """`num_ranks` of each generation; 0: nobody watches them, and what they agree on comes as events.
        `num_elsewhere`: so many of them, the last ones, are on other hosts. `start_limit_s`: see SiteIdentity."""
        self._start_limit_s = start_limit_s
        self.group: WorkerGroup | None = None
        self._num_ranks = num_ranks
        self.num_elsewhere = num_elsewhere
        self._step_times = StepTimes()
        self._earlier_checkpoints: CheckpointCounts = NO_CHECKPOINTS
        self._earlier_tokens = self._earlier_skipped = 0
        self._crashed_from: deque[CheckpointId] = deque(maxlen=MAX_CHECKPOINTS)
        self._lost: tuple[float, Overdue] | None = None  # until when the exit may say more
        self._seen_at = now

    def begin(self, generation: int, now: float) -> None:
        """New ranks, in place of those before."""
        self._lost = None
        if self._num_ranks:
            self._earlier_checkpoints, self._earlier_tokens = self.checkpoints, self.trained_tokens
            self._earlier_skipped = self.skipped_steps
            self.group = WorkerGroup(generation, self._num_ranks, now, self._step_times, self.num_elsewhere)

    def end(self) -> None:
        """They are being stopped: nothing more comes of them."""
        self._lost = None
        if self.group is not None:
            self.group.end()

    def heard(self, event: RankEvent, now: float) -> Outcome:
        """What follows from it; nothing, if it is of another generation. A rank that may not say that is refused: its
        connection ends, and with it the group."""
        group = self.group
        if group is None or group.generation != event.generation:
            return ()
        match event:
            case RankLost():
                if (text := group.lost(event.rank, event.text)) is not None:
                    self._lost = now + EXIT_GRACE_S, Overdue(event.rank, text)
                return ()
            case PiecesMerged():
                return group.put_together(event)
            case LayoutSent():
                return group.layout_sent(now)
            case SlicesArrived():
                return [] if group.failed else group.arriving.came(event.rank, event.step, event.seq)
            case SnapshotShared():
                return [] if group.failed else group.arriving.shared(event.step, event.seq)
        try:
            return HEARS[type(event.said)](group, event.rank, event.said, now)
        except InvalidMessage as error:
            return [RefuseRank(event.generation, event.rank, str(error))]

    def answer(self, ask: BoundaryAsked, answer: Answer, now: float) -> AnswerWorkers:
        """Fix what every rank does there. Requires that it is the open question."""
        if self.group is not None:
            return self.group.answer(ask.step, ask.seq, answer, now)
        return AnswerWorkers(generation=ask.generation, step=ask.step, seq=ask.seq, answer=answer)

    def drawn(self, answer: AnswerDraw, now: float) -> None:
        """It is on its way."""
        if self.group is not None:
            end = answer.first + sum(item.num_samples for item in answer.ranges)
            self.group.drawn(answer.rank, answer.epoch, end, now)

    def exited(self, generation: int) -> None:
        """What their exit says is enough."""
        if self.group is not None and self.group.generation == generation:
            self._lost = None

    def crashed(self, generation: int) -> None:
        """If they did no step, later ones do not go on from the checkpoint that they had."""
        group = self.group
        if group is None or group.generation != generation or group.went_on_from is None or group.num_steps:
            return
        if group.went_on_from not in self._crashed_from:
            self._crashed_from.append(group.went_on_from)

    @property
    def all_ask(self) -> bool:
        """Whether each rank waits for the answer to the open question, and none is in its script."""
        return self.group is None or all(status.due is Due.ANSWER for status in self.group.ranks)

    # --- deadlines

    def watch(self, limits: TimeLimits) -> Watch | None:
        """The rank whose time is over first."""
        if self.group is None:
            return None
        return self.group.watch(limits.worker_floor_s, self._start_limit_s or limits.worker_start_s)

    def overdue(self, now: float, limits: TimeLimits) -> Overdue | None:
        """Why they count as crashed now; None while they do not."""
        watch = self.watch(limits)
        if self._lost is not None and now >= self._lost[0]:
            lost, self._lost = self._lost[1], None
            return lost
        return Overdue(watch.rank, watch.text) if watch is not None and now >= watch.deadline else None

    def next_deadline(self, limits: TimeLimits) -> float | None:
        """While a rank is watched the node looks at it again and again, to see when it stood still itself."""
        watch = self.watch(limits)
        times = [] if watch is None else [watch.deadline, self._seen_at + limits.heartbeat_s]
        return min([*times, *(self._lost or ())[:1]], default=None)

    def seen(self, now: float, limits: TimeLimits) -> None:
        """The node is awake. If it stood still, what its ranks said meanwhile is not read yet."""
        late_s = now - self._seen_at - limits.heartbeat_s
        self._seen_at = now
        if late_s > limits.lease_s and self.group is not None:
            self.group.excuse(late_s)

    # --- over all generations

    @property
    def num_steps(self) -> int:
        """Of the last one, as far as its ranks have said."""
        return 0 if self.group is None else self.group.num_steps

    @property
    def checkpoints(self) -> CheckpointCounts:
        """Of all ranks of all generations."""
        ranks = () if self.group is None else self.group.ranks
        return sum((rank.checkpoints for rank in ranks), self._earlier_checkpoints)

    @property
    def trained_tokens(self) -> int:
        """Of all generations, as far as their ranks have said."""
        ranks = () if self.group is None else self.group.ranks
        return self._earlier_tokens + tokens_once((rank.data_rank, rank.readings.trained_tokens) for rank in ranks)

    @property
    def skipped_steps(self) -> int:
        """Of all generations; of ranks that skip together, one counts."""
        ranks = () if self.group is None else self.group.ranks
        return self._earlier_skipped + max((rank.readings.skipped_steps for rank in ranks), default=0)

    @property
    def crashed_from(self) -> tuple[CheckpointId, ...]:
        """Checkpoints that workers went on from and crashed without a step."""
        return tuple(self._crashed_from)


def layout_of(
    group: WorkerGroup, admits: SendLayout, incarnation: int, chunk_elements: int, rank: int, *, outer_name: str = ""
) -> LocalLayout:
    """What this rank is told. Requires that all ranks have joined; nothing that it reads changes after that."""
    assert group.pieces is not None
    reader, num_readers = group.reader_of(rank)
    return LocalLayout(
        site_id=admits.site_id,
        incarnation=incarnation,
        run_seed=admits.run_seed,
        chunk_elements=chunk_elements,
        owned_pieces=group.pieces.owned[rank],
        kept_pieces=group.pieces.kept[rank],
        data_seed=local.data_seed(admits.run_seed, admits.site_id, incarnation, group.generation),
        shared_pieces=group.pieces.shared_of(rank),
        reader=reader,
        num_readers=num_readers,
        checkpoint=group.checkpoint,
        outer_name=outer_name,
    )
