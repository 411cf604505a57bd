"""Snapshots of a site of several hosts: slices that ranks elsewhere have sealed come to host 0, and the other hosts
take what they send as soon as all ranks have sealed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.core import events as e
from atoll.node.core.events import Answer, AnswerKind
from atoll.node.core.host_events import SlicesArrived, SnapshotShared
from atoll.node.core.outputs import MergePieces, ShareSnapshot
from atoll.node.core.ranks.generations import Generations
from atoll.node.core.ranks.group import Outcome
from atoll.node.core.ranks.pieces import site_pieces
from atoll.node.local_protocol import LOCAL_VERSION, Boundary, LocalHello, MergedReport, Piece, Said, SealedReport
from atoll.protocol.layout import Manifest, Role, TensorSpec
from tests.harness.fuzzing import fuzz
from tests.harness.ranks import offer

MANIFEST = Manifest.canonical([TensorSpec(name="a", shape=(4,), dtype="F32", role=Role.TRAINABLE)])
PIECES = (Piece(name="a", offsets=(0,), sizes=(4,), dtype="F32"),)
GENERATION = 3
HERE, ELSEWHERE = (0, 1), (2, 3)
ORDERS = [
    order
    for order in itertools.permutations(("report 2", "report 3", "slices 2", "slices 3", "shared"))
    if order.index("shared") > max(order.index("report 2"), order.index("report 3"))
]


class Site:
    """Four ranks, which may ask at step 10; the last ones are on another host."""

    def __init__(self, num_elsewhere: int = len(ELSEWHERE)) -> None:
        self.ranks = Generations(4, 0.0, num_elsewhere)
        self.ranks.begin(GENERATION, 0.0)
        self.all_say(LocalHello(world_size=4, pid=100, protocol_version=LOCAL_VERSION))
        (merges,) = [self.says(rank, offer(MANIFEST, PIECES, b"f", rank)) for rank in range(4)][-1]
        assert isinstance(merges, MergePieces)
        self.hears(e.PiecesMerged(generation=GENERATION, pieces=site_pieces(merges.ranks)))
        self.hears(e.LayoutSent(GENERATION))
        self.trains(0, 0, until=10)

    def hears(self, event: e.RankEvent) -> Outcome:
        return list(self.ranks.heard(event, 0.0))

    def says(self, rank: int, said: Said) -> Outcome:
        return self.hears(e.RankSaid(generation=GENERATION, rank=rank, said=said))

    def all_say(self, said: Said) -> None:
        for rank in range(4):
            self.says(rank, said)

    def answers(self, step: int, seq: int, answer: Answer) -> None:
        self.all_say(Boundary(step=step, seq=seq))
        self.ranks.answer(e.BoundaryAsked(generation=GENERATION, step=step, seq=seq), answer, 0.0)

    def trains(self, step: int, seq: int, *, until: int) -> None:
        self.answers(step, seq, Answer(kind=AnswerKind.CONTINUE, next_step=until))

    def told(self, step: int, seq: int = 0, fragment: int = 0) -> None:
        """To write a snapshot of that fragment."""
        self.answers(step, seq, Answer(kind=AnswerKind.SNAPSHOT, fragment=fragment))

    def moves_on(self, step: int, seq: int, version: int = 1) -> None:
        """A commit that it is not in is applied: what was written before that is given up, and written again."""
        self.answers(step, seq, Answer(kind=AnswerKind.APPLY, version=version, next_step=step))
        self.all_say(MergedReport(version=version, step=step, wait_s=0.0))

    def reports(self, rank: int, step: int, seq: int = 0, fragment: int = 0) -> Outcome:
        report = SealedReport(
            step=step, seq=seq, fragment=fragment, data_rank=rank, tokens=5, loss_sum=4.0, num_steps=2, train_s=1.0
        )
        return self.says(rank, report)

    def all_report(self, step: int, seq: int = 0, fragment: int = 0) -> Outcome:
        return [self.reports(rank, step, seq, fragment) for rank in range(4)][-1]

    def arrived(self, rank: int, step: int, seq: int = 0, generation: int = GENERATION) -> Outcome:
        """Slices of a rank elsewhere."""
        return self.hears(SlicesArrived(generation=generation, rank=rank, step=step, seq=seq))

    def all_arrived(self, step: int, seq: int = 0) -> Outcome:
        return [self.arrived(rank, step, seq) for rank in ELSEWHERE][-1]

    def shared(self, step: int, seq: int = 0, generation: int = GENERATION) -> Outcome:
        return self.hears(SnapshotShared(generation=generation, step=step, seq=seq))


def sealed(step: int, *, is_arriving: bool = True) -> e.SnapshotSealed:
    return e.SnapshotSealed(
        generation=GENERATION, step=step, tokens=20, num_steps=2, mean_loss=2.0, train_s=1.0, is_arriving=is_arriving
    )


def share(step: int, seq: int = 0, fragment: int = 0) -> ShareSnapshot:
    return ShareSnapshot(generation=GENERATION, fragment=fragment, step=step, seq=seq)


def arrived(step: int, seq: int = 0, fragment: int = 0) -> e.SnapshotArrived:
    return e.SnapshotArrived(generation=GENERATION, fragment=fragment, step=step, seq=seq)


@pytest.mark.parametrize("order", ORDERS)
def test_a_snapshot_is_shared_at_the_last_report_and_arrives_when_each_host_has_its_slices(
    order: tuple[str, ...],
) -> None:
    """Whatever comes first: words and slices take different ways."""
    site = Site()
    site.told(10)
    for rank in HERE:
        assert site.reports(rank, 10) == []
    last_report = max(order.index("report 2"), order.index("report 3"))
    outcomes = []
    for place, item in enumerate(order):
        if place <= last_report:
            assert site.shared(10) == [], "nobody was asked to share it"
        if item == "shared":
            outcomes.append(site.shared(10))
        else:
            rank = int(item[-1])
            outcomes.append(site.reports(rank, 10) if item.startswith("report") else site.arrived(rank, 10))
    expected: list[list[object]] = [[] for _ in order]
    expected[last_report] = [sealed(10), share(10)]
    expected[-1].append(arrived(10))
    assert outcomes == expected
    assert site.shared(10) == [], "once"


def test_without_ranks_elsewhere_nothing_is_shared_or_arrives() -> None:
    site = Site(num_elsewhere=0)
    site.told(10)
    assert site.all_report(10) == [sealed(10, is_arriving=False)]
    assert site.arrived(3, 10) == []
    assert site.shared(10) == []


def test_slices_of_a_rank_of_this_host_and_those_that_came_before_are_nothing() -> None:
    site = Site()
    site.told(10)
    assert site.all_report(10) == [sealed(10), share(10)]
    assert site.shared(10) == []
    assert site.arrived(2, 10) == []
    for rank in (*HERE, 2, 4):
        assert site.arrived(rank, 10) == [], f"rank {rank}"
    assert site.arrived(3, 10) == [arrived(10)]
    assert site.arrived(3, 10) == [], "once"


def test_slices_of_a_snapshot_that_nobody_was_told_to_write_are_nothing() -> None:
    site = Site()
    for rank in ELSEWHERE:
        assert site.arrived(rank, 10) == []
    site.told(10)
    for step, seq in ((9, 0), (10, 1)):
        for rank in ELSEWHERE:
            assert site.arrived(rank, step, seq) == []
        assert site.shared(step, seq) == []
    assert site.all_report(10) == [sealed(10), share(10)]
    assert site.all_arrived(10) == []
    assert site.shared(10, 1) == []
    assert site.shared(9) == []
    assert site.shared(10) == [arrived(10)]


def test_what_happens_to_snapshots_of_another_generation_is_nothing() -> None:
    site = Site()
    site.told(10)
    site.all_report(10)
    for generation in (GENERATION - 1, GENERATION + 1):
        for rank in ELSEWHERE:
            assert site.arrived(rank, 10, generation=generation) == []
    assert site.all_arrived(10) == []
    for generation in (GENERATION - 1, GENERATION + 1):
        assert site.shared(10, generation=generation) == []
    assert site.shared(10) == [arrived(10)]


@pytest.mark.parametrize(
    "comes", ["before all reports", "before all slices", "before it is shared", "after it is shared"]
)
def test_after_a_failure_nothing_arrives(comes: str) -> None:
    site = Site()
    site.told(10)
    for rank in range(3 if comes == "before all reports" else 4):
        site.reports(rank, 10)
    assert site.arrived(2, 10) == []
    if comes == "before it is shared":
        assert site.arrived(3, 10) == []
    if comes == "after it is shared":
        assert site.shared(10) == []
    site.hears(e.RankLost(generation=GENERATION, rank=0, text="closed its connection"))
    assert site.arrived(3, 10) == []
    assert site.shared(10) == []


@pytest.mark.parametrize("comes", ["before all slices", "before it is shared"])
def test_after_their_end_nothing_arrives_of_ranks_and_what_others_write_is_not_theirs(comes: str) -> None:
    site = Site()
    site.told(10)
    site.all_report(10)
    assert site.arrived(2, 10) == []
    if comes == "before it is shared":
        assert site.arrived(3, 10) == []
    else:
        assert site.shared(10) == []
    site.ranks.end()
    assert site.arrived(3, 10) == []
    assert site.shared(10) == []
    site.ranks.begin(GENERATION + 1, 0.0)
    for generation in (GENERATION, GENERATION + 1):
        assert site.arrived(3, 10, generation=generation) == []
        assert site.shared(10, generation=generation) == []


def test_snapshots_of_several_fragments_at_one_step_arrive_each_by_itself() -> None:
    site = Site()
    for seq, fragment in enumerate((0, 1)):
        site.told(10, seq, fragment)
        assert site.all_report(10, seq, fragment) == [sealed(10), share(10, seq, fragment)]
    assert site.arrived(2, 10, 0) == []
    assert site.arrived(2, 10, 1) == []
    assert site.arrived(3, 10, 1) == []
    assert site.shared(10, 0) == []
    assert site.arrived(3, 10, 0) == [arrived(10, 0, fragment=0)]
    assert site.shared(10, 1) == [arrived(10, 1, fragment=1)]


@pytest.mark.parametrize("given_up", ["before its slices came", "before it was shared", "after it was shared"])
def test_what_is_given_up_and_written_again_at_the_same_step_is_another_snapshot(given_up: str) -> None:
    """What of the first one comes late is nothing, and says nothing about the second."""
    site = Site()
    site.told(10)
    site.all_report(10)
    if given_up != "before its slices came":
        assert site.all_arrived(10) == []
    if given_up == "after it was shared":
        assert site.shared(10) == [arrived(10)]
    site.moves_on(10, 1)
    site.told(10, 2)
    if given_up == "before its slices came":
        assert site.all_arrived(10) == []
    assert site.all_report(10, 2) == [sealed(10), share(10, 2)]
    assert site.shared(10) == []
    assert site.shared(10, 2) == []
    assert site.shared(10) == []
    assert site.all_arrived(10, 2) == [arrived(10, 2)]


def test_nothing_of_snapshots_that_have_arrived_is_kept() -> None:
    site = Site()
    for step in range(10, 60):
        site.told(step, 0)
        site.all_report(step)
        site.all_arrived(step)
        site.shared(step)
        site.trains(step, 1, until=step + 1)
    assert site.ranks.group is not None
    assert not site.ranks.group.arriving._snapshots


def test_of_snapshots_that_were_given_up_nothing_is_kept() -> None:
    site = Site()
    for step in range(10, 15):
        for fragment in (0, 1):
            site.told(step, 2 * fragment, fragment)
            site.all_report(step, 2 * fragment, fragment)
            site.moves_on(step, 2 * fragment + 1)
        site.trains(step, 4, until=step + 1)
    assert site.ranks.group is not None
    assert list(site.ranks.group.arriving._snapshots) == [(14, 0), (14, 2)], "of each fragment the last one"


def test_of_a_site_of_one_host_nothing_is_kept() -> None:
    site = Site(num_elsewhere=0)
    for step in range(10, 15):
        site.told(step, 0)
        site.all_report(step)
        site.trains(step, 1, until=step + 1)
    assert site.ranks.group is not None
    assert not site.ranks.group.arriving._snapshots


NUM = 3
WORDS = (
    *[("report", 0, 0)] * 6,
    *(("slices", rank, seq) for rank in ELSEWHERE for seq in range(NUM)),
    *(("shared", 0, seq) for seq in range(NUM)),
)
"""What, of which rank, of which snapshot; of reports the next one comes."""


@fuzz(100)
@given(st.data())
def test_whatever_comes_when_each_snapshot_is_shared_once_and_then_arrives_once(data: st.DataObject) -> None:
    """Three at one step; reports of one precede those of the next, slices and words of sharing come as they like: once
    the next one is written, those of the one before are nothing."""
    site, num, newest = Site(), NUM, 0
    asked: list[int] = []
    come: list[int] = []
    is_shared: set[int] = set()
    reported = [0] * num
    has_slices: list[set[int]] = [set() for _ in range(num)]
    site.told(10)
    for _ in range(data.draw(st.integers(10, 60))):
        what, rank, seq = data.draw(st.sampled_from(WORDS))
        match what:
            case "report":
                writing = next((s for s in range(num) if reported[s] < 4), None)
                if writing is None:
                    continue
                outcome = site.reports(reported[writing], 10, writing)
                reported[writing] += 1
                if reported[writing] == 4 and writing + 1 < num:
                    newest = writing + 1
                    site.told(10, newest)
            case "slices":
                has_slices[seq] |= {rank} if seq == newest else set()
                outcome = site.arrived(rank, 10, seq)
            case _:
                outcome = site.shared(10, seq)
                is_shared |= {seq} if seq in asked and seq == newest else set()
        asked += [item.seq for item in outcome if isinstance(item, ShareSnapshot)]
        come += [item.seq for item in outcome if isinstance(item, e.SnapshotArrived)]
        assert sorted(asked) == [s for s in range(num) if reported[s] == 4]
        assert sorted(come) == [s for s in sorted(is_shared) if has_slices[s] == set(ELSEWHERE)]
