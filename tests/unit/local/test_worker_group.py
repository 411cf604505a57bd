"""Rules 5, 28, 35 and 43: the ranks of a site act as one, and what they disagree about is an error that names them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from atoll.node.core.events import (
    Answer,
    AnswerKind,
    BoundaryAsked,
    DataAnnounced,
    DrawAsked,
    FailureKind,
    Merged,
    SnapshotSealed,
    WorkersFailed,
    WorkersJoined,
    WorkersLeft,
)
from atoll.node.core.outputs import AnswerWorkers, MergePieces
from atoll.node.core.ranks.group import REPLICAS_EVERY_SYNCS, Outcome
from atoll.node.core.ranks.liveness import StepTimes
from atoll.node.core.ranks.pieces import site_pieces
from atoll.node.local_protocol import CheckpointId, DataSet, Piece, PieceHash, SealedReport
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import Manifest, Role, TensorSpec
from tests.harness.ranks import Ranks, offer

MANIFEST = Manifest.canonical([TensorSpec(name="a", shape=(4,), dtype="F32", role=Role.TRAINABLE)])
PIECES = (Piece(name="a", offsets=(0,), sizes=(4,), dtype="F32"),)


def go_on(next_step: int) -> Answer:
    return Answer(kind=AnswerKind.CONTINUE, next_step=next_step)


SNAPSHOT = Answer(kind=AnswerKind.SNAPSHOT)
STOP = Answer(kind=AnswerKind.STOP, reason="over")


def apply(version: int, next_step: int, *, fresh: bool = False) -> Answer:
    return Answer(kind=AnswerKind.APPLY, version=version, next_step=next_step, fresh=fresh)


def told(rank: int, step: int, answer: Answer) -> AnswerWorkers:
    return AnswerWorkers(generation=3, step=step, seq=0, answer=answer, ranks=(rank,))


def put_together(group: Ranks, outcome: Outcome) -> Outcome:
    """As the node does in a thread."""
    (all_joined,) = outcome
    assert isinstance(all_joined, MergePieces)
    found: Outcome = group.put_together(site_pieces(all_joined.ranks))
    return found


def joined(num_ranks: int, data_ranks: tuple[int, ...] = ()) -> Ranks:
    """A group whose ranks may ask at step 0."""
    group = Ranks(3, num_ranks, 0.0)
    outcome: Outcome = []
    for rank in range(num_ranks):
        assert group.hello(rank, 100 + rank, 0.0) == []
    for rank in range(num_ranks):
        assert outcome == []
        outcome = group.join(rank, offer(MANIFEST, PIECES, b"f", (data_ranks or range(num_ranks))[rank]), 0.0)
    assert put_together(group, outcome) == [WorkersJoined(generation=3, manifest=MANIFEST, data_fingerprint=b"f")]
    group.layout_sent(0.0)
    return group


@pytest.mark.parametrize(
    ("offers", "newest"),
    [
        (((5, 10), (1, 15)), None),
        (((1, 5, 10), (1, 5, 15)), 5),
        (((), (5,)), None),
    ],
)
def test_the_newest_checkpoint_of_all_ranks(offers: tuple[tuple[int, ...], ...], newest: int | None) -> None:
    """The larger start counts, not the larger step."""

    def of(step: int) -> CheckpointId:
        return CheckpointId(incarnation=1, generation=2 if step == 5 else 1, step=step)

    group = Ranks(3, 2, 0.0)
    for rank, steps in enumerate(offers):
        group.hello(rank, 100 + rank, 0.0)
        group.join(rank, offer(MANIFEST, PIECES, b"f", rank, checkpoints=tuple(of(s) for s in steps)), 0.0)
    assert group.checkpoint == (None if newest is None else of(newest))


def all_ask(group: Ranks, step: int, seq: int, answer: Answer) -> None:
    for status in group.ranks:
        group.boundary(status.rank, step, seq, 0.0)
    assert len(group.answer(step, seq, answer, 0.0).ranks) == len(group.ranks)


def report(
    rank: int,
    *,
    step: int = 0,
    seq: int = 0,
    tokens: int = 5,
    loss_sum: float = 4.0,
    num_steps: int = 2,
    train_s: float = 1.0,
    hashes: dict[int, bytes] | None = None,
    used: int = 0,
    data_rank: int | None = None,
    skipped: tuple[int, ...] = (),
) -> SealedReport:
    return SealedReport(
        skipped_steps=skipped,
        step=step, seq=seq, fragment=0, data_rank=rank if data_rank is None else data_rank, num_samples_used=used,
        tokens=tokens, loss_sum=loss_sum, num_steps=num_steps,
        train_s=train_s, hashes=tuple(PieceHash(piece=i, hash=h) for i, h in (hashes or {}).items()),
    )  # fmt: skip


def failure(outcome: Outcome) -> str:
    (event,) = outcome
    assert isinstance(event, WorkersFailed)
    assert event.kind is FailureKind.FATAL
    assert event.generation == 3
    return event.text


def test_the_first_rank_asks_and_the_others_get_the_stored_answer() -> None:
    group = joined(3)
    assert group.boundary(1, 0, 0, 0.0) == [BoundaryAsked(generation=3, step=0, seq=0)]
    assert group.boundary(0, 0, 0, 0.0) == []
    assert group.answer(0, 0, go_on(5), 0.0).ranks == (0, 1)
    # Rank 1 runs ahead; rank 2 comes late and gets what was fixed.
    assert group.boundary(1, 5, 0, 0.0) == [BoundaryAsked(generation=3, step=5, seq=0)]
    assert group.boundary(2, 0, 0, 0.0) == [told(2, 0, go_on(5))]
    assert group.boundary(2, 5, 0, 0.0) == []
    assert group.answer(5, 0, SNAPSHOT, 0.0).ranks == (1, 2)
    assert group.boundary(0, 5, 0, 0.0) == [told(0, 5, SNAPSHOT)]


def test_one_snapshot_and_merge_of_two_ranks() -> None:
    group = joined(2)
    all_ask(group, 0, 0, SNAPSHOT)
    assert group.sealed(0, report(0, tokens=3, loss_sum=4.0, train_s=1.0), 0.0) == []
    # A rank that is done asks again at the same step; the core hears of it after the snapshot.
    assert group.boundary(0, 0, 1, 0.0) == []
    assert group.sealed(1, report(1, tokens=4, loss_sum=8.0, train_s=2.0), 0.0) == [
        SnapshotSealed(generation=3, step=0, tokens=7, num_steps=2, mean_loss=3.0, train_s=2.0),
        BoundaryAsked(generation=3, step=0, seq=1),
    ]
    assert group.boundary(1, 0, 1, 0.0) == []
    assert group.answer(0, 1, apply(1, 10), 0.0).ranks == (0, 1)
    assert group.merged(1, 1, 2.0, 0.0) == []
    assert group.boundary(1, 10, 0, 0.0) == []
    assert group.merged(0, 1, 0.5, 0.0) == [
        Merged(generation=3, version=1, wait_s=0.5),
        BoundaryAsked(generation=3, step=10, seq=0),
    ]
    assert group.boundary(0, 10, 0, 0.0) == []


def test_a_question_at_the_same_step_counts_up() -> None:
    group = joined(1)
    all_ask(group, 0, 0, apply(0, 0))
    group.merged(0, 0, 0.0, 0.0)
    all_ask(group, 0, 1, go_on(0))
    assert group.boundary(0, 0, 2, 0.0) == [BoundaryAsked(generation=3, step=0, seq=2)]


def test_unequal_steps_name_the_ranks() -> None:
    group = joined(3)
    all_ask(group, 0, 0, go_on(5))
    group.boundary(0, 5, 0, 0.0)
    group.boundary(2, 5, 0, 0.0)
    assert "rank 1 asks at step 6, ranks 0, 2 asked at step 5" in failure(group.boundary(1, 6, 0, 0.0))
    assert group.answer(5, 0, SNAPSHOT, 0.0).ranks == ()  # nothing more comes out


def test_a_loader_that_ends_early_on_one_rank() -> None:
    group = joined(2)
    all_ask(group, 0, 0, go_on(5))
    group.progress(0, 4, 1.0, 0.0)
    assert group.goodbye(0, "loader ended", False) == []
    assert "ended on rank 0 at step 4 (loader ended), but rank 1 goes on" in failure(group.boundary(1, 5, 0, 0.0))

    group = joined(2)
    all_ask(group, 0, 0, go_on(5))
    group.boundary(1, 5, 0, 0.0)
    assert "rank 1 goes on" in failure(group.goodbye(0, "loader ended", False))


def test_all_ranks_leave() -> None:
    group = joined(2)
    all_ask(group, 0, 0, go_on(5))
    assert group.goodbye(0, "loader ended", False) == []
    assert not group.lost(0, "closed")
    assert group.goodbye(1, "loader ended", False) == [WorkersLeft(generation=3, reason="loader ended")]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_that_leaves_before_it_has_joined_does_not_leave_the_others_waiting(is_first: bool) -> None:
    group = Ranks(3, 2, 0.0)
    for rank in range(2):
        group.hello(rank, 100 + rank, 0.0)
    if is_first:
        assert group.goodbye(1, "loader ended", False) == []
        outcome = group.join(0, offer(MANIFEST, PIECES, b"f", 0), 0.0)
    else:
        assert group.join(0, offer(MANIFEST, PIECES, b"f", 0), 0.0) == []
        outcome = group.goodbye(1, "loader ended", False)
    assert "rank 1 at step 0 (loader ended), but rank 0 goes on" in failure(outcome)


def test_stop_reaches_a_rank_that_comes_late() -> None:
    group = joined(2)
    group.boundary(0, 0, 0, 0.0)
    group.answer(0, 0, STOP, 0.0)
    assert group.goodbye(0, "over", True) == []
    assert group.boundary(1, 0, 0, 0.0) == [told(1, 0, STOP)]
    assert group.goodbye(1, "over", True) == [WorkersLeft(generation=3, reason="over")]


def test_a_data_rank_counts_once() -> None:
    group = joined(4, data_ranks=(0, 0, 1, 1))
    all_ask(group, 0, 0, SNAPSHOT)
    outcome: Outcome = []
    for rank in range(4):
        # In a pipeline only the last stage knows the loss.
        known = rank % 2 == 1
        outcome = group.sealed(rank, report(rank // 2, num_steps=2 * known, loss_sum=2.0 * rank * known), 0.0)
    assert outcome == [SnapshotSealed(generation=3, step=0, tokens=10, num_steps=2, mean_loss=2.0, train_s=1.0)]


@pytest.mark.parametrize("second", [4.0, 4.001, 5.0])
def test_ranks_of_one_batch_have_one_loss(second: float) -> None:
    group = joined(3, data_ranks=(0, 1, 1))
    all_ask(group, 0, 0, SNAPSHOT)
    group.sealed(0, report(0, num_steps=2, loss_sum=9.0), 0.0)
    group.sealed(1, report(1, num_steps=2, loss_sum=4.0), 0.0)
    outcome = group.sealed(2, report(1, num_steps=2, loss_sum=second), 0.0)
    if second < 5:
        assert outcome == [SnapshotSealed(generation=3, step=0, tokens=10, num_steps=2, mean_loss=3.25, train_s=1.0)]
    else:
        assert "ranks 1 and 2 share data rank 1 but say losses of 2 and 2.5 at step 0" in failure(outcome)


def test_unequal_tokens_within_a_data_rank() -> None:
    group = joined(2, data_ranks=(7, 7))
    all_ask(group, 0, 0, SNAPSHOT)
    group.sealed(0, report(7, tokens=5), 0.0)
    text = failure(group.sealed(1, report(7, tokens=6), 0.0))
    assert "ranks 0 and 1 share data rank 7 but count 5 and 6 tokens" in text


def test_unequal_numbers_of_steps_in_reports() -> None:
    group = joined(2)
    all_ask(group, 0, 0, SNAPSHOT)
    group.sealed(0, report(0, num_steps=2), 0.0)
    assert "rank 0 2, rank 1 3" in failure(group.sealed(1, report(1, num_steps=3), 0.0))


def test_a_loss_that_is_not_finite() -> None:
    group = joined(1)
    all_ask(group, 0, 0, SNAPSHOT)
    assert "the loss on rank 0 is not finite" in failure(group.sealed(0, report(0, loss_sum=math.nan), 0.0))


@pytest.mark.parametrize("same", [True, False])
def test_replicas_are_compared_at_the_first_sync_after_fresh_values(same: bool) -> None:
    group = joined(2)
    all_ask(group, 0, 0, SNAPSHOT)  # of the seeder: first values may differ, they are overwritten
    for rank in range(2):
        group.sealed(rank, report(rank), 0.0)
    all_ask(group, 0, 1, apply(0, 5, fresh=True))
    for rank in range(2):
        group.merged(rank, 0, 0.0, 0.0)
    all_ask(group, 5, 0, SNAPSHOT)
    with pytest.raises(InvalidMessage, match="hashes of 0 pieces at step 5, 1 are wanted"):
        group.sealed(0, report(0, step=5), 0.0)
    group.sealed(0, report(0, step=5, hashes={0: b"x" * 32}), 0.0)
    outcome = group.sealed(1, report(1, step=5, hashes={0: (b"x" if same else b"y") * 32}), 0.0)
    if not same:
        assert (
            "'a' [0:4] have drifted apart at step 5: rank 0 (whose copy is the site's) differs from rank 1;"
            in failure(outcome)
        )
        return
    assert isinstance(outcome[0], SnapshotSealed)
    all_ask(group, 5, 1, apply(1, 10))
    for rank in range(2):
        group.merged(rank, 1, 0.0, 0.0)
    all_ask(group, 10, 0, SNAPSHOT)
    group.sealed(0, report(0, step=10), 0.0)


@pytest.mark.parametrize(("skipped", "tokens"), [(((), (5,)), 0), (((4,), (5,)), 0), (((5,), (5,)), 8)])
def test_where_ranks_left_out_different_steps_nothing_counts(skipped: tuple[tuple[int, ...], ...], tokens: int) -> None:
    """Of shards one rank alone may find that a gradient is not finite: copies differ then, and so do tokens."""
    group = joined(2)
    all_ask(group, 0, 0, apply(0, 5, fresh=True))
    for rank in range(2):
        group.merged(rank, 0, 0.0, 0.0)
    all_ask(group, 5, 0, SNAPSHOT)
    group.sealed(0, report(0, step=5, hashes={0: b"x" * 32}, skipped=skipped[0]), 0.0)
    same = b"x" if tokens else b"y"
    last = report(1, step=5, tokens=3, hashes={0: same * 32}, skipped=skipped[1])
    (sealed,) = group.sealed(1, last, 0.0)
    assert isinstance(sealed, SnapshotSealed)
    assert sealed.tokens == tokens


def test_replicas_are_compared_again_every_so_many_syncs() -> None:
    group = joined(3)
    all_ask(group, 0, 0, apply(0, 1, fresh=True))
    for rank in range(3):
        group.merged(rank, 0, 0.0, 0.0)
    compared = []
    for sync in range(1, 2 * REPLICAS_EVERY_SYNCS + 2):
        for rank in range(3):
            group.boundary(rank, sync, 0, 0.0)
        hash_shared = group.answer(sync, 0, SNAPSHOT, 0.0).answer.hash_shared
        if hash_shared:
            compared.append(sync)
        last = sync == 2 * REPLICAS_EVERY_SYNCS + 1
        for rank in range(3):
            hashes = {0: (b"y" if last and rank == 1 else b"x") * 32} if hash_shared else None
            outcome = group.sealed(rank, report(rank, step=sync, hashes=hashes), 0.0)
        if last:
            assert "'a' [0:4] have drifted apart at step 21: ranks 0, 2 (whose" in failure(outcome)
            assert "differs from rank 1; ranks that hold" in failure(outcome)
        else:
            assert isinstance(outcome[0], SnapshotSealed)
            all_ask(group, sync, 1, apply(sync, sync + 1))
            for rank in range(3):
                group.merged(rank, sync, 0.0, 0.0)
    assert compared == [1, REPLICAS_EVERY_SYNCS + 1, 2 * REPLICAS_EVERY_SYNCS + 1]


def test_ranks_that_see_other_data_or_build_other_models() -> None:
    group = Ranks(3, 2, 0.0)
    for rank in range(2):
        group.hello(rank, 1, 0.0)
    group.join(0, offer(MANIFEST, PIECES, b"f", 0), 0.0)
    assert "ranks 0 and 1 of this site see different data" in failure(
        group.join(1, offer(MANIFEST, PIECES, b"g", 1), 0.0)
    )

    group = Ranks(3, 1, 0.0)
    group.hello(0, 1, 0.0)
    assert "held by no rank" in failure(put_together(group, group.join(0, offer(MANIFEST), 0.0)))


def test_ranks_that_are_lost_while_their_pieces_are_put_together_have_not_joined() -> None:
    group = Ranks(3, 1, 0.0)
    group.hello(0, 1, 0.0)
    outcome = group.join(0, offer(MANIFEST, PIECES, b"f", 0), 0.0)
    assert group.lost(0, "closed")
    assert put_together(group, outcome) == []


def test_a_lost_rank_is_a_crash_and_a_given_up_one_is_fatal() -> None:
    group = joined(2)
    lost = group.lost(1, "closed its connection")
    assert lost == "rank 1 (pid 101, training, step 0) closed its connection"
    assert not group.lost(0, "closed its connection")

    group = joined(2)
    assert failure(group.fatal(1, "non_finite", "loss is nan")) == "rank 1: loss is nan (non_finite)"
    assert not group.lost(1, "closed")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("config", 2),
        ("refused", 4),
        ("non_finite", 6),
        ("non_finite_of_script", 6),
        ("something that a later version says", 8),
    ],
)
def test_the_reason_of_a_rank_is_the_exit_code_of_its_node(kind: str, code: int) -> None:
    (event,) = joined(1).fatal(0, kind, "no")
    assert isinstance(event, WorkersFailed)
    assert event.exit_code == code
    assert event.by_script == (kind == "non_finite_of_script")


def test_nothing_is_said_out_of_turn() -> None:
    group = joined(2)
    with pytest.raises(
        InvalidMessage, match=r"rank 0 may not say that while it is training \(sealed, after: hello; join\)"
    ):
        group.sealed(0, report(0), 0.0)
    with pytest.raises(InvalidMessage, match="may not say that"):
        group.join(0, offer(MANIFEST, PIECES, b"", 0), 0.0)
    with pytest.raises(InvalidMessage, match="may not say that"):
        group.hello(0, 5, 0.0)
    all_ask(group, 0, 0, SNAPSHOT)
    with pytest.raises(InvalidMessage, match="writing its snapshot"):
        group.boundary(0, 0, 1, 0.0)
    with pytest.raises(InvalidMessage, match="another snapshot"):
        group.sealed(0, report(0, step=1), 0.0)
    with pytest.raises(InvalidMessage, match="joined as data rank 0, not 1"):
        group.sealed(0, report(1), 0.0)
    with pytest.raises(InvalidMessage, match="busy for -1"):
        group.busy(0, "x", -1.0, 0.0)
    with pytest.raises(InvalidMessage, match=r"Busy\.limit_s: not a finite number"):
        group.busy(0, "x", math.inf, 0.0)
    for rank in range(2):
        group.sealed(rank, report(rank), 0.0)
    all_ask(group, 0, 1, apply(4, 5))
    with pytest.raises(InvalidMessage, match="merged version 3, not 4"):
        group.merged(0, 3, 0.0, 0.0)


def test_only_the_open_question_can_be_answered() -> None:
    group = joined(1)
    with pytest.raises(ValueError, match=r"step 0.0; the open question"):
        group.answer(0, 0, STOP, 0.0)  # nobody has asked
    group.boundary(0, 0, 0, 0.0)
    with pytest.raises(ValueError, match="the open question"):
        group.answer(5, 0, STOP, 0.0)
    group.answer(0, 0, go_on(5), 0.0)
    with pytest.raises(ValueError, match="the open question"):
        group.answer(0, 0, go_on(5), 0.0)
    group.boundary(0, 5, 0, 0.0)
    with pytest.raises(ValueError, match="tells ranks to ask at step 4"):
        group.answer(5, 0, go_on(4), 0.0)


def test_answers_that_all_ranks_have_are_forgotten() -> None:
    group = joined(2)
    for step in range(50):
        all_ask(group, step, 0, go_on(step + 1))
    assert len(group._points) == 1


FLOOR_S, START_S = 10.0, 100.0


def watched(group: Ranks) -> tuple[float, str]:
    watch = group.watch(FLOOR_S, START_S)
    assert watch is not None
    return watch.deadline, watch.text


def test_the_time_before_and_after_the_first_step() -> None:
    assert watched(Ranks(3, 1, 1.0))[0] == 101.0  # not even connected
    group = joined(1)
    group.boundary(0, 0, 0, 2.0)
    assert group.watch(FLOOR_S, START_S) is None  # it waits for us
    group.answer(0, 0, go_on(50), 7.0)
    assert watched(group)[0] == 107.0  # compiling, maybe
    group.progress(0, 1, 4.0, 8.0)
    text = "rank 0 (pid 100) has got no further for 10 s (training, step 1; its steps take up to 0.25 s)"
    assert watched(group) == (18.0, text)
    group.progress(0, 1, 4.0, 15.0)
    assert watched(group)[0] == 18.0, "a loop that talks and makes no step hangs"
    group.excuse(60.0)
    assert watched(group)[0] == 78.0, "the node itself was stopped"


def test_a_busy_rank_has_the_time_it_announced() -> None:
    group = joined(2)
    for rank in range(2):
        group.progress(rank, 1, 1.0, 0.0)
    group.busy(0, "evaluation", 500.0, 1.0)
    group.progress(1, 2, 1.0, 5.0)
    assert watched(group)[0] == 15.0  # the other one is held to the floor
    group.boundary(1, 0, 0, 5.0)
    watch = group.watch(FLOOR_S, START_S)
    assert watch is not None
    assert (watch.deadline, watch.limit_s, watch.doing) == (501.0, 501.0, "busy: evaluation")
    assert "got no further for 501 s (busy: evaluation, step 1; " in watch.text
    group.busy(0, "", 0.0, 9.0)
    assert watched(group)[0] == 18.0, "the time of its step goes on where it was"


def test_a_rank_is_excused_whatever_it_does_while_the_node_stands_still() -> None:
    group = joined(1)
    group.progress(0, 1, 1.0, 0.0)
    group.busy(0, "evaluation", 500.0, 1.0)
    group.excuse(1000.0)
    assert watched(group)[0] == 1501.0, "its end may have been said, and not be read yet"
    group.busy(0, "", 0.0, 1009.0)
    assert watched(group)[0] == 1018.0, "as without the pause"
    group.data_set(0, DataSet(num_samples=10, batch_size=1, batches_ahead=0))
    group.draw(0, 0, 0, 1, 1010.0)
    group.excuse(100.0)
    group.drawn(0, 0, 1, 1112.0)
    assert watched(group)[0] == 1120.0


def test_a_step_of_a_busy_rank_is_a_step() -> None:
    group = joined(1)
    group.progress(0, 1, 1.0, 0.0)
    group.busy(0, "the first steps", 500.0, 1.0)
    group.progress(0, 2, 1.0, 300.0)
    group.busy(0, "", 0.0, 301.0)
    assert watched(group)[0] == 311.0


def test_the_limit_is_what_is_normal_for_the_site() -> None:
    times = StepTimes()
    assert times.limit_s(FLOOR_S) == FLOOR_S
    assert times.normal_s is None
    for _ in range(50):
        times.note(0.5)
    assert times.limit_s(FLOOR_S) == FLOOR_S, "never below the floor"
    slow = StepTimes()
    for seconds in (30.0, 28.0, 32.0, 30.0, 40.0):
        slow.note(seconds)
    assert slow.normal_s == 30.0 + 4 * 2.0, "median and four times the median distance"
    assert slow.limit_s(FLOOR_S) == 8 * 38.0
    group = Ranks(4, 1, 0.0, slow)  # the next generation of the same site
    group.hello(0, 100, 0.0)
    assert watched(group)[0] == START_S
    group.ranks[0].step = 1
    assert watched(group)[0] == 8 * 38.0


# --- data


def loading(data_ranks: tuple[int, ...]) -> Ranks:
    """A group that trains, and every rank of which loads data and was given 40 places of the site's queue."""
    group = joined(len(data_ranks), data_ranks)
    all_ask(group, 0, 0, go_on(5))
    for rank in range(len(data_ranks)):
        group.data_set(rank, DATA)
        group.drawn(rank, 0, 40, 0.0)
    return group


DATA = DataSet(num_samples=100, batch_size=4, batches_ahead=2)


def test_the_data_of_a_site_is_announced_once_and_divided_by_data_rank() -> None:
    group = joined(4, (7, 3, 7, 5))
    all_ask(group, 0, 0, go_on(5))
    assert [group.reader_of(rank) for rank in range(4)] == [(2, 3), (0, 3), (2, 3), (1, 3)]
    announced = DataAnnounced(generation=3, num_samples=100, round_samples=12, rounds_ahead=2)
    assert group.data_set(1, DATA) == [announced]
    assert group.data_set(0, DATA) == []
    assert group.draw(0, 2, 36, 12, 0.0) == [DrawAsked(generation=3, rank=0, epoch=2, first=36, num_samples=12)]


def test_while_a_rank_waits_for_samples_none_is_watched() -> None:
    """The others may wait for it, in a collective: with the coordinator away, for as long as a site stays."""
    group = loading((0, 1))
    for rank in range(2):
        group.progress(rank, 1, 1.0, 0.0)
    group.draw(0, 0, 0, 8, 1.0)
    assert group.watch(FLOOR_S, START_S) is None
    group.drawn(0, 0, 8, 51.0)
    assert watched(group)[0] == 50.0 + FLOOR_S, "the time of their steps goes on where it was"
    group.draw(0, 0, 8, 8, 52.0)
    group.draw(1, 0, 0, 8, 53.0)
    group.drawn(0, 0, 16, 60.0)
    assert group.watch(FLOOR_S, START_S) is None, "rank 1 still waits"
    group.drawn(1, 0, 8, 70.0)
    assert watched(group)[0] == 70.0 + FLOOR_S, "time in which both waited counts for both, up to now at most"


@pytest.mark.parametrize("other", [DataSet(num_samples=99, batch_size=4, batches_ahead=2),
                                   DataSet(num_samples=100, batch_size=8, batches_ahead=2)])  # fmt: skip
def test_ranks_load_the_same_data_in_batches_of_one_size(other: DataSet) -> None:
    group = joined(2)
    all_ask(group, 0, 0, go_on(5))
    group.data_set(0, DATA)
    assert "rank 1 loads" in failure(group.data_set(1, other))


@pytest.mark.parametrize("large", [DataSet(num_samples=100, batch_size=1 << 25, batches_ahead=2),
                                   DataSet(num_samples=100, batch_size=4, batches_ahead=1 << 25),
                                   DataSet(num_samples=1 << 50, batch_size=4, batches_ahead=2)])  # fmt: skip
def test_data_in_larger_pieces_than_are_possible_are_a_wrong_configuration(large: DataSet) -> None:
    """No crash that is tried again and again."""
    group = joined(1)
    all_ask(group, 0, 0, go_on(5))
    assert "smaller batch_size" in failure(group.data_set(0, large))


@pytest.mark.parametrize("wrong", [DataSet(num_samples=0, batch_size=4, batches_ahead=0),
                                   DataSet(num_samples=9, batch_size=0, batches_ahead=0)])  # fmt: skip
def test_data_that_makes_no_sense_is_refused(wrong: DataSet) -> None:
    group = joined(1)
    all_ask(group, 0, 0, go_on(5))
    with pytest.raises(InvalidMessage, match="announces"):
        group.data_set(0, wrong)
    with pytest.raises(InvalidMessage, match="draws"):
        group.draw(0, 0, 0, 4, 0.0)
    group.data_set(0, DATA)
    with pytest.raises(InvalidMessage, match="again"):
        group.data_set(0, DATA)


def test_what_a_site_has_used_counts_each_data_rank_once() -> None:
    group = loading((0, 0, 1))
    for rank in range(3):
        group.boundary(rank, 5, 0, 0.0)
    group.answer(5, 0, SNAPSHOT, 0.0)
    group.sealed(0, report(0, step=5, used=20), 0.0)
    group.sealed(1, report(1, data_rank=0, step=5, used=20), 0.0)
    (sealed, *_) = group.sealed(2, report(2, data_rank=1, step=5, used=20), 0.0)
    assert isinstance(sealed, SnapshotSealed)
    assert sealed.samples_used == 40


@pytest.mark.parametrize("used", [21, (1 << 64) - 1])
def test_a_rank_that_used_more_than_it_was_given_is_named(used: int) -> None:
    """Samples that nobody was trained on would be listed as done."""
    group = loading((0, 1))
    for rank in range(2):
        group.boundary(rank, 5, 0, 0.0)
    group.answer(5, 0, SNAPSHOT, 0.0)
    with pytest.raises(InvalidMessage, match=f"rank 1 says it used {used} samples, its share of what was given is 20"):
        group.sealed(1, report(1, step=5, used=used), 0.0)


def test_what_was_given_before_the_samples_are_drawn_again_counts_no_longer() -> None:
    group = loading((0,))
    group.boundary(0, 5, 0, 0.0)
    group.answer(5, 0, replace(apply(5, 5), data_epoch=1), 0.0)
    group.merged(0, 5, 0.0, 0.0)
    group.drawn(0, 0, 80, 0.0)  # on its way before
    group.boundary(0, 5, 1, 0.0)
    group.answer(5, 1, SNAPSHOT, 0.0)
    with pytest.raises(InvalidMessage, match="its share of what was given is 0"):
        group.sealed(0, report(0, step=5, seq=1, used=4), 0.0)


def test_ranks_that_used_different_numbers_of_samples_are_named() -> None:
    group = loading((0, 1))
    for rank in range(2):
        group.boundary(rank, 5, 0, 0.0)
    group.answer(5, 0, SNAPSHOT, 0.0)
    group.sealed(0, report(0, step=5, used=20), 0.0)
    assert "rank 1 16, rank 0 20" in failure(group.sealed(1, report(1, step=5, used=16), 0.0))


def test_a_data_rank_without_a_loader_is_named() -> None:
    group = joined(2)
    all_ask(group, 0, 0, go_on(5))
    group.data_set(0, DATA)
    group.drawn(0, 0, 40, 0.0)
    for rank in range(2):
        group.boundary(rank, 5, 0, 0.0)
    group.answer(5, 0, SNAPSHOT, 0.0)
    group.sealed(0, report(0, step=5, used=20), 0.0)
    assert "data rank 1" in failure(group.sealed(1, report(1, step=5), 0.0))


def test_of_shards_the_rounds_count_that_all_ranks_are_through_with() -> None:
    group = joined(2)
    all_ask(group, 0, 0, go_on(5))
    shards = DataSet(num_samples=100, batch_size=1, batches_ahead=2, of_shards=True)
    (announced,) = group.data_set(0, shards)
    assert isinstance(announced, DataAnnounced)
    assert (announced.round_samples, announced.of_shards) == (2, True)
    group.data_set(1, shards)
    for rank in range(2):
        group.drawn(rank, 0, 12, 0.0)
        group.boundary(rank, 5, 0, 0.0)
    group.answer(5, 0, SNAPSHOT, 0.0)
    group.sealed(0, report(0, step=5, used=5), 0.0)
    (sealed, *_) = group.sealed(1, report(1, step=5, used=3), 0.0)
    assert isinstance(sealed, SnapshotSealed)
    assert (sealed.samples_used, sealed.of_shards) == (6, True)


def test_a_loader_beside_shards_is_a_wrong_configuration() -> None:
    group = joined(2)
    all_ask(group, 0, 0, go_on(5))
    group.data_set(0, DATA)
    assert "site.shards" in failure(group.data_set(1, replace(DATA, of_shards=True)))
