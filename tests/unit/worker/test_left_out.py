"""Steps that are left out where the nodes do them, against a node in memory: nothing of one is averaged, and training
goes on; so many in a row end the site."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.node.core.events import MergeMode
from atoll.protocol.errors import ConfigError, NonFiniteError
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.fake_node import SNAPSHOT, STOP, FakeNode, apply, go_on, in_memory

SETTINGS = RunSettings(
    run_id="r",
    steps=100,
    outer=OuterSettings(optimizer="adamw", momentum=0.9),
    sync=SyncSettings(strategy="gradient", every=1),
)
BAD = 1
"""The step that is."""


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    node = in_memory(monkeypatch, SETTINGS)
    node.script = [(0, apply(MergeMode.REPLACE, 1, fresh=True))]
    for step in range(1, 4):
        node.script += [(step, SNAPSHOT), (step, go_on(step + 1) if step < 3 else STOP)]
    return node


def train(node: FakeNode, how: str, num_bad: int = 1, max_skipped: int = 32) -> list[Tensor]:
    """Three steps. What SNAPSHOT has of the weight after each."""
    net = nn.Linear(2, 1, bias=False)
    optimizer = atoll.AdamW(net.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=how == "scaler")
    handed_in = []
    with atoll.join(net, optimizer, data_fingerprint=b"f" * 32, max_skipped=max_skipped) as site:
        for step in range(3):
            is_bad = BAD <= step < BAD + num_bad
            loss = net(torch.ones(1, 2)).sum()
            scaler.scale(loss).backward()
            if is_bad and how in ("gradient", "guard", "scaler"):
                assert net.weight.grad is not None
                net.weight.grad[0, 1] = math.nan
            if not (is_bad and how == "guard"):
                scaler.step(optimizer)
            scaler.update()
            site.step(tokens=10, loss=math.inf if is_bad and how == "loss" else 0.5)
            handed_in.append(torch.from_numpy(node.values(node.snapshot, "weight").copy()))
            if how != "loss" or not is_bad:
                assert net.weight.grad is None, "what is not finite is not added to"
    return handed_in


@pytest.mark.parametrize("how", ["gradient", "guard", "scaler", "loss"])
def test_a_step_that_is_not_finite_is_left_out_and_said(
    node: FakeNode, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """Whoever finds it: the optimizer, a script that calls no step then, a GradScaler, or the loss."""
    handed_in = train(node, how)
    assert torch.equal(handed_in[0], torch.ones(2))
    assert torch.equal(handed_in[1], torch.zeros(2))
    assert torch.equal(handed_in[2], torch.ones(2))
    sealed = node.said("sealed")
    assert [report["tokens"] for report in sealed] == [10, 0, 10]
    assert [report["skipped_steps"] for report in sealed] == [(), (2,), ()]
    assert [report["rates"] for report in sealed] == [(0.5, 0.01)] * 3
    why = {"gradient": "a gradient is not finite", "loss": "its loss is not finite"}.get(how, "atoll.AdamW did no step")
    assert f"is left out on rank 0, as {why}: nothing of it is averaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("gradient", NonFiniteError, "left out 2 steps in a row, the last one as a gradient is not finite"),
        ("guard", ConfigError, r"left out 2 steps in a row, the last one as atoll\.AdamW did no step"),
        ("loss", NonFiniteError, "left out 2 steps in a row, the last one as its loss is not finite"),
    ],
)
def test_so_many_in_a_row_end_the_site(node: FakeNode, how: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        train(node, how, num_bad=2, max_skipped=2)


def test_microbatches_are_added_up_and_calls_without_a_step_that_go_on_are_an_error(node: FakeNode) -> None:
    net = nn.Linear(2, 1, bias=False)
    optimizer = atoll.AdamW(net.parameters(), lr=0.5)
    node.script = [(0, apply(MergeMode.REPLACE, 4, fresh=True)), (4, SNAPSHOT), (4, go_on(1000))]
    num_calls = 0
    with atoll.join(net, optimizer, data_fingerprint=b"f" * 32) as site:

        def go() -> None:
            nonlocal num_calls
            while True:
                net(torch.ones(1, 2)).sum().backward()
                num_calls += 1
                if num_calls % 4 == 0:
                    optimizer.step()
                site.step(tokens=10)

        with pytest.raises(ConfigError, match="in 33 of them an optimizer had done no step"):
            go()
    assert torch.equal(torch.from_numpy(node.values(node.snapshot, "weight").copy()), torch.full((2,), 4.0))
    assert num_calls == 43


def test_an_empty_gradient_is_finite(node: FakeNode) -> None:
    """As a rank's shard of a small tensor is."""
    net = nn.Linear(2, 1, bias=False)
    net.empty = nn.Parameter(torch.empty(0, 2))
    optimizer = atoll.AdamW(net.parameters(), lr=0.5)
    node.script = [(0, apply(MergeMode.REPLACE, 1, fresh=True)), (1, SNAPSHOT), (1, STOP)]
    with atoll.join(net, optimizer, data_fingerprint=b"f" * 32) as site:
        (net(torch.ones(1, 2)).sum() + net.empty.sum()).backward()
        optimizer.step()
        site.step(tokens=10)
    (sealed,) = node.said("sealed")
    assert (sealed["tokens"], sealed["skipped_steps"]) == (10, ())


def test_a_step_that_was_left_out_before_a_commit_is_not_of_the_next_snapshot(node: FakeNode) -> None:
    node.script = [
        (0, apply(MergeMode.REPLACE, 2, fresh=True)),
        (2, apply(MergeMode.REPLACE, 3, run_step=1, version=1)),
        (3, SNAPSHOT),
        (3, STOP),
    ]
    train(node, "gradient")
    (sealed,) = node.said("sealed")
    assert (sealed["tokens"], sealed["skipped_steps"]) == (10, ())


def test_a_loss_that_is_no_scalar_is_refused_by_what_to_give(node: FakeNode) -> None:
    net = nn.Linear(2, 1, bias=False)
    optimizer = atoll.AdamW(net.parameters(), lr=0.5)
    with atoll.join(net, optimizer, data_fingerprint=b"f" * 32) as site:
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with pytest.raises(ConfigError, match="give a plain scalar"):
            site.step(tokens=10, loss=torch.ones(4))


def test_a_script_that_trains_on_after_the_run_ends_well(node: FakeNode) -> None:
    """As one does that leaves its inner loop alone when the run is over."""
    net = nn.Linear(2, 1, bias=False)
    optimizer = atoll.AdamW(net.parameters(), lr=0.5)

    def backward() -> None:
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with atoll.join(net, optimizer, data_fingerprint=b"f" * 32) as site:
        for step in range(6):
            backward()
            assert site.step(tokens=10, loss=0.5).running == (step < 2)
        assert len(node.said("sealed")) == 3
    before = net.weight.detach().clone()
    for _ in range(2):
        backward()
    assert not torch.equal(net.weight, before)
    assert [body["run_over"] for body in node.said("goodbye")] == [True]
    assert not node.said("fatal")
