"""How long the learning rate rises, and that it does so again after a long absence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import atoll
from atoll.node.core.events import MergeMode
from atoll.node.worker.ramp import num_ramp_steps
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import RunSettings
from tests.harness.fake_node import SNAPSHOT, apply, in_memory


def adam(*betas: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(1))], "betas": (0.9, beta)} for beta in betas])


def test_it_follows_beta2() -> None:
    assert num_ramp_steps("beta2", [adam(0.95), adam(0.99, 0.9)]) == 200
    assert num_ramp_steps("beta2", [adam(0.95)]) == 40
    assert num_ramp_steps("beta2", [adam(0.999)]) == 2000
    assert num_ramp_steps(7, [adam(0.95)]) == 7
    with pytest.raises(ConfigError, match="SGD has none"):
        num_ramp_steps("beta2", [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)])
    with pytest.raises(ConfigError, match="-1; choose"):
        num_ramp_steps(-1, [])


def rates_of(site: atoll.Site, net: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    """What the optimizer's steps see."""
    seen: list[float] = []
    for _ in range(num_steps):
        net(torch.ones(1, 2)).sum().backward()
        # Hooks run in the order in which they came: this one behind that of the ramp.
        look = optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        look.remove()
        site.step(tokens=1)
    return seen


@pytest.mark.parametrize(("missed", "rates"), [(4, [1.0, 1.0, 1.0]), (5, [0.2, 0.4, 0.6])])
def test_it_comes_again_when_the_run_went_on_without_this_site(
    monkeypatch: pytest.MonkeyPatch, missed: int, rates: list[float]
) -> None:
    """Two windows of two steps that count, then a commit that is so many more steps on: more than the four of the
    ramp, or not."""
    node = in_memory(monkeypatch, RunSettings(run_id="r", steps=99))
    node.script = [
        (0, apply(MergeMode.REPLACE, 2, fresh=True)),
        (2, SNAPSHOT),
        (2, apply(MergeMode.REPLACE, 4, run_step=2, version=1)),
        (4, SNAPSHOT),
        (4, apply(MergeMode.REPLACE, 9, run_step=4 + missed, version=5)),
    ]
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    site = atoll.join(net, optimizer, ramp_steps=4)
    assert rates_of(site, net, optimizer, 7) == pytest.approx([1.0] * 4 + rates)


@pytest.mark.parametrize(("run_step", "rates"), [(7, [1.0] * 3), (46, [1.0] * 3), (47, [0.2, 0.4, 0.6])])
def test_it_comes_again_where_the_run_is_far_beyond_the_checkpoint_of_new_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_step: int, rates: list[float]
) -> None:
    """The optimizer that they come back with is of step 42 of the run, which has gone on by more than the four steps of
    the ramp, or not, or has gone back."""
    node = in_memory(monkeypatch, RunSettings(run_id="r", steps=99, checkpoint_every=2))
    node.checkpoint_folder = str(tmp_path)

    def start(run_step: int) -> tuple[atoll.Site, nn.Linear, torch.optim.Optimizer]:
        node.script = [(0, apply(MergeMode.REPLACE, 9, run_step=run_step, version=1, fresh=True))]
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
        return atoll.join(net, optimizer, ramp_steps=4), net, optimizer

    site, net, optimizer = start(40)
    rates_of(site, net, optimizer, 2)
    site.close()
    site, net, optimizer = start(run_step)
    assert optimizer.state, "restored"
    assert rates_of(site, net, optimizer, 3) == pytest.approx(rates)
