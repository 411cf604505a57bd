"""Slices that ranks of other hosts have sealed are on their way to the site's SNAPSHOT: when it is whole."""

from __future__ import annotations

import itertools

import pytest

from atoll.node.core import events as e
from atoll.node.core.events import Answer, AnswerKind
from atoll.node.core.outputs import MergePieces
from atoll.node.core.ranks.group import Outcome
from atoll.node.core.ranks.pieces import site_pieces
from atoll.node.local_protocol import Piece, SealedReport
from atoll.protocol.layout import Manifest, Role, TensorSpec
from tests.harness.ranks import Ranks, offer

MANIFEST = Manifest.canonical([TensorSpec(name="a", shape=(4,), dtype="F32", role=Role.TRAINABLE)])
PIECES = (Piece(name="a", offsets=(0,), sizes=(4,), dtype="F32"),)
HERE, ELSEWHERE = (0, 1), (2, 3)
ORDERS = list(itertools.permutations(("report 2", "report 3", "slices 2", "slices 3")))


def joined(num_elsewhere: int = len(ELSEWHERE)) -> Ranks:
    """Four ranks, which may ask at step 10; the last ones are on another host."""
    group = Ranks(3, 4, 0.0, num_elsewhere=num_elsewhere)
    for rank in range(4):
        group.hello(rank, 100 + rank, 0.0)
    (merges,) = [group.join(rank, offer(MANIFEST, PIECES, b"f", rank), 0.0) for rank in range(4)][-1]
    assert isinstance(merges, MergePieces)
    group.put_together(site_pieces(merges.ranks))
    group.layout_sent(0.0)
    train(group, 0, 0, until=10)
    return group


def train(group: Ranks, step: int, seq: int, *, until: int) -> None:
    for rank in range(4):
        group.boundary(rank, step, seq, 0.0)
    group.answer(step, seq, Answer(kind=AnswerKind.CONTINUE, next_step=until), 0.0)


def told(group: Ranks, step: int, seq: int = 0, fragment: int = 0) -> None:
    """To write a snapshot of that fragment."""
    for rank in range(4):
        group.boundary(rank, step, seq, 0.0)
    group.answer(step, seq, Answer(kind=AnswerKind.SNAPSHOT, fragment=fragment), 0.0)


def reports(group: Ranks, rank: int, step: int, seq: int = 0, fragment: int = 0) -> Outcome:
    report = SealedReport(
        step=step, seq=seq, fragment=fragment, data_rank=rank, tokens=5, loss_sum=4.0, num_steps=2, train_s=1.0
    )
    return group.sealed(rank, report, 0.0)


def sealed(step: int, *, is_arriving: bool) -> e.SnapshotSealed:
    return e.SnapshotSealed(
        generation=3, step=step, tokens=20, num_steps=2, mean_loss=2.0, train_s=1.0, is_arriving=is_arriving
    )


def whole(step: int, seq: int = 0, fragment: int = 0) -> e.SnapshotArrived:
    return e.SnapshotArrived(generation=3, fragment=fragment, step=step, seq=seq)


@pytest.mark.parametrize("order", ORDERS)
def test_a_snapshot_is_whole_when_all_reports_and_all_slices_are_here(order: tuple[str, ...]) -> None:
    """Whatever comes first: words and slices take different ways."""
    group = joined()
    told(group, 10)
    for rank in HERE:
        assert reports(group, rank, 10) == []
    outcomes = []
    for item in order:
        rank = int(item[-1])
        outcomes.append(reports(group, rank, 10) if item.startswith("report") else group.arrived(rank, 10, 0))
    last_report = max(order.index("report 2"), order.index("report 3"))
    all_arrived = max(order.index("slices 2"), order.index("slices 3")) < last_report
    expected: list[Outcome] = [[] for _ in order]
    expected[last_report] = [sealed(10, is_arriving=not all_arrived)]
    if not all_arrived:
        expected[-1] = [whole(10)]
    assert outcomes == expected


def test_without_ranks_elsewhere_a_sealed_snapshot_is_whole() -> None:
    group = joined(num_elsewhere=0)
    told(group, 10)
    outcome = [reports(group, rank, 10) for rank in range(4)][-1]
    assert outcome == [sealed(10, is_arriving=False)]
    assert group.arrived(3, 10, 0) == []


def test_slices_of_a_rank_of_this_host_and_those_that_came_before_are_nothing() -> None:
    group = joined()
    told(group, 10)
    for rank in range(4):
        reports(group, rank, 10)
    assert group.arrived(2, 10, 0) == []
    for rank in (*HERE, 2, 4):
        assert group.arrived(rank, 10, 0) == [], f"rank {rank}"
    assert group.arrived(3, 10, 0) == [whole(10)]
    assert group.arrived(3, 10, 0) == [], "once"


def test_slices_of_a_snapshot_that_nobody_was_told_to_write_are_nothing() -> None:
    group = joined()
    for rank in ELSEWHERE:
        assert group.arrived(rank, 10, 0) == []
    told(group, 10)
    for step, seq in ((9, 0), (10, 1)):
        for rank in ELSEWHERE:
            assert group.arrived(rank, step, seq) == []
    outcome = [reports(group, rank, 10) for rank in range(4)][-1]
    assert outcome == [sealed(10, is_arriving=True)]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_after_a_failure_nothing_arrives(is_sealed: bool) -> None:
    group = joined()
    told(group, 10)
    for rank in range(4 if is_sealed else 3):
        reports(group, rank, 10)
    assert group.arrived(2, 10, 0) == []
    assert group.lost(0, "closed its connection")
    assert group.arrived(3, 10, 0) == []


def test_snapshots_of_several_fragments_at_one_step_arrive_each_by_itself() -> None:
    group = joined()
    for seq, fragment in enumerate((0, 1)):
        told(group, 10, seq, fragment)
        outcome = [reports(group, rank, 10, seq, fragment) for rank in range(4)][-1]
        assert outcome == [sealed(10, is_arriving=True)]
    assert group.arrived(2, 10, 0) == []
    assert group.arrived(2, 10, 1) == []
    assert group.arrived(3, 10, 1) == [whole(10, 1, fragment=1)]
    assert group.arrived(3, 10, 0) == [whole(10, 0, fragment=0)]


def test_what_is_written_again_at_the_same_step_is_another_snapshot() -> None:
    group = joined()
    for seq in range(2):
        told(group, 10, seq)
        for rank in range(4):
            reports(group, rank, 10, seq)
    assert [group.arrived(rank, 10, 0) for rank in ELSEWHERE] == [[], [whole(10, 0)]]
    assert [group.arrived(rank, 10, 1) for rank in ELSEWHERE] == [[], [whole(10, 1)]]


def test_nothing_of_snapshots_that_are_whole_is_kept() -> None:
    group = joined()
    for step in range(10, 60):
        told(group, step, 0)
        for rank in range(4):
            reports(group, rank, step)
        for rank in ELSEWHERE:
            group.arrived(rank, step, 0)
        train(group, step, 1, until=step + 1)
    assert not group._arriving._snapshots
