"""`atoll.join` and `Site.step` against a node in memory."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import atoll
from atoll.node.core.events import Answer, MergeMode
from atoll.node.local_protocol import CheckpointCounts
from atoll.node.worker import frozen, joined_site
from atoll.node.worker import join as join_module
from atoll.node.worker.checkpoint import LocalCheckpoints
from atoll.node.worker.pieces import SharedTensors
from atoll.node.worker.site import Site, Step
from atoll.protocol.errors import ConfigError, NonFiniteError, NotYetError
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.fake_node import SNAPSHOT, STOP, FakeNode, Question, apply, go_on, in_memory
from tests.harness.zero import ZeroRedundancyOptimizer, rank_of_two

SETTINGS = RunSettings(run_id="r", steps=100)
REPLACE, MERGE, SHIFT, MIX = MergeMode.REPLACE, MergeMode.MERGE, MergeMode.SHIFT, MergeMode.MIX


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return in_memory(monkeypatch, SETTINGS)


def model() -> tuple[nn.Linear, torch.optim.SGD]:
    net = nn.Linear(2, 1, bias=False)
    nn.init.constant_(net.weight, 1.0)
    return net, torch.optim.SGD(net.parameters(), lr=1.0)


def train(net: nn.Linear, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Each step takes lr from every weight."""
    optimizer.zero_grad()
    loss: torch.Tensor = net(torch.ones(1, 2)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def first(next_step: int, run_step: int = 0) -> tuple[int, Answer | Question]:
    return 0, apply(REPLACE, next_step, run_step=run_step, fresh=True)


def test_a_sync_from_seed_to_end(node: FakeNode) -> None:
    net, optimizer = model()
    node.shared_pieces = (0,)

    def published(value: float, answer: Answer) -> Question:
        def run() -> Answer:
            node.values(node.publish, "weight")[:] = value
            return answer

        return run

    node.script = [
        (0, SNAPSHOT),
        (0, published(1.0, apply(REPLACE, 2, fresh=True))),
        (2, replace(SNAPSHOT, hash_shared=True)),
        (2, published(5.0, apply(REPLACE, 4, run_step=2, version=1))),
        (4, STOP),
    ]
    steps: list[Step] = []
    with atoll.join(net, optimizer, data_fingerprint=b"f" * 32, data_rank=3) as site:
        assert (site.site_id, site.seed, site.rank, site.world, site.run_length) == (7, 99, 0, 1, 100)
        assert site.run_share == 0.0
        while site.running:
            steps.append(site.step(tokens=10, loss=train(net, optimizer)))
        assert site.run_share == 0.04
    assert steps == [Step(True, False, 1), Step(True, True, 2), Step(True, False, 3), Step(False, False, 4)]
    assert net.weight.tolist() == [[3.0, 3.0]]
    assert node.said("join") == [{"fingerprint": b"f" * 32, "data_rank": 3}]
    asked = [(b["step"], b["seq"]) for b in node.said("boundary")]
    assert asked == [(0, 0), (0, 1), (2, 0), (2, 1), (4, 0)]
    seed, sealed = node.said("sealed")
    assert (seed["tokens"], seed["num_steps"], seed["hashes"]) == (0, 0, ())
    assert (sealed["tokens"], sealed["num_steps"], sealed["data_rank"]) == (20, 2, 3)
    assert sealed["loss_sum"] == 2.0 + 0.0
    assert [item["piece"] for item in sealed["hashes"]] == [0]  # wanted at this one
    assert [b["version"] for b in node.said("merged")] == [0, 1]
    assert node.said("goodbye") == [{"run_over": True}]
    assert node.told[-1] == ("close", {})


@pytest.mark.parametrize("tokens", [10, torch.tensor(10)])
def test_tokens_and_steps_follow_the_base(node: FakeNode, tokens: int) -> None:
    """A merge keeps what came after the snapshot, a shift keeps everything since the old base."""
    net, optimizer = model()
    node.script = [
        first(2, run_step=40),
        (2, SNAPSHOT),
        (2, go_on(3)),
        (3, apply(MERGE, 4, run_step=42)),
        (4, apply(SHIFT, 5, run_step=44)),
        (5, SNAPSHOT),
        (5, STOP),
    ]
    inner = []
    with atoll.join(net, optimizer, ramp_steps=0) as site:
        while site.running:
            inner.append(site.step(tokens=tokens).inner_step)
    assert inner == [41, 42, 43, 46, 47]
    assert [b["tokens"] for b in node.said("sealed")] == [20, 30]
    assert [b["num_steps"] for b in node.said("sealed")] == [0, 0]  # no loss was given


def two_layers() -> tuple[nn.Sequential, torch.optim.SGD]:
    """Each is a fragment."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return net, torch.optim.SGD(net.parameters(), lr=1.0)


def in_two_fragments(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Of which both may be in flight."""
    two = replace(SETTINGS, sync=SyncSettings(every=4, fragments=2, overlap_steps=4))
    monkeypatch.setattr(join_module, "connect", lambda: node.connection(two))
    return two_layers()


def of(fragment: int, answer: Answer) -> Answer:
    return replace(answer, fragment=fragment)


def test_each_of_several_snapshots_in_flight_counts_once(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later one is committed first. What the earlier one listed comes with the next, as no commit holds it."""
    net, optimizer = in_two_fragments(node, monkeypatch)
    node.script = [
        (0, of(0, apply(REPLACE, 0, fresh=True))),
        (0, of(1, apply(REPLACE, 2))),
        (2, of(0, SNAPSHOT)),
        (2, go_on(4)),
        (4, of(1, SNAPSHOT)),
        (4, go_on(5)),
        (5, of(1, apply(MERGE, 5, run_step=2))),
        (5, go_on(6)),
        (6, of(1, SNAPSHOT)),
        (6, of(0, apply(SHIFT, 6, run_step=4))),
        (6, of(1, apply(REPLACE, 7, run_step=6))),
        (7, of(0, SNAPSHOT)),
        (7, STOP),
    ]
    inner = []
    with atoll.join(net, optimizer, ramp_steps=0) as site:
        while site.running:
            inner.append(site.step(tokens=10).inner_step)
    assert [b["tokens"] for b in node.said("sealed")] == [20, 20, 20, 30]
    assert inner == [1, 2, 3, 4, 5, 8, 9], "of the 7 own steps 4 are in commits, of 6"


def test_a_commit_that_undoes_nothing_leaves_what_others_list(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks wait for the earlier of two commits, and did no step since they took the last one of the other
    fragment."""
    net, optimizer = in_two_fragments(node, monkeypatch)
    node.script = [
        (0, of(0, apply(REPLACE, 0, fresh=True))),
        (0, of(1, apply(REPLACE, 2))),
        (2, of(0, SNAPSHOT)),
        (2, go_on(3)),
        (3, of(1, SNAPSHOT)),
        (3, of(1, apply(REPLACE, 3, run_step=2))),
        (3, of(1, apply(REPLACE, 3, run_step=4))),
        (3, of(0, apply(SHIFT, 5, run_step=6))),
        (5, of(1, SNAPSHOT)),
        (5, STOP),
    ]
    with atoll.join(net, optimizer, ramp_steps=0) as site:
        while site.running:
            site.step(tokens=10, loss=1.5)
    sealed = node.said("sealed")
    assert [b["tokens"] for b in sealed] == [20, 10, 40], "the first two steps are in no commit"
    assert [b["num_steps"] for b in sealed] == [2, 1, 2]
    assert site.inner_step == 6 + 4


def test_progress_that_is_discarded_with_snapshots_in_flight_is_not_counted(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = replace(SETTINGS, sync=SyncSettings(every=4, fragments=2, overlap_steps=4))
    monkeypatch.setattr(join_module, "connect", lambda: node.connection(two))
    net, optimizer = two_layers()
    evicted = replace(apply(REPLACE, 5, run_step=10), data_epoch=1)
    node.script = [
        (0, apply(REPLACE, 0, fresh=True)),
        (0, replace(apply(REPLACE, 2), fragment=1)),
        (2, SNAPSHOT),
        (2, go_on(4)),
        (4, replace(SNAPSHOT, fragment=1)),
        (4, go_on(5)),
        (5, evicted),
        (5, replace(evicted, fragment=1, next_step=7)),
        (7, SNAPSHOT),
        (7, STOP),
    ]
    with atoll.join(net, optimizer, ramp_steps=0) as site:
        while site.running:
            site.step(tokens=10)
    assert [b["tokens"] for b in node.said("sealed")] == [20, 20, 20]
    assert site.inner_step == 12


def test_local_progress_that_is_discarded_is_not_counted(node: FakeNode) -> None:
    net, optimizer = model()
    node.script = [first(2), (2, apply(REPLACE, 3, run_step=10)), (3, SNAPSHOT), (3, STOP)]
    with atoll.join(net, optimizer) as site:
        while site.running:
            site.step(tokens=10, loss=1.5)
    (sealed,) = node.said("sealed")
    assert (sealed["tokens"], sealed["loss_sum"], sealed["num_steps"]) == (10, 1.5, 1)
    assert site.inner_step == 11


def test_a_loss_that_is_given_now_and_then_stands_for_all_steps_of_the_window(node: FakeNode) -> None:
    """The coordinator divides the window's time by its steps: it would take this site for a slow one."""
    net, optimizer = model()
    node.script = [first(4), (4, SNAPSHOT), (4, go_on(6)), (6, SNAPSHOT), (6, STOP)]
    with atoll.join(net, optimizer) as site:
        while site.running:
            site.step(tokens=10, loss=1.5 if site.inner_step % 2 else None)
    assert [(b["loss_sum"], b["num_steps"]) for b in node.said("sealed")] == [(6.0, 4), (3.0, 2)]


def test_progress_is_told_however_short_a_window_is(node: FakeNode) -> None:
    net, optimizer = model()
    node.script = [first(2), (2, SNAPSHOT), (2, go_on(4)), (4, STOP)]
    with atoll.join(net, optimizer) as site:
        while site.running:
            site.step(tokens=10)
    assert [b["step"] for b in node.said("progress")] == [2, 4]


def test_memory_for_checkpoints_is_asked_for_before_they_are_due(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Gigabytes of it take seconds, which pass beside the training then. An optimizer may have no state after its first
    step, where a scaler of gradients left that out."""
    did: list[tuple[str, int]] = []
    steps: list[int] = []
    net, _ = model()
    optimizer = torch.optim.AdamW(net.parameters())
    monkeypatch.setattr(join_module, "connect", lambda: node.connection(replace(SETTINGS, checkpoint_every=8)))
    monkeypatch.setattr(LocalCheckpoints, "prepare", lambda checkpoints: did.append(("prepare", len(steps))))
    monkeypatch.setattr(LocalCheckpoints, "prepare_more", lambda checkpoints: did.append(("more", len(steps))))
    monkeypatch.setattr(LocalCheckpoints, "write", lambda checkpoints, step, run_step: did.append(("write", step)))
    node.checkpoint_folder = str(tmp_path)
    node.script = [first(12), (12, STOP)]
    with atoll.join(net, optimizer) as site:
        while site.running:
            train(net, optimizer)
            steps.append(len(steps))
            site.step(tokens=1)
    due = {1: "prepare", 4: "prepare", 8: "write", 9: "prepare", 12: "prepare"}
    assert did == [(due.get(step, "more"), step) for step in range(1, 13)]


def test_what_a_rank_shares_is_given_back_when_it_leaves(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedTensors, "close", lambda shared: node.told.append(("unregistered", {})))
    node.script = [first(1), (1, STOP)]
    net, optimizer = model()
    with atoll.join(net, optimizer) as site:
        train(net, optimizer)
        site.step(tokens=1)
    assert [what for what, _ in node.told[-3:]] == ["goodbye", "unregistered", "close"]


def test_progress_tells_what_became_of_checkpoints(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Prompt(LocalCheckpoints):
        def write(self, step: int, run_step: int) -> None:
            super().write(step, run_step)
            self.finish()

    monkeypatch.setattr(joined_site, "LocalCheckpoints", Prompt)
    monkeypatch.setattr(join_module, "connect", lambda: node.connection(replace(SETTINGS, checkpoint_every=1)))
    node.checkpoint_folder = str(tmp_path / "optimizer")
    net, _ = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
    node.script = [first(2), (2, SNAPSHOT), (2, go_on(4)), (4, STOP)]
    with atoll.join(net, optimizer) as site:
        while site.running:
            train(net, optimizer)
            site.step(tokens=10)
    assert [b["checkpoints"] for b in node.said("progress")] == [
        CheckpointCounts(written=2),
        CheckpointCounts(written=4),
    ]


def test_an_optimizer_that_cannot_be_kept_is_said(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no optimizer over its own part before DDP has built its buckets."""

    monkeypatch.setattr(join_module, "connect", lambda: node.connection(replace(SETTINGS, checkpoint_every=1)))
    node.checkpoint_folder = str(tmp_path / "optimizer")
    net, _ = model()
    node.script = [first(1), (1, STOP)]
    with rank_of_two(0):
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1.0)
        with atoll.join(net, optimizer) as site:
            site.step(tokens=10)
    assert "atoll: no checkpoints are written of ZeroRedundancyOptimizer(overlap" in capsys.readouterr().err
    assert not (tmp_path / "optimizer").exists()


def test_the_first_step_with_a_restored_optimizer_is_told_at_once(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_module, "connect", lambda: node.connection(replace(SETTINGS, checkpoint_every=2)))
    node.checkpoint_folder = str(tmp_path / "optimizer")
    for _ in range(2):
        net, _ = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
        node.script = [first(3), (3, STOP)]
        with atoll.join(net, optimizer) as site:
            while site.running:
                train(net, optimizer)
                site.step(tokens=10)
    assert [b["step"] for b in node.said("progress")] == [3, 1, 3]


def test_the_loss_stays_where_it_is_until_a_boundary(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = model()
    node.script = [first(3), (3, SNAPSHOT), (3, STOP)]
    read: list[int] = []

    class Watched(torch.Tensor):
        def tolist(self) -> list[float]:
            read.append(site.inner_step)
            values: list[float] = self.as_subclass(torch.Tensor).tolist()
            return values

    with atoll.join(net, optimizer) as site:
        for _ in range(3):
            loss = train(net, optimizer)
            site.step(tokens=1, loss=loss.as_subclass(Watched))
            if site.running:
                kept = site._losses._rest[-1]  # type: ignore[attr-defined]
                assert isinstance(kept, Watched)
                assert not kept.requires_grad  # keeps no graph
    assert read == [3]
    assert node.said("sealed")[0]["loss_sum"] == 0.0 - 2.0 - 4.0


def test_a_loader_that_ends_early_leaves_properly(node: FakeNode) -> None:
    net, optimizer = model()
    node.script = [first(9)]
    with atoll.join(net, optimizer) as site:
        site.step(tokens=1)
    assert node.said("goodbye") == [{"run_over": False}]


def test_exceptions_pass_and_only_incurable_ones_are_fatal(node: FakeNode) -> None:
    net, optimizer = model()
    node.script = [first(9)]
    with pytest.raises(ZeroDivisionError), atoll.join(net, optimizer):
        raise ZeroDivisionError
    assert not node.said("fatal")  # a crash: the closed socket says it
    assert not node.said("goodbye")
    with pytest.raises(ConfigError, match="requires_grad"):
        atoll.join(net, [])
    assert node.said("fatal")[0]["kind"] == "config"
    node.script = [first(9)]
    with atoll.join(net, optimizer) as site, pytest.raises(ConfigError, match="shape"):
        site.step(tokens=1, loss=torch.zeros(3))


def test_outer_parameters(node: FakeNode) -> None:
    net, optimizer = model()
    node.script = [first(1), (1, go_on(2)), (2, apply(SHIFT, 3)), (3, STOP)]
    with atoll.join(net, optimizer) as site:
        site.step(tokens=1, loss=train(net, optimizer))
        assert net.weight.tolist() == [[-1.0, -1.0]]
        with site.outer_parameters():
            assert net.weight.tolist() == [[0.0, 0.0]]
        assert net.weight.tolist() == [[-1.0, -1.0]]
        with pytest.raises(RuntimeError), site.outer_parameters():
            raise RuntimeError
        assert net.weight.tolist() == [[-1.0, -1.0]]
        site.step(tokens=1, loss=train(net, optimizer))
        assert not site.has_outer_parameters  # PUBLISH holds a difference
        with pytest.raises(NotYetError, match="next sync"), site.outer_parameters():
            pass


def test_outer_parameters_cannot_be_read_while_they_change(node: FakeNode) -> None:
    """From the answer that says so to the values: the node writes PUBLISH while this rank trains."""
    net, optimizer = model()
    changes = replace(go_on(4), version=1)
    node.script = [first(2), (2, SNAPSHOT), (2, go_on(3)), (3, changes), (4, apply(MERGE, 9, version=1)), (9, STOP)]
    with atoll.join(net, optimizer) as site:
        for step, may in ((1, True), (2, True), (3, False), (4, True)):
            site.step(tokens=1, loss=train(net, optimizer))
            assert site.has_outer_parameters == may, step
            if not may:
                with pytest.raises(NotYetError, match="just changing"), site.outer_parameters():
                    pass


@pytest.mark.parametrize("mode", [MERGE, MIX])
def test_steps_beyond_the_snapshot_count_for_the_next_sync(node: FakeNode, mode: MergeMode) -> None:
    """Steps of the run, tokens, losses and time go on where the snapshot ended, whatever the merge."""
    net, optimizer = model()
    node.script = [
        first(2, run_step=100),
        (2, SNAPSHOT),
        (2, go_on(3)),
        (3, apply(mode, 4, run_step=102, version=1)),
        (4, SNAPSHOT),
        (4, STOP),
    ]
    seen = []
    with atoll.join(net, optimizer) as site:
        for _ in range(4):
            seen.append(site.step(tokens=3, loss=train(net, optimizer)))
    assert [s.inner_step for s in seen] == [101, 102, 103, 104], "no step of a schedule twice or never"
    assert [s.synced for s in seen] == [False, False, True, False]
    reports = node.said("sealed")
    assert [(r["tokens"], r["num_steps"]) for r in reports] == [(6, 2), (6, 2)]


def test_busy_is_told_and_ended(node: FakeNode) -> None:
    net, optimizer = model()
    node.script = [first(9)]
    with atoll.join(net, optimizer) as site, pytest.raises(RuntimeError), site.busy("evaluation", limit_s=5):
        raise RuntimeError
    assert node.said("busy") == [{"what": "evaluation", "limit_s": 5}, {"what": "", "limit_s": 0.0}]


@pytest.mark.parametrize("limit_s", [math.inf, math.nan, -1.0])
def test_busy_needs_a_limit(node: FakeNode, limit_s: float) -> None:
    """The node would cut the rank off, and start new workers that say the same."""
    net, optimizer = model()
    node.script = [first(9)]
    with atoll.join(net, optimizer) as site, pytest.raises(ConfigError, match="limit_s"), site.busy("all", limit_s):
        pass
    assert node.said("busy") == []


def test_busy_within_busy_goes_back_to_the_outer_one(node: FakeNode) -> None:
    net, optimizer = model()
    node.script = [first(5)]
    with atoll.join(net, optimizer) as site, site.busy("evaluation", limit_s=500), site.busy("checkpoint", limit_s=50):
        pass
    said = node.said("busy")
    assert [b["what"] for b in said] == ["evaluation", "checkpoint", "evaluation", ""]
    assert 400 < said[2]["limit_s"] <= 500, "what is left of it"


def test_steps_within_busy_leave_no_time_that_is_negative(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(joined_site, "time", SimpleNamespace(monotonic=lambda: now_s))
    net, optimizer = model()
    node.script = [first(1), (1, SNAPSHOT), (1, go_on(2)), (2, SNAPSHOT), (2, STOP)]
    with atoll.join(net, optimizer) as site:
        with site.busy("compiling"):
            now_s += 60
            site.step(tokens=10)  # a boundary
            now_s += 5
        now_s += 2
        site.step(tokens=10)
    assert [b["train_s"] for b in node.said("sealed")] == [60, 2]


@pytest.mark.parametrize("num_data_ranks", [1, 2])
def test_run_length_in_tokens_is_estimated(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, num_data_ranks: int
) -> None:
    """Ranks that share a batch see its tokens once."""
    node.num_readers = num_data_ranks
    settings = replace(SETTINGS, steps=0, tokens=3000, min_sites=3)
    monkeypatch.setattr(join_module, "connect", lambda: node.connection(settings))
    net, optimizer = model()
    node.script = [first(1), (1, replace(apply(REPLACE, 9, run_step=1), run_tokens=60))]
    with atoll.join(net, optimizer) as site:
        assert site.run_length == 3000
        site._steps, site._tokens = 1, 10  # before the first commit: three sites like this one
        assert site.run_length == 100 / num_data_ranks
        site._steps = 0
        site.step(tokens=10)
        assert site.run_length == 50  # 60 tokens a step, as the run really went
        assert site.run_share == 60 / 3000
        site._tokens += 10  # a step after the commit, of three sites like this one
        assert site.run_share == (60 + 10 * num_data_ranks * 3) / 3000
        site._base_run_tokens, site._base_run_step = 63, 1
        site._base = site._base._replace(tokens=site._tokens)
        assert site.run_length == 50, "a site was slower: so little of a change is none for a schedule"
        assert site.run_share == (60 + 10 * num_data_ranks * 3) / 3000, "it does not fall"
        site._base_run_tokens = 120
        assert site.run_length == 25
        assert site.run_share == max(120, 60 + 10 * num_data_ranks * 3) / 3000
        site._run_length = 6000  # by an operator
        assert site.run_length == 50


# --- the learning-rate ramp


def rates_seen(optimizer: torch.optim.Optimizer) -> list[float]:
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(float(o.param_groups[0]["lr"])))
    return seen


@pytest.mark.parametrize("as_tensor", [False, True])
def test_ramp_beside_a_scheduler(node: FakeNode, as_tensor: bool) -> None:
    """Only optimizer.step sees scaled rates; the scheduler's own sequence is undisturbed, and nothing stays behind."""
    net, _ = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(1.0) if as_tensor else 1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    node.script = [first(99, run_step=500)]
    with atoll.join(net, optimizer, ramp_steps=3) as site:
        seen = rates_seen(optimizer)
        between = []
        for _ in range(5):
            train(net, optimizer)
            between.append(float(optimizer.param_groups[0]["lr"]))
            scheduler.step()
            site.step(tokens=1)
    assert between == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert seen == pytest.approx([0.25, 0.5 * 0.5, 0.25 * 0.75, 0.125, 0.0625])
    assert len(optimizer._optimizer_step_pre_hooks) == 1  # the one of this test
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize(("run_step", "ramp_steps"), [(0, 3), (500, 0)])
def test_no_ramp_at_the_start_of_a_run_or_when_off(node: FakeNode, run_step: int, ramp_steps: int) -> None:
    net, optimizer = model()
    node.script = [first(99, run_step=run_step)]
    with atoll.join(net, optimizer, ramp_steps=ramp_steps):
        seen = rates_seen(optimizer)
        train(net, optimizer)
    assert seen == [1.0]


def test_an_optimizer_from_a_checkpoint_needs_no_ramp_until_the_loss_is_not_finite(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.checkpoint_folder = str(tmp_path)
    monkeypatch.setattr(join_module, "connect", lambda: node.connection(replace(SETTINGS, checkpoint_every=2)))

    def begin() -> tuple[nn.Linear, torch.optim.Optimizer]:
        net, _ = model()
        return net, torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)

    net, optimizer = begin()
    node.script = [first(99, run_step=500)]
    with atoll.join(net, optimizer, ramp_steps=3) as site:
        for _ in range(2):
            train(net, optimizer)
            site.step(tokens=1)
    assert len(list(tmp_path.iterdir())) == 1
    net, optimizer = begin()
    node.script = [first(2, run_step=500), (2, SNAPSHOT)]

    def go_on() -> None:
        with atoll.join(net, optimizer, ramp_steps=3) as site:
            (state,) = optimizer.state.values()
            assert state["momentum_buffer"].tolist() == [[1.5, 1.5]]
            seen = rates_seen(optimizer)
            train(net, optimizer)
            assert seen == [1.0]
            site.step(tokens=1, loss=math.nan)
            with torch.no_grad():
                net.weight.fill_(math.nan)
            train(net, optimizer)
            site.step(tokens=1)

    with pytest.raises(NonFiniteError, match="'weight' is not finite since"):
        go_on()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_step_that_raises_within_the_ramp_does_not_keep_its_learning_rate(node: FakeNode, goes_on: bool) -> None:
    """Of a script that catches it, when memory was too small for this batch, and leaves the batch out."""
    net, optimizer = model()
    node.script = [first(99, run_step=500)]

    def fail(*_: object) -> None:
        raise MemoryError

    with atoll.join(net, optimizer, ramp_steps=3):
        too_large = optimizer.register_step_pre_hook(fail)
        with pytest.raises(MemoryError):
            train(net, optimizer)
        too_large.remove()
        if goes_on:
            seen = rates_seen(optimizer)
            train(net, optimizer)
            assert seen == [0.25]
    assert [group["lr"] for group in optimizer.param_groups] == [1.0]


def test_the_ramp_is_gone_when_the_site_ends_within_it(node: FakeNode) -> None:
    net, optimizer = model()
    node.script = [first(99, run_step=500)]
    with atoll.join(net, optimizer):
        assert optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_the_reason_of_a_crash_is_said_before_a_checkpoint_is_waited_for(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk may be so slow that the node ends the rank first, for a hang."""
    node.checkpoint_folder = str(tmp_path)
    monkeypatch.setattr(join_module, "connect", lambda: node.connection(replace(SETTINGS, checkpoint_every=1)))
    node.script = [first(9)]
    net, _ = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
    reading, writing = os.pipe()
    finish = LocalCheckpoints.finish
    said: list[str] = []

    def watched(checkpoints: LocalCheckpoints) -> None:
        said.append(capsys.readouterr().err)
        os.write(writing, b"the disk goes on")
        finish(checkpoints)

    monkeypatch.setattr(LocalCheckpoints, "finish", watched)

    def go_on() -> None:
        with atoll.join(net, optimizer) as site:
            train(net, optimizer)
            site.step(tokens=1)
            raise ZeroDivisionError("in the second step")

    with monkeypatch.context() as slow:
        slow.setattr(os, "fsync", lambda descriptor: os.read(reading, 1))
        with pytest.raises(ZeroDivisionError):
            go_on()
    os.close(reading)
    os.close(writing)
    assert "ZeroDivisionError: in the second step" in said[0]
    assert "Traceback" in said[0]


@pytest.mark.parametrize("late", ["unfrozen", "added"])
def test_a_parameter_that_is_trained_only_after_join_is_refused(node: FakeNode, late: str) -> None:
    """It would be in no average: the sites would drift apart in silence."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    if late == "unfrozen":
        net[1].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    node.script = [first(1), (1, SNAPSHOT)]
    with atoll.join(net, optimizer) as site:
        if late == "unfrozen":
            net[1].requires_grad_(True)
        else:
            net.append(nn.Linear(1, 1))
            optimizer.add_param_group({"params": net[2].parameters()})
        name = r"1\.bias|1\.weight" if late == "unfrozen" else r"2\.bias|2\.weight"
        with pytest.raises(ConfigError, match=f"'({name})'.*after atoll.join"):
            site.step(tokens=1)
    assert not node.said("sealed")


class Teaching(nn.Module):
    """A student that is trained, and a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(2, 1, bias=False)
        self.teacher = nn.Linear(2, 1, bias=False).requires_grad_(False)
        self.other = nn.Linear(3, 3).requires_grad_(False)


@pytest.mark.parametrize("how", ["in place", "through data"])
def test_a_frozen_parameter_that_the_script_changes_is_refused(node: FakeNode, how: str) -> None:
    """A restart would put its first values back, and no other site has the new ones."""
    net = Teaching()
    optimizer = torch.optim.SGD(net.student.parameters(), lr=0.1)

    def as_seeded() -> Answer:
        node.publish[:] = node.snapshot
        return apply(REPLACE, 1, fresh=True)

    node.script = [(0, SNAPSHOT), (0, as_seeded), (1, SNAPSHOT), (1, go_on(2)), (2, SNAPSHOT)]
    with atoll.join(net, optimizer) as site:
        with torch.no_grad():
            net.teacher.weight.mul_(1.0)  # written to, and the same
        site.step(tokens=1)
        with torch.no_grad():
            teacher = net.teacher.weight if how == "in place" else net.teacher.weight.data
            teacher.lerp_(net.student.weight, 0.001)
        with pytest.raises(ConfigError, match=r"'teacher\.weight' is frozen .*changed it since"):
            site.step(tokens=1)
    assert len(node.said("sealed")) == 2


def test_frozen_parameters_that_differ_from_the_runs_are_said(
    node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were never this script's: a joiner may come with other first values."""
    net = Teaching()
    node.script = [first(1), (1, SNAPSHOT), (1, go_on(2)), (2, STOP)]
    with atoll.join(net, torch.optim.SGD(net.student.parameters(), lr=0.1)) as site:
        said = capsys.readouterr().err
        site.step(tokens=1)
        site.step(tokens=1)
    assert not net.teacher.weight.any()
    assert said == (
        "atoll: 3 frozen tensors took the run's values, which differed from this script's; the first is 'other.bias'\n"
    )


def test_a_buffer_without_a_mean_is_said_when_the_site_joins(
    node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    net, optimizer = model()
    net.register_buffer("mask", torch.full((2,), -math.inf))
    node.script = [first(1), (1, STOP)]
    with atoll.join(net, optimizer) as site:
        site.step(tokens=1)
    said = capsys.readouterr().err
    assert "the buffer 'mask' holds values that are not finite" in said
    assert 'atoll.join(..., buffers={"mask": "local"})' in said


def test_all_frozen_bytes_are_compared_in_turn(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells of a write through `.data`: with a look at one tensor a boundary, the third finds the third."""
    monkeypatch.setattr(frozen, "LOOK_BYTES", 1)
    net = Teaching()

    def changed() -> Answer:
        net.teacher.weight.data[0, 1] = math.nan
        return apply(REPLACE, 1, fresh=False)

    node.script = [first(0), (0, changed), (1, SNAPSHOT), (1, go_on(2)), (2, SNAPSHOT), (2, go_on(3)), (3, SNAPSHOT)]
    with atoll.join(net, torch.optim.SGD(net.student.parameters(), lr=0.1)) as site:
        site.step(tokens=1)
        site.step(tokens=1)
        with pytest.raises(ConfigError, match=r"'teacher\.weight' is frozen"):
            site.step(tokens=1)


# --- without a node


def test_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("ATOLL_SOCKET", raising=False)
    net, optimizer = model()
    with atoll.join(net, optimizer) as site:
        assert type(site) is Site
        assert (site.seed, site.inner_step, site.run_length, site.evaluates) == (0, 0, None, True)
        assert site.step(tokens=5, loss=train(net, optimizer)) == Step(True, False, 1)
        with site.outer_parameters(), site.busy("evaluation"):
            assert net.weight.tolist() == [[0.0, 0.0]]
    out = capsys.readouterr()
    assert out.err.count("\n") == 1
    assert "trains alone" in out.err
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    second = atoll.join(net, optimizer)
    assert (second.world, second.evaluates) == (2, False), "one rank evaluates for all"
    assert capsys.readouterr().err == ""  # rank 0 says it
