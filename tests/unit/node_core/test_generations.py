"""The deadlines of a node's workers: the grace of a lost connection, a rank that hangs, a node that stood still."""

from __future__ import annotations

import logging

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.ranks.generations import Generations
from atoll.node.core.ranks.group import WorkerGroup
from atoll.node.core.ranks.pieces import site_pieces
from atoll.node.local_protocol import (
    LOCAL_VERSION,
    NO_CHECKPOINTS,
    Boundary,
    Busy,
    CheckpointCounts,
    CheckpointId,
    LocalHello,
    MergedReport,
    Piece,
    Progress,
    RankReadings,
    Said,
)
from atoll.protocol import messages as m
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.settings import RunSettings, settings_to_json
from tests.harness.ranks import offer
from tests.harness.site_questions import a_node_core, wanted

SETTINGS = RunSettings(run_id="run", steps=40, time_limits="local")
MANIFEST = Manifest.canonical([TensorSpec(name="w", shape=(8,), dtype="F32", role=Role.TRAINABLE)])
PIECES = (Piece(name="w", offsets=(0,), sizes=(8,), dtype="F32"),)
CHECKPOINT = CheckpointId(incarnation=1, generation=1, step=7)


class Node:
    """A core with one rank, which asks at its first boundary when it is told to."""

    def __init__(self, start_limit_s: float = 0.0) -> None:
        self.core, self.now = a_node_core(SETTINGS, 100.0, start_limit_s=start_limit_s), 100.0
        self(e.SessionOpened())
        self(e.Received(1, m.Welcome(settings_json=settings_to_json(SETTINGS))))

    def __call__(self, event: e.Event) -> list[out.Output]:
        return wanted(self.core, event, self.now)

    @property
    def group(self) -> WorkerGroup:
        group = self.core.ranks.group
        assert group is not None
        return group

    def trains(self, checkpoint: CheckpointId = CHECKPOINT) -> None:
        """From the checkpoint that it has."""
        self.joins(checkpoint)
        self(e.LayoutSent(self.group.generation))

    def joins(self, checkpoint: CheckpointId = CHECKPOINT) -> list[out.Output]:
        """What follows once its pieces are put together."""
        assert not self.says(LocalHello(world_size=1, pid=5, protocol_version=LOCAL_VERSION))
        (merges,) = self.says(offer(MANIFEST, PIECES, checkpoints=(checkpoint,)))
        assert isinstance(merges, out.MergePieces)
        merged = e.PiecesMerged(
            generation=merges.generation, pieces=site_pieces(merges.ranks), max_retained_bytes=1 << 20
        )
        return self(merged)

    def says(self, said: Said, rank: int = 0) -> list[out.Output]:
        return self(e.RankSaid(generation=self.group.generation, rank=rank, said=said))

    def progresses(self, step: int, checkpoints: CheckpointCounts = NO_CHECKPOINTS) -> None:
        assert not self.says(Progress(step=step, steps_per_s=10.0, checkpoints=checkpoints))

    def is_admitted(self) -> list[out.Output]:
        return self(e.Received(1, m.Admitted(site_id=1, admitted_as=m.AdmittedAs.SEEDER, run_seed=1)))

    def wait(self, until: float) -> list[out.Output]:
        """Every deadline is met; the outputs of the last."""
        outputs: list[out.Output] = []
        while (deadline := self.core.next_deadline()) is not None and deadline <= until and not outputs:
            self.now = max(self.now, deadline)
            outputs = [o for o in self(e.Tick()) if isinstance(o, out.DescribeCrash)]
        return outputs

    def crashes(self, num_steps: int = 0) -> None:
        generation = self.group.generation
        failed = e.WorkersFailed(generation=generation, kind=e.FailureKind.CRASHED, text="killed", num_steps=num_steps)
        assert out.StopWorkers(generation) in self(failed)


def test_a_lost_connection_is_a_crash_unless_the_exit_says_why_in_time() -> None:
    node = Node()
    node(e.RankLost(generation=1, rank=0, text="closed its connection"))
    (crash,) = node.wait(110.0)
    lost = "rank 0 (pid 0, starting, step 0) closed its connection"
    assert crash == out.DescribeCrash(generation=1, text=lost, num_steps=0, has_exited=False, rank=0)
    assert node.now == 101.0

    node = Node()
    node(e.RankLost(generation=1, rank=0, text="closed its connection"))
    (crash,) = node(e.WorkersExited(generation=1, code=-9, text="killed by SIGKILL"))
    assert crash == out.DescribeCrash(generation=1, text="killed by SIGKILL", num_steps=0, has_exited=True)
    assert not node.wait(110.0), "it is said once"


def test_a_rank_that_hangs_is_a_crash_and_says_how_far_it_came() -> None:
    node = Node()
    node.trains()
    node.now += 1
    node.progresses(3)
    (crash,) = node.wait(1000.0)
    assert isinstance(crash, out.DescribeCrash)
    assert crash.num_steps == 3
    assert "rank 0 (pid 5) has got no further for" in crash.text
    assert node.now == 101.0 + node.core.limits.worker_floor_s


@pytest.mark.parametrize("start_limit_s", [0.0, 4000.0])
def test_a_slow_start_has_the_limit_of_the_node_or_what_the_script_announces(start_limit_s: float) -> None:
    node = Node(start_limit_s)
    limit_s = start_limit_s or node.core.limits.worker_start_s
    (crash,) = node.wait(10_000.0)
    assert isinstance(crash, out.DescribeCrash)
    assert node.now == 100.0 + limit_s
    assert "start the node with --start-limit-s, or call atoll.starting(" in crash.text

    node = Node(start_limit_s)
    assert not node.says(LocalHello(world_size=1, pid=5, protocol_version=LOCAL_VERSION))
    assert not node.says(Busy(what="loading", limit_s=9000.0))
    watch = node.core.ranks.watch(node.core.limits)
    assert watch is not None
    assert (watch.doing, watch.limit_s) == ("busy: loading", 9000.0), "as the status shows it"
    assert not node.wait(9099.0)
    node.now = 9000.0
    assert not node.says(Busy(what="", limit_s=0.0))
    (crash,) = node.wait(100_000.0)
    assert node.now == 9000.0 + limit_s, "what comes after it has the usual limit"


def test_a_node_that_stood_still_blames_no_rank_for_it() -> None:
    node = Node()
    node.trains()
    node.now += 1
    node.progresses(3)
    node(e.Tick())
    limits = node.core.limits
    node.now += limits.worker_floor_s + limits.lease_s
    assert not node(e.Tick()), "what the rank said meanwhile is not read yet"
    assert node.wait(node.now + limits.worker_floor_s), "it said nothing"


def test_the_end_of_a_script_that_fails_after_its_workers_have_left_is_said() -> None:
    """The node itself has come to its end, and waits for it."""
    node = Node()
    node.trains()
    left = node(e.WorkersLeft(generation=1, reason="the loader ended"))
    assert out.Exit(0, "the loader ended") in left
    assert not node(e.WorkersExited(generation=1, code=0, text="it ended well"))
    (said,) = node(e.WorkersExited(generation=1, code=1, text="the workers ended with exit code 1"))
    assert said == out.Report(logging.ERROR, "after they had left the run the workers ended with exit code 1")


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_checkpoint_whose_workers_crash_without_a_step_is_passed_over(num_steps: int) -> None:
    node = Node()
    node.trains()
    node.progresses(num_steps)
    node.crashes(num_steps)
    assert node.core.ranks.crashed_from == (() if num_steps else (CHECKPOINT,))
    node.now += 100
    node(e.Tick())
    assert node.group.generation == 2


def test_checkpoints_are_counted_over_generations() -> None:
    node = Node()
    node.trains()
    node.progresses(0, CheckpointCounts(written=3, skipped=1))
    node.crashes()
    node.now += 100
    node(e.Tick())
    node.trains()
    node.progresses(0, CheckpointCounts(failed=2))
    assert node.core.ranks.checkpoints == CheckpointCounts(written=3, skipped=1, failed=2)


def test_tokens_are_counted_over_generations() -> None:
    node = Node()
    node.trains()

    def trained(tokens: int) -> int:
        said = Progress(step=0, steps_per_s=10.0, readings=RankReadings(trained_tokens=tokens))
        assert not node.says(said)
        return node.core.ranks.trained_tokens

    assert trained(100) == 100
    assert trained(250) == 250
    node.crashes()
    node.now += 100
    node(e.Tick())
    assert node.core.ranks.trained_tokens == 250
    node.trains()
    assert trained(30) == 280


def test_ranks_that_see_the_same_batch_count_its_tokens_once() -> None:
    ranks = Generations(4, 0.0)
    ranks.begin(1, 0.0)
    assert ranks.group is not None
    for rank, (data_rank, tokens) in enumerate([(0, 100), (0, 90), (1, 50), (1, 50)]):
        hello = LocalHello(world_size=4, pid=5 + rank, protocol_version=LOCAL_VERSION)
        ranks.heard(e.RankSaid(generation=1, rank=rank, said=hello), 1.0)
        ranks.heard(e.RankSaid(generation=1, rank=rank, said=offer(MANIFEST, PIECES, data_rank=data_rank)), 1.0)
        ranks.group.ranks[rank].readings = RankReadings(trained_tokens=tokens)
    assert ranks.trained_tokens == 150


def test_one_message_of_a_rank_is_one_event_and_what_all_agree_on_follows_from_it() -> None:
    """From the first word to the answer at the first boundary, and what the journal hears of it."""
    node = Node()
    (offered,) = node.joins()
    assert [type(event) for event in node.core.handled] == [e.PiecesMerged, e.WorkersJoined]
    assert isinstance(offered, out.Send)
    assert isinstance(offered.message, m.Offer)
    (admits,) = [o for o in node.is_admitted() if isinstance(o, out.SendLayout)]
    assert not node(e.LayoutSent(admits.generation))
    (answered,) = node.says(Boundary(step=0, seq=0))
    assert node.core.handled[1:] == [e.BoundaryAsked(generation=1, step=0, seq=0)]
    assert isinstance(answered, out.AnswerWorkers)
    assert (answered.answer.kind, answered.ranks) == (e.AnswerKind.SNAPSHOT, (0,))


def test_a_rank_that_says_what_it_may_not_is_refused_and_its_end_is_a_crash() -> None:
    node = Node()
    node.trains()
    (refused,) = node.says(MergedReport(version=1, step=0, wait_s=0.0))
    assert isinstance(refused, out.RefuseRank)
    assert "rank 0 may not say that while it is training" in refused.text
    node(e.RankLost(generation=1, rank=0, text=f"was cut off: {refused.text}"))
    assert node.wait(110.0)


def test_ranks_of_another_site_or_version_end_it_and_are_told_why() -> None:
    for hello, words in (
        (LocalHello(world_size=2, pid=5, protocol_version=LOCAL_VERSION), "rank 0 of 2 asks to join; this site has"),
        (LocalHello(world_size=1, pid=5, protocol_version=LOCAL_VERSION + 1), "run both from one installation"),
    ):
        node = Node()
        outputs = node.says(hello)
        (refused,) = [o for o in outputs if isinstance(o, out.RefuseRank)]
        (ended,) = [o for o in outputs if isinstance(o, out.Exit)]
        assert words in refused.text
        assert words in ended.text


def test_words_of_ranks_that_are_gone_change_nothing() -> None:
    node = Node()
    node.trains()
    node.crashes()
    assert not node(e.RankSaid(generation=1, rank=0, said=Boundary(step=0, seq=0)))
    assert not node(e.RankLost(generation=1, rank=0, text="closed its connection"))


def test_ranks_that_are_lost_before_their_layout_do_not_blame_a_checkpoint() -> None:
    node = Node()
    node.joins()
    node.is_admitted()
    node(e.RankLost(generation=1, rank=0, text="closed its connection"))
    node(e.LayoutSent(1))
    node.crashes()
    assert node.core.ranks.crashed_from == ()
