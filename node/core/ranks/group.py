"""One generation of workers, seen as one: agrees over its ranks and says what happened to the site. Pure.

Ranks go through the same *points*, the (step, seq) at which they ask the node what to do. The answer at one point fixes
the next one, so a rank that asks anywhere else has done another number of steps. Ranks may be points apart, but the
question of a point goes to the core only when every rank has reported on the snapshot or merge before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from atoll.node import local_protocol as local
from atoll.node.core import events
from atoll.node.core.events import Answer, AnswerKind, OfSite
from atoll.node.core.outputs import AnswerWorkers, MergePieces, RefuseRank, ShareSnapshot, ToRanks
from atoll.node.core.ranks.arriving import Arriving
from atoll.node.core.ranks.liveness import StepTimes, Watch, first_to_hang
from atoll.node.core.ranks.pieces import SitePieces
from atoll.node.core.ranks.reports import check_report, differing_replicas, in_words, sealed_by_all, wrong_in_data
from atoll.node.core.ranks.status import Due, Point, RankStatus
from atoll.node.local_protocol import FATAL_KINDS, CheckpointId, DataSet, LocalJoin, SealedReport
from atoll.protocol.errors import AtollError, ConfigError, InvalidMessage, NonFiniteError, ScriptNonFinite, WorkerError
from atoll.protocol.messages import MAX_TOKENS, Logged
from atoll.protocol.sample_order import MAX_POSITION

REPLICAS_EVERY_SYNCS = 10
"""Copies of a slice are compared at a site's first sync and at every so many after it: training waits
while ranks hash, so not at each; the number is how many syncs may average a drift in before it is found."""
MAX_STEPS = 1 << 48
MAX_DRAWN = 1 << 36
"""Samples of one question; what is answered are intervals."""

Outcome = Sequence[OfSite | ToRanks | MergePieces | ShareSnapshot]
"""What follows from what ranks say: events of the site, and what is to be done."""


class WorkerGroup:
    """Methods named after what a rank sends take the rank, its message and `now`, and return what follows from it.

    They raise InvalidMessage if the rank may not say that now; `lost` then ends the group. After a failure nothing
    more comes out.
    """

    def __init__(
        self, generation: int, world_size: int, now: float, step_times: StepTimes, num_elsewhere: int = 0
    ) -> None:
        """`step_times` outlive the generation. `num_elsewhere`: so many ranks, the last ones, are on other hosts."""
        self.generation = generation
        self._step_times = step_times
        self.world_size = world_size
        self.ranks = tuple(RankStatus(rank, now) for rank in range(world_size))
        self.pieces: SitePieces | None = None
        self.failed = False
        self._joined: dict[int, LocalJoin] = {}
        self._points = [Point(0, 0)]
        self._first_point = 0  # index of _points[0]; earlier ones are over for every rank
        self.arriving = Arriving(generation, range(world_size - num_elsewhere, world_size))
        self._syncs_to_check: int | None = None  # first values may differ: they are overwritten
        self._reasons: dict[int, str] = {}
        self._data: dict[int, DataSet] = {}
        self.went_on_from: CheckpointId | None = None

    # --- what ranks send

    def hello(self, rank: int, hello: local.LocalHello, now: float) -> Outcome:
        """It has connected. What its model is comes next."""
        wrong, version = "", hello.protocol_version
        if version != local.LOCAL_VERSION:
            wrong = f"the worker speaks version {version} of the local protocol, this node {local.LOCAL_VERSION}; "
            wrong += "run both from one installation of atoll"
        elif hello.world_size != self.world_size or rank >= self.world_size:
            wrong = f"rank {rank} of {hello.world_size} asks to join; this site has {self.world_size} ranks (--ranks)"
        if wrong:
            return [*self.fail(wrong), RefuseRank(self.generation, rank, wrong)]
        status = self._enter(rank, "hello", Due.HELLO)
        status.pid = hello.pid
        status.due, status.moved_at = Due.JOIN, now
        return []

    def join(self, rank: int, offered: LocalJoin, now: float) -> Outcome:
        """It has built its model. When all have, their pieces are put together, which takes a thread."""
        status = self._enter(rank, "join", Due.JOIN)
        status.due, status.moved_at = Due.LAYOUT, now
        self._joined[rank], self.ranks[rank].data_rank = offered, offered.data_rank
        if self._reasons:
            return self._unequal_end(list(self._reasons), rank)
        if len(self._joined) < self.world_size or self.failed:
            return []
        in_order = tuple(self._joined[r] for r in range(self.world_size))
        first = in_order[0].data_fingerprint
        other = next((r for r, joined in enumerate(in_order) if joined.data_fingerprint != first), None)
        if other is not None:
            return self.fail(f"ranks 0 and {other} of this site see different data; give all ranks the same files")
        return [MergePieces(self.generation, in_order)]

    def put_together(self, merged: events.PiecesMerged) -> Outcome:
        """What the ranks of MergePieces hold together."""
        if self.failed:
            return []
        if isinstance(pieces := merged.pieces, str):
            return self.fail(pieces)
        self.pieces = pieces
        joined = events.WorkersJoined(
            generation=self.generation,
            manifest=pieces.manifest,
            data_fingerprint=self._joined[0].data_fingerprint,
            max_retained_bytes=merged.max_retained_bytes,
            endpoints=merged.endpoints,
            read_in_place=pieces.reads_in_place,
        )
        return [joined]

    def layout_sent(self, now: float) -> Outcome:
        """Every rank has its layout: they go on from `checkpoint`, and may ask at step 0."""
        if self.failed:
            return []
        self.went_on_from = self.checkpoint
        for status in self.ranks:
            if status.due is Due.LAYOUT:
                status.due, status.moved_at = Due.BOUNDARY, now
        return []

    def boundary(self, rank: int, asked: local.Boundary, now: float) -> Outcome:
        """It asks what to do.
        The first of a point is asked for all; one that asks elsewhere has done another number of steps."""
        status, step, seq = self._enter(rank, "boundary", Due.BOUNDARY), asked.step, asked.seq
        status.step, status.moved_at = max(status.step, step), now
        if self.failed:
            return []
        point = self._point_of(status)
        if (step, seq) != (point.step, point.seq):
            there = [s.rank for s in self.ranks if s.due is Due.ANSWER and s.point == status.point]
            others = f"{in_words(there)} asked at" if there else "every rank was told to ask at"
            return self.fail(
                f"rank {rank} asks at {Point(step, seq)}, {others} {point}: the ranks of a site must all do the same "
                "number of optimizer steps (site.step() once for each, loaders of equal length)"
            )
        left = [s.rank for s in self.ranks if s.due is Due.GONE]
        if left and point.answer is None:
            return self._unequal_end(left, rank)
        status.due = Due.ANSWER
        if point.answer is not None:
            return [self._reply(point, point.answer, status)]
        return self._ask()

    def sealed(self, rank: int, report: SealedReport, now: float) -> Outcome:
        """It has written its slices.
        When all have, the snapshot is sealed, unless their reports contradict each other."""
        status = self._enter(rank, "sealed", Due.SEALED)
        status.moved_at = now
        point = self._point_of(status)
        assert point.answer is not None
        if (report.step, report.seq, report.fragment) != (point.step, point.seq, point.answer.fragment):
            raise InvalidMessage(f"rank {rank} sealed another snapshot than the one of {point}")
        assert self.pieces is not None
        check_report(
            rank,
            report,
            data_rank=self._joined[rank].data_rank,
            hashed=self.pieces.shared_of(rank) if point.answer.hash_shared else (),
            max_tokens=MAX_TOKENS // self.world_size,
            max_samples=status.num_given // self.reader_of(rank)[1],
        )
        if not math.isfinite(report.loss_sum):
            text = f"the loss on rank {rank} is not finite at step {report.step}"
            return self.fail(text, NonFiniteError)
        point.sealed[rank] = report
        self._advance(status)
        if len(point.sealed) < self.world_size or self.failed:
            return []
        reports = [point.sealed[r] for r in range(self.world_size)]
        if point.answer.hash_shared and (text := differing_replicas(reports, self.pieces.shared, point)):
            return self.fail(text)
        done = sealed_by_all(self.generation, reports, self._data)
        if isinstance(done, str):
            return self.fail(done)
        done = replace(done, is_arriving=self.arriving.is_expected(point.step, point.seq))
        return [done, *self.arriving.seal(point.step, point.seq), *self._ask()]

    def merged(self, rank: int, report: local.MergedReport, now: float) -> Outcome:
        """It has taken the version that it was told to. When all have, the site is on it."""
        status = self._enter(rank, "merged", Due.MERGED)
        status.moved_at = now
        point = self._point_of(status)
        assert point.answer is not None
        if report.version != point.answer.version:
            raise InvalidMessage(f"rank {rank} merged version {report.version}, not {point.answer.version}")
        if report.wait_s < 0:
            raise InvalidMessage(f"rank {rank} waited for {report.wait_s} s")
        point.merged[rank] = report.wait_s
        self._advance(status)
        if len(point.merged) < self.world_size or self.failed:
            return []
        # The rank that came last waited least: before that it was the other ranks' turn, not the sync's.
        done = events.Merged(generation=self.generation, version=report.version, wait_s=min(point.merged.values()))
        return [done, *self._ask()]

    def data_set(self, rank: int, data: DataSet, _: float) -> Outcome:
        """It is about to draw samples, as all ranks with a loader must in the same way."""
        self._enter(rank, "data set", Due.BOUNDARY, Due.ANSWER, Due.SEALED, Due.MERGED)
        if data.num_samples <= 0 or data.batch_size <= 0 or rank in self._data:
            raise InvalidMessage(f"rank {rank} announces {data} as its data" + (" again" if rank in self._data else ""))
        self._data[rank] = data
        first_rank, first = next(iter(self._data.items()))
        if text := wrong_in_data(rank, data, first_rank, first):
            return self.fail(text, ConfigError)
        if len(self._data) > 1:
            return []
        return [
            events.DataAnnounced(
                generation=self.generation,
                num_samples=data.num_samples,
                round_samples=data.batch_size * self.reader_of(rank)[1],
                rounds_ahead=data.batches_ahead,
                of_shards=data.of_shards,
            )
        ]

    def draw(self, rank: int, asked: local.Draw, now: float) -> Outcome:
        """It wants samples from that place of the queue on; the wait is not its own."""
        status = self._enter(rank, "draw")
        first, num_samples = asked.first, asked.num_samples
        if rank not in self._data or not 0 < num_samples <= MAX_DRAWN or first > MAX_POSITION:
            raise InvalidMessage(f"rank {rank} draws {num_samples} samples from place {first}")
        if self.failed:
            return []
        status.draws_since = now
        wanted = events.DrawAsked(
            generation=self.generation, rank=rank, epoch=asked.epoch, first=first, num_samples=num_samples
        )
        return [wanted]

    def drawn(self, rank: int, epoch: int, end: int, now: float) -> None:
        """The answer to `draw` is on its way: positions up to this place. What the rank waited for it is not its own
        time, nor that of others, who may have waited for it."""
        status = self.ranks[rank]
        if epoch == status.data_epoch:
            status.num_given = max(status.num_given, end)
        if status.draws_since is not None:
            for other in self.ranks:
                other.moved_at = min(now, other.moved_at + now - status.draws_since)
            status.draws_since = None

    def fatal(self, rank: int, said: local.Fatal, _: float) -> Outcome:
        """It ends for good, and with it the site."""
        self._enter(rank, "fatal")
        kind = FATAL_KINDS.get(said.kind, WorkerError)
        return self.fail(f"rank {rank}: {said.text} ({said.kind})", kind)

    def busy(self, rank: int, said: local.Busy, now: float) -> Outcome:
        """What it does for so long is no hang; empty: it is done."""
        status = self._enter(rank, f"busy {said.what!r}")
        if said.limit_s < 0:
            raise InvalidMessage(f"rank {rank} is busy for {said.limit_s} s")
        if status.busy:
            # The time of a step stood still meanwhile, but for steps that were done within it.
            status.moved_at += now - max(status.busy_since, status.moved_at)
        status.busy, status.busy_since = said.what, now
        status.busy_until = now + said.limit_s
        return []

    def progress(self, rank: int, said: local.Progress, now: float) -> Outcome:
        """Steps that it has done. Saying the same again is not getting on."""
        step, steps_per_s = said.step, said.steps_per_s
        status = self._enter(rank, f"progress to step {step}")
        if step >= MAX_STEPS:
            raise InvalidMessage(f"rank {rank} says it has done {step} steps, which is impossible")
        if step > status.step:
            status.step, status.moved_at = step, now
            if steps_per_s > 0:
                self._step_times.note(1 / steps_per_s)
        if math.isfinite(steps_per_s):
            status.steps_per_s = steps_per_s
        status.checkpoints, status.readings = said.checkpoints, said.readings
        return []

    def logged(self, rank: int, said: Logged, _: float) -> Outcome:
        """Values of the script, for people: the shell passes them on."""
        self._enter(rank, f"{len(said.values)} logged values")
        return []

    def goodbye(self, rank: int, said: local.Goodbye, _: float) -> Outcome:
        """It leaves the run: all ranks do, after the same number of steps."""
        due = (Due.GOODBYE,) if said.run_over else (Due.JOIN, Due.BOUNDARY, Due.GOODBYE)
        status = self._enter(rank, "goodbye", *due)
        told_to_stop = status.due is Due.GOODBYE
        status.due = Due.GONE
        self._reasons[rank] = said.reason
        if self.failed:
            return []
        ahead = [s.rank for s in self.ranks if s.due is not Due.GONE and s.point > status.point]
        waiting = [s.rank for s in self.ranks if s.due in (Due.LAYOUT, Due.ANSWER) and s.point == status.point]
        if not told_to_stop and (ahead or waiting):
            return self._unequal_end([rank], (ahead or waiting)[0])
        if len(self._reasons) < self.world_size:
            return []
        self.failed = True  # nothing more comes out
        return [events.WorkersLeft(generation=self.generation, reason=self._reasons[0])]

    def lost(self, rank: int, text: str) -> str | None:
        """The rank's connection ended; `text` says how. What to say of it; None if that does not end the group."""
        if self.failed or self.ranks[rank].due is Due.GONE:
            return None
        self.failed = True
        status = self.ranks[rank]
        return f"rank {rank} (pid {status.pid}, {status.due.value}, step {status.step}) {text}"

    def reader_of(self, rank: int) -> tuple[int, int]:
        """The place of the rank's data rank among the site's, and how many there are. Known from WorkersJoined on."""
        data_ranks = sorted({joined.data_rank for joined in self._joined.values()})
        return data_ranks.index(self._joined[rank].data_rank), len(data_ranks)

    @property
    def num_steps(self) -> int:
        """Optimizer steps that its ranks have done, as far as they have said."""
        return max(s.step for s in self.ranks)

    @property
    def checkpoint(self) -> CheckpointId | None:
        """The newest checkpoint of the inner optimizer that every rank can go on from. Known from WorkersJoined on."""
        offered = (frozenset(joined.checkpoints) for joined in self._joined.values())
        return max(frozenset.intersection(*offered), default=None)

    # --- what the node says

    def answer(self, step: int, seq: int, answer: Answer, now: float) -> AnswerWorkers:
        """Fix what every rank does at (step, seq). Raises ValueError if nobody asked there or it is answered."""
        if self.failed:
            return AnswerWorkers(generation=self.generation, step=step, seq=seq, answer=answer)
        point = self._points[-1]
        if (point.step, point.seq) != (step, seq) or not point.asked or point.answer is not None:
            raise ValueError(f"an answer for step {step}.{seq}; the open question is at step {point.step}.{point.seq}")
        if answer.kind in (AnswerKind.CONTINUE, AnswerKind.APPLY) and answer.next_step < step:
            raise ValueError(f"{answer.kind.name} at step {step} tells ranks to ask at step {answer.next_step}")
        if answer.kind is AnswerKind.SNAPSHOT and self._syncs_to_check is not None:
            answer = replace(answer, hash_shared=self._syncs_to_check == 0)
            self._syncs_to_check = (self._syncs_to_check or REPLICAS_EVERY_SYNCS) - 1
        elif answer.kind is AnswerKind.APPLY and answer.fresh:
            self._syncs_to_check = 0
        point.answer = answer
        if answer.kind is AnswerKind.SNAPSHOT:
            self.arriving.begin(step, seq, answer.fragment)
        next_step = step if answer.kind is AnswerKind.SNAPSHOT else answer.next_step
        if answer.kind is not AnswerKind.STOP:
            self._points.append(Point(next_step, seq + 1) if next_step == step else Point(next_step, 0))
        asking = [status for status in self.ranks if status.due is Due.ANSWER]
        for status in asking:
            status.moved_at = now
        return self._reply(point, answer, *asking)

    # --- liveness

    def watch(self, floor_s: float, start_s: float) -> Watch | None:
        """See `first_to_hang`."""
        return None if self.failed else first_to_hang(self.ranks, self._step_times, floor_s, start_s)

    # --- inside

    def excuse(self, seconds: float) -> None:
        """The node itself stood still for so long; what ranks said meanwhile is not read yet."""
        for status in self.ranks:
            status.moved_at += seconds
            status.busy_since += seconds
            status.busy_until += seconds
            if status.draws_since is not None:
                status.draws_since += seconds

    def _enter(self, rank: int, said: str, *due: Due) -> RankStatus:
        """Raises InvalidMessage, with the rank's story, if it may not say that now."""
        status = self.ranks[rank]
        allowed = due or tuple(d for d in Due if d not in (Due.HELLO, Due.GONE))
        if status.due not in allowed:
            story = "; ".join(status.story)
            raise InvalidMessage(
                f"rank {rank} may not say that while it is {status.due.value} ({said}, after: {story or 'nothing'})"
            )
        status.story.append(said)
        return status

    def _point_of(self, status: RankStatus) -> Point:
        return self._points[status.point - self._first_point]

    def _ask(self) -> Outcome:
        """Put the last point's question to the core, if a rank asks it and all have reported on the one before."""
        point = self._points[-1]
        ahead = self._first_point + len(self._points) - 1
        if point.asked or not any(s.due is Due.ANSWER and s.point == ahead for s in self.ranks):
            return []
        if len(self._points) > 1 and self._reports_missing(self._points[-2]):
            return []
        point.asked = True
        return [events.BoundaryAsked(generation=self.generation, step=point.step, seq=point.seq)]

    def _reports_missing(self, point: Point) -> bool:
        assert point.answer is not None
        if point.answer.kind is AnswerKind.SNAPSHOT:
            return len(point.sealed) < self.world_size
        return point.answer.kind is AnswerKind.APPLY and len(point.merged) < self.world_size

    def _advance(self, status: RankStatus) -> None:
        status.point += 1
        status.due = Due.BOUNDARY
        while self._first_point < min(s.point for s in self.ranks):
            del self._points[0]
            self._first_point += 1

    def _reply(self, point: Point, answer: Answer, *asking: RankStatus) -> AnswerWorkers:
        for status in asking:
            self._told(status, point, answer)
        ranks = tuple(status.rank for status in asking)
        return AnswerWorkers(generation=self.generation, step=point.step, seq=point.seq, answer=answer, ranks=ranks)

    def _told(self, status: RankStatus, point: Point, answer: Answer) -> None:
        status.story.append(f"told {answer.kind.name} at {point}")
        match answer.kind:
            case AnswerKind.CONTINUE:
                self._advance(status)
            case AnswerKind.SNAPSHOT:
                status.due = Due.SEALED
            case AnswerKind.APPLY:
                status.due = Due.MERGED
                if status.data_epoch != answer.data_epoch:
                    status.data_epoch, status.num_given = answer.data_epoch, 0
            case AnswerKind.STOP:
                status.due = Due.GOODBYE

    def fail(self, text: str, error: type[AtollError] = WorkerError) -> Outcome:
        """The group is over, once only; a restart would not cure it."""
        if self.failed:
            return []
        self.failed = True
        kind, code, is_own = events.FailureKind.FATAL, error.exit_code, error is ScriptNonFinite
        failed = events.WorkersFailed(generation=self.generation, kind=kind, text=text, exit_code=code)
        return [replace(failed, num_steps=self.num_steps, by_script=is_own)]

    def end(self) -> None:
        """It is stopped, and nothing that happens to its ranks matters any more."""
        self.failed = True

    def _unequal_end(self, left: list[int], going_on: int) -> Outcome:
        steps = ", ".join(f"rank {r} at step {self.ranks[r].step}" for r in left)
        return self.fail(
            f"the training loop ended on {steps} ({self._reasons[left[0]]}), but rank {going_on} goes on: the ranks "
            "of a site must all do the same number of optimizer steps (loaders of equal length)"
        )
