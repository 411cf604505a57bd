"""The deadlines of a node's workers: the grace of a lost connection, a rank that hangs, a node that stood still."""

from __future__ import annotations

import logging

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.ranks.group import WorkerGroup
from atoll.node.core.ranks.outcomes import AllJoined, site_pieces
from atoll.node.core.ranks.pieces import RankTensors
from atoll.node.local_protocol import CheckpointCounts, CheckpointId, Piece
from atoll.protocol import messages as m
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.settings import RunSettings, settings_to_json
from tests.harness.site_questions import a_node_core, wanted

SETTINGS = RunSettings(run_id="run", steps=40, time_limits="local")
MANIFEST = Manifest.canonical([TensorSpec(name="w", shape=(8,), dtype="F32", role=Role.TRAINABLE)])
TENSORS = RankTensors(MANIFEST, (Piece(name="w", offsets=(0,), sizes=(8,), dtype="F32"),))
CHECKPOINT = CheckpointId(incarnation=1, generation=1, step=7)


class Node:
    """A core with one rank, which asks at its first boundary when it is told to."""

    def __init__(self) -> None:
        self.core, self.now = a_node_core(SETTINGS, 100.0), 100.0
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
        self.group.hello(0, 5, self.now)
        (joined,) = self.group.join(0, TENSORS, b"", 0, self.now, checkpoints=frozenset([checkpoint]))
        assert isinstance(joined, AllJoined)
        self.group.put_together(site_pieces(joined))
        self.group.layout_sent(self.now)

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
    node(e.WorkersLost(1, "rank 0 closed its connection"))
    (crash,) = node.wait(110.0)
    assert crash == out.DescribeCrash(generation=1, text="rank 0 closed its connection", num_steps=0, has_exited=False)
    assert node.now == 101.0

    node = Node()
    node(e.WorkersLost(1, "rank 0 closed its connection"))
    (crash,) = node(e.WorkersExited(generation=1, code=-9, text="killed by SIGKILL"))
    assert crash == out.DescribeCrash(generation=1, text="killed by SIGKILL", num_steps=0, has_exited=True)
    assert not node.wait(110.0), "it is said once"


def test_a_rank_that_hangs_is_a_crash_and_says_how_far_it_came() -> None:
    node = Node()
    node.trains()
    node.now += 1
    node.group.progress(0, 3, 10.0, node.now)
    (crash,) = node.wait(1000.0)
    assert isinstance(crash, out.DescribeCrash)
    assert crash.num_steps == 3
    assert "rank 0 (pid 5) has got no further for" in crash.text
    assert node.now == 101.0 + node.core.limits.worker_floor_s


def test_a_node_that_stood_still_blames_no_rank_for_it() -> None:
    node = Node()
    node.trains()
    node.now += 1
    node.group.progress(0, 3, 10.0, node.now)
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
    node.group.progress(0, num_steps, 1.0, node.now)
    node.crashes(num_steps)
    assert node.core.ranks.crashed_from == (() if num_steps else (CHECKPOINT,))
    node.now += 100
    node(e.Tick())
    assert node.group.generation == 2


def test_checkpoints_are_counted_over_generations() -> None:
    node = Node()
    node.trains()
    node.group.progress(0, 0, 0.0, node.now, checkpoints=CheckpointCounts(written=3, skipped=1))
    node.crashes()
    node.now += 100
    node(e.Tick())
    node.trains()
    node.group.progress(0, 0, 0.0, node.now, checkpoints=CheckpointCounts(failed=2))
    assert node.core.ranks.checkpoints == CheckpointCounts(written=3, skipped=1, failed=2)
