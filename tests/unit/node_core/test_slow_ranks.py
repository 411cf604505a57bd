"""A rank that comes to a question after the others may look at the outer parameters until then, and compares its own
with PUBLISH when it has looked: nothing is written there before it asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.events import Answer, AnswerKind, MergeMode
from atoll.node.core.exchange_events import ExchangeFinished
from atoll.node.local_protocol import Boundary, MergedReport, PieceHash, SealedReport
from atoll.protocol import messages as m
from atoll.protocol.settings import RunSettings
from tests.unit.node_core.test_hosts import Node
from tests.unit.node_core.test_overlap import TAU, committed, opened_for, overlapping
from tests.unit.node_core.test_site import HASH, SETTINGS, commit, opened, plan, weights_of

FAST, SLOW = 0, 1


class TwoRanks(Node):
    """Of one host: at commit 0, they train towards step 10."""

    def __init__(self, settings: RunSettings, first: m.Open) -> None:
        super().__init__(1, settings=settings)
        self.joins()
        self.hears(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))
        self.hears(first)
        self(e.LayoutSent(self.generation))
        self.all_say(Boundary(step=0, seq=0))
        self(e.Published(e.Values(0)))
        self.all_say(MergedReport(version=0, step=0, wait_s=0.0))

    def hears(self, message: m.CoordinatorMessage) -> None:
        self(e.Received(1, message))

    def asks(self, rank: int, step: int) -> list[out.Output]:
        return self(e.RankSaid(generation=self.generation, rank=rank, said=Boundary(step=step, seq=0)))

    def seals(self, step: int) -> None:
        """Both are told to train on."""
        self.all_say(Boundary(step=step, seq=0))
        self.all_say(
            SealedReport(
                step=step, seq=0, fragment=0, data_rank=0, tokens=100, loss_sum=1.0, num_steps=step, train_s=1.0,
                hashes=(PieceHash(piece=0, hash=HASH),),
            )
        )  # fmt: skip
        told = [o.answer.kind for o in self.all_say(Boundary(step=step, seq=1)) if isinstance(o, out.AnswerWorkers)]
        assert told == [AnswerKind.CONTINUE] * 2

    def commits(self, found: m.Commit, contributors: tuple[int, ...]) -> None:
        planned = plan(1, contributors=contributors, receivers=() if 1 in contributors else (1,))
        self.hears(planned)
        self.hears(weights_of(planned, *(100 for _ in contributors)))
        self(ExchangeFinished(plan=planned, payload_digest=HASH))
        self.hears(found)
        self(e.CommitApplied(commit=1, state_hash=HASH))


def published(outputs: list[out.Output]) -> list[e.Content]:
    return [o.content for o in outputs if isinstance(o, out.PublishState)]


def answers(outputs: list[out.Output]) -> Iterator[tuple[tuple[int, ...], Answer]]:
    """With the ranks that are told."""
    return ((o.ranks, o.answer) for o in outputs if isinstance(o, out.AnswerWorkers))


def test_a_difference_is_written_when_the_last_rank_asks() -> None:
    """A rank that looks would find it in place of values, and leave it in parameters that it had not trained."""
    node = TwoRanks(SETTINGS, opened(1, 0))
    node.commits(commit(1, 1, contributors=(2, 3)), (2, 3))
    assert node.asks(FAST, 10) == []
    assert published(node.asks(SLOW, 10)) == [e.Difference(0, 1)]
    ((ranks, told),) = answers(node(e.Published(e.Difference(0, 1))))
    assert (ranks, told.kind, told.mode) == ((FAST, SLOW), AnswerKind.APPLY, MergeMode.SHIFT)


@pytest.mark.parametrize("steps_apart", [0, 1])
def test_ranks_that_train_on_are_all_told_before_values_are_written(steps_apart: int) -> None:
    """One that had not heard of it would take the update twice. They may be several questions apart."""
    node = TwoRanks(overlapping(), opened_for(1, 0))
    node.seals(10)
    for step in range(11, 11 + steps_apart):
        ((ranks, told),) = answers(node.asks(FAST, step))
        assert (ranks, told) == ((FAST,), Answer(kind=AnswerKind.CONTINUE, next_step=step + 1))
    node.commits(committed(1), (1, 2))
    last = 11 + steps_apart
    assert last < 10 + TAU
    assert node.asks(FAST, last) == []
    for step in range(11, last):
        outputs = node.asks(SLOW, step)
        assert [ranks for ranks, _ in answers(outputs)] == [(SLOW,)]
        assert not published(outputs), "it trains, and may look"
    outputs = node.asks(SLOW, last)
    assert published(outputs) == [e.Values(1)]
    changes = Answer(kind=AnswerKind.CONTINUE, next_step=last + 1, version=1)
    assert list(answers(outputs)) == [((FAST, SLOW), changes)]
