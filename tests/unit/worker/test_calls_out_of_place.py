"""Calls of a script that would be lost or wrong without a word: they are refused by name, or said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import atoll
from atoll.node.core.events import MergeMode
from atoll.node.worker.site import Site
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import RunSettings
from tests.harness.fake_node import FakeNode, apply, go_on, in_memory

OF_OUTER = r"site.step was called within site.outer_parameters\(\)"
NO_TOKENS = r"site.step got no tokens: .* site.step\(tokens=batch.numel\(\), loss=loss\)"


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    node = in_memory(monkeypatch, RunSettings(run_id="r", steps=100))
    node.script = [(0, apply(MergeMode.REPLACE, 9, run_step=40, fresh=True)), (9, go_on(99))]
    return node


def model() -> tuple[nn.Linear, torch.optim.SGD]:
    net = nn.Linear(2, 1, bias=False)
    return net, torch.optim.SGD(net.parameters(), lr=1.0)


def train(net: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_step_of_an_optimizer_within_outer_parameters_is_refused_and_later_ones_are_not(node: FakeNode) -> None:
    net, optimizer = model()
    with atoll.join(net, optimizer) as site:
        train(net, optimizer)
        site.step(tokens=1)
        before = net.weight.tolist()
        with (
            pytest.raises(ConfigError, match=r"SGD.step was called within site.outer_parameters\(\)"),
            site.outer_parameters(),
        ):
            train(net, optimizer)
        assert net.weight.tolist() == before
        train(net, optimizer)
        assert site.step(tokens=1).inner_step == 42


def test_so_is_a_step_that_is_counted_there(node: FakeNode) -> None:
    net, optimizer = model()
    with atoll.join(net, optimizer) as site:
        train(net, optimizer)
        with pytest.raises(ConfigError, match=OF_OUTER), site.outer_parameters():
            site.step(tokens=1)
        assert site.inner_step == 40
    with pytest.raises(ConfigError, match=OF_OUTER), Site() as alone, alone.outer_parameters():
        alone.step(tokens=1)


def test_a_step_without_tokens_says_what_to_give(node: FakeNode) -> None:
    net, optimizer = model()
    with pytest.raises(ConfigError, match=NO_TOKENS), atoll.join(net, optimizer) as site:
        site.step()
    assert node.said("fatal")[0]["kind"] == "config", "it is not started again"
    with pytest.raises(ConfigError, match=NO_TOKENS):
        Site().step(loss=1.0)


def test_what_is_logged_after_the_site_has_left_is_said_to_be_lost(
    node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    net, optimizer = model()
    with atoll.join(net, optimizer) as site:
        train(net, optimizer)
        site.step(tokens=1)
        site.log({"loss": 1.0})
    assert [len(said["values"]) for said in node.said("logged")] == [1]
    for _ in range(2):
        site.log({"val_loss": 2.0, "lr": 1})
    assert len(node.said("logged")) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if "site.log" in line]
    assert said == [
        "atoll: site.log was called after this site has left its run, so nobody hears of val_loss, lr: log before"
    ]
