"""Losses that are not finite: their steps are left out and counted. Many in a row, or one in the parameters, end it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import atoll
from atoll.node.core.events import MergeMode
from atoll.node.worker.losses import FOLD_EVERY, Losses
from atoll.protocol.errors import ConfigError, NonFiniteError, ScriptNonFinite
from atoll.protocol.settings import RunSettings
from tests.harness.fake_node import SNAPSHOT, STOP, FakeNode, apply, go_on, in_memory

NAN, INF = math.nan, math.inf


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    node = in_memory(monkeypatch, RunSettings(run_id="r", steps=100, checkpoint_every=1))
    node.script = [(0, apply(MergeMode.REPLACE, 3, run_step=20, fresh=True)), (3, SNAPSHOT), (3, go_on(6))]
    return node


def run(losses: list[float], max_skipped: int = 32, bad_weight_at: int = -1) -> None:
    """Of a script that does a step whatever its loss is."""
    net = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with atoll.join(net, optimizer, max_skipped=max_skipped) as site:
        for number, loss in enumerate(losses):
            net.weight.grad = torch.full_like(net.weight, NAN if number == bad_weight_at else 0.1)
            optimizer.step()
            site.step(tokens=1, loss=torch.tensor(loss))


def test_a_step_with_a_loss_that_is_not_finite_is_left_out_counted_and_said(
    node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.checkpoint_folder = str(tmp_path)
    counted: list[int] = []
    monkeypatch.setattr("atoll.node.worker.readings.of_this_rank", lambda tokens, skipped=0: counted.append(skipped))
    node.script += [(6, SNAPSHOT), (6, STOP)]
    run([1.0, NAN, 3.0, INF, NAN, NAN])
    first, second = node.said("sealed")
    assert (first["loss_sum"], first["num_steps"], first["tokens"]) == (2.0 * 3, 3, 3)
    assert (second["loss_sum"], second["num_steps"], second["tokens"]) == (0.0, 0, 6), "no loss at all"
    assert not node.said("fatal")
    said = capsys.readouterr().err
    assert "the loss on rank 0 is not finite at 1 of the steps 21 to 23, first at 22, at most 1 in a row" in said
    assert "not finite at 3 of the steps 24 to 26, first at 24, at most 3 in a row; they are left out" in said
    assert list(tmp_path.iterdir()), "its checkpoints stay"
    assert counted[-1] == 1, "as the last report before the second boundary says"


def test_so_many_in_a_row_end_the_site_also_over_a_boundary(node: FakeNode, tmp_path: Path) -> None:
    node.checkpoint_folder = str(tmp_path)
    node.script += [(6, SNAPSHOT)]
    with pytest.raises(
        NonFiniteError, match=r"at 2 of the steps 24 to 26, 4 in a row \(atoll.join\(..., max_skipped=4\)"
    ):
        run([1.0, NAN, NAN, NAN, NAN, 1.0], max_skipped=4)
    (fatal,) = node.said("fatal")
    assert fatal["kind"] == "non_finite"
    assert len(node.said("sealed")) == 1
    assert node.told[-1][0] == "close"
    assert list(tmp_path.iterdir()), "the parameters are finite, and so are the checkpoints"


def test_a_row_that_ends_is_over(node: FakeNode) -> None:
    node.script += [(6, SNAPSHOT), (6, STOP)]
    run([1.0, NAN, NAN, 1.0, NAN, NAN], max_skipped=3)
    assert len(node.said("sealed")) == 2


def test_a_step_that_reached_the_parameters_ends_the_site_by_name(node: FakeNode, tmp_path: Path) -> None:
    """At once: what comes after it would be lost, and so is what the optimizer has kept."""
    node.checkpoint_folder = str(tmp_path)
    words = r"finite at 1 of the steps 21 to 23, and 'weight' is not finite since: .* only where the loss"
    with pytest.raises(NonFiniteError, match=words):
        run([1.0, 1.0, NAN], bad_weight_at=2)
    assert not node.said("sealed")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("loss", [NAN, 1.0])
def test_so_many_steps_in_a_row_that_the_script_leaves_out_end_the_site(node: FakeNode, loss: float) -> None:
    """A loss that is not finite is the reason then, and may be a commit's doing."""
    net = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with atoll.join(net, optimizer, max_skipped=3) as site:
        for number in range(8):
            net.weight.grad = torch.full_like(net.weight, 0.1)
            if number in (0, 3):
                optimizer.step()
            elif number == 6:
                with pytest.raises(
                    ConfigError if loss == 1.0 else NonFiniteError, match=r"max_skipped=3\) is the limit"
                ):
                    site.step(tokens=1, loss=loss)
                return
            site.step(tokens=1, loss=loss if number % 3 else 1.0)
            assert site.inner_step == 20 + 1 + (number >= 3)


def test_many_losses_of_a_window_take_little_of_a_device_and_keep_their_order() -> None:
    losses = Losses(0, 2)
    shared = torch.zeros(())
    for number in range(2 * FOLD_EVERY + 3):
        shared.fill_(number)  # a script may use one tensor again and again
        losses.add(shared if number % 5 else float(number), number)
    assert len(losses._rest) == 3
    assert losses.take([]) == FOLD_EVERY + 1
    assert losses.take([]) is None
    with pytest.raises(ConfigError, match="shape \\[2\\]; give a plain scalar"):
        losses.add(torch.ones(2), 1)
    with pytest.raises(ConfigError, match="max_skipped = 0"):
        Losses(0, 0)


@pytest.mark.parametrize(
    ("after", "is_own"),
    [
        ([1.1, 0.9, 1.0, NAN], True),
        ([1.15, 1.15, 1.15, NAN], True),
        ([1.0, 1.0, NAN], False),
        ([NAN], False),
        ([0.9, 1.0, 7.0, NAN], False),
    ],
    ids=["as before", "as far above as losses differ", "too few to tell", "the first one", "rising"],
)
def test_it_may_be_the_scripts_own_where_losses_were_as_before_since_the_last_commit(
    after: list[float], is_own: bool
) -> None:
    losses = Losses(0, 1)
    for step, loss in enumerate([1.0, 0.8, 1.0]):
        losses.add(loss, step)
    losses.take([])
    for step, loss in enumerate([1.0, 1.0, 1.0]):
        losses.add(loss, 3 + step)  # trained while the sync went on
    losses.took_commit()
    for step, loss in enumerate(after):
        losses.add(loss, 6 + step)
    with pytest.raises(NonFiniteError) as caught:
        losses.take([])
    assert isinstance(caught.value, ScriptNonFinite) == is_own
    assert ("losses were as before the last commit: the script may be at fault" in str(caught.value)) == is_own


def test_the_node_hears_that_the_scripts_own_step_has_reached_the_parameters(node: FakeNode, tmp_path: Path) -> None:
    node.checkpoint_folder = str(tmp_path)
    node.script += [(6, SNAPSHOT), (6, apply(MergeMode.REPLACE, 4, run_step=26)), (6, go_on(10)), (10, SNAPSHOT)]
    with pytest.raises(ScriptNonFinite, match="'weight' is not finite since"):
        run([1.0, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 1.0, NAN], bad_weight_at=9)
    (fatal,) = node.said("fatal")
    assert fatal["kind"] == "non_finite_of_script"
    assert not list(tmp_path.iterdir()), "of what is spoiled no checkpoint stays"
