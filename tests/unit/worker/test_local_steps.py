"""Steps that a site does by itself between two commits: 0/1 Adam, against numpy, and under a node in memory."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import atoll
from atoll.node.core.events import Answer, MergeMode
from atoll.node.worker.local_steps import LocalWindow, WindowStart
from atoll.protocol.errors import ConfigError
from atoll.protocol.outer import bias_at
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.devices import DEVICES
from tests.harness.fake_node import SNAPSHOT, STOP, FakeNode, Question, apply, go_on, in_memory

OUTER = OuterSettings(optimizer="adamw", momentum=0.75, beta2=0.5, epsilon=1e-3)
BIAS = (0.9, 0.6)
F32 = npt.NDArray[np.float32]


def a_window(parameter: nn.Parameter, momentum: F32, variance: F32, **group: Any) -> tuple[LocalWindow, dict[str, Any]]:
    moments = {parameter: (torch.from_numpy(momentum), torch.from_numpy(variance))}
    groups = {"params": [parameter], "lr": 0.5, "weight_decay": 0.25, **group}
    return LocalWindow([groups], WindowStart(outer=OUTER, bias=BIAS, moments=moments)), groups


def numbers(seed: int, size: int = 40) -> F32:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_three_steps_are_those_of_numpy(device: str) -> None:
    x, m, v = numbers(1), numbers(2), np.square(numbers(3))
    v[:3] = 0  # never trained: such an element would leap
    before = m, v.copy()
    parameter = nn.Parameter(torch.from_numpy(x.copy()).to(device))
    window, group = a_window(parameter, m, v)
    total: F32 = np.zeros_like(x)
    moved = []
    for step, rate in enumerate((0.5, 0.25, 0.125)):
        group["lr"] = rate
        gradient = numbers(10 + step)
        window.step([group], {parameter: torch.from_numpy(gradient).to(device)}, (group["lr"], group["weight_decay"]))
        m = np.float32(0.75) * m + np.float32(0.25) * gradient
        update = (m / np.float32(BIAS[0])) / (np.sqrt(v / np.float32(BIAS[1])) + np.float32(1e-3))
        moved.append(np.abs(update).max())
        x = x - np.float32(rate) * (update.clip(-1, 1) + np.float32(0.25) * x)
        total = total + np.float32(rate) * m
        np.testing.assert_allclose(parameter.detach().cpu().numpy(), x, rtol=1e-5, atol=1e-6)
    assert min(moved) > 100, "else nothing is held back"
    found = window.contribution(parameter)
    assert found is not None
    np.testing.assert_allclose(found.cpu().numpy(), total / np.float32(0.875), rtol=1e-5, atol=1e-6)
    assert window.rates == (0.875, 0.25)
    assert np.array_equal(before[0], numbers(2)), "what the node shares stays as it is"
    assert np.array_equal(before[1], v)


def test_the_nodes_step_with_the_sum_of_the_rates_is_the_steps_of_the_sites_together() -> None:
    """Without weight decay, and where no element is held back: 0/1 Adam, algorithm 1."""
    x, m, v = numbers(1), numbers(2), np.square(numbers(3)) + np.float32(100)
    parameter = nn.Parameter(torch.from_numpy(x.copy()))
    window, group = a_window(parameter, m, v, weight_decay=0.0)
    for step in range(4):
        group["lr"] = 0.5 / (1 + step)
        window.step([group], {parameter: torch.from_numpy(numbers(10 + step))}, (group["lr"], group["weight_decay"]))
    mean = window.contribution(parameter)
    assert mean is not None
    at_nodes = x - window.rates[0] * (mean.numpy() / BIAS[0]) / (np.sqrt(v / BIAS[1]) + 1e-3)
    np.testing.assert_allclose(parameter.detach().numpy(), at_nodes, rtol=1e-5, atol=1e-6)


def test_the_weight_decay_of_a_window_is_the_mean_by_the_rates() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    window, group = a_window(parameter, numbers(2, 4), np.ones(4, np.float32))
    for rate, decay in ((0.5, 0.0), (0.25, 0.75)):
        group |= {"lr": rate, "weight_decay": decay}
        window.step([group], {parameter: torch.ones(4)}, (group["lr"], group["weight_decay"]))
    assert window.rates == (0.75, 0.25)


def test_a_parameter_without_a_gradient_has_one_of_0_and_another_optimizers_none() -> None:
    parameter, other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    m = numbers(2, 4)
    window, group = a_window(parameter, m, np.ones(4, np.float32))
    window.step([group], {}, (group["lr"], group["weight_decay"]))
    found = window.contribution(parameter)
    assert found is not None
    np.testing.assert_allclose(found.numpy(), 0.75 * m, rtol=1e-6)
    assert window.contribution(other) is None


def test_where_all_rates_are_0_nothing_moves_and_the_last_momentum_is_sent() -> None:
    parameter = nn.Parameter(torch.ones(4))
    window, group = a_window(parameter, numbers(2, 4), np.ones(4, np.float32), lr=0.0)
    for _ in range(2):
        window.step([group], {parameter: torch.ones(4)}, (group["lr"], group["weight_decay"]))
    m = 0.75 * (0.75 * numbers(2, 4) + 0.25) + 0.25
    found = window.contribution(parameter)
    assert found is not None
    np.testing.assert_allclose(found.numpy(), m, rtol=1e-6)
    assert torch.equal(parameter, torch.ones(4))
    assert window.rates == (0.0, 0.25)


def test_values_in_bf16_are_moved_in_fp32_and_momenta_stay_fp32() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    window, group = a_window(parameter, np.zeros(4, np.float32), np.ones(4, np.float32), weight_decay=0.0)
    window.step(
        [group], {parameter: torch.full((4,), 0.01, dtype=torch.bfloat16)}, (group["lr"], group["weight_decay"])
    )
    found = window.contribution(parameter)
    assert found is not None
    assert found.dtype is torch.float32
    assert parameter.dtype is torch.bfloat16


# --- under a node

SETTINGS = RunSettings(
    run_id="r",
    steps=100,
    outer=OUTER,
    sync=SyncSettings(strategy="momentum", every=1, warmup_commits=3, local_doubling=1),
)
BASE = 4
"""The first commit that steps of the sites' own follow, two of them."""


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return in_memory(monkeypatch, SETTINGS)


def published(node: FakeNode, value: float, momentum: float, answer: Answer) -> Question:
    def run() -> Answer:
        node.values(node.publish, "weight")[:] = value
        node.values(node.moments[0], "weight")[:] = momentum
        node.values(node.moments[1], "weight")[:] = 4.0
        return answer

    return run


def moved(value: float, momentum: float, run_step: int, base: int = BASE) -> tuple[float, float]:
    """After a step with a gradient of 1, in the window on that base, from that step of the run on."""
    bias1, bias2 = bias_at(SETTINGS, base + 1, run_step + SETTINGS.sync.phases.steps(base + 1))
    momentum = 0.75 * momentum + 0.25
    update = (momentum / bias1) / (np.sqrt(4.0 / bias2) + 1e-3)
    return value - 0.1 * update, momentum


class Script:
    """Gradients of 1, and a learning rate of 0.1; what the weight was before each step."""

    def __init__(self, *, leaves_out: int = -1, slows_down: bool = False) -> None:
        self.net = nn.Linear(2, 1, bias=False)
        self.optimizer = atoll.ZeroOneAdam(self.net.parameters(), lr=0.1, weight_decay=0.0)
        self.weights: list[float] = []
        self.steps: list[int] = []
        self._leaves_out, self._slows_down = leaves_out, slows_down

    def run(self) -> None:
        number = 0
        with atoll.join(self.net, self.optimizer, data_fingerprint=b"f" * 32) as site:
            while site.running:
                self.weights.append(self.net.weight[0, 0].item())
                self.steps.append(site.inner_step)
                if self._slows_down:
                    self.optimizer.param_groups[0]["lr"] = 1 / (1 + site.inner_step)
                self.net(torch.ones(1, 2)).sum().backward()
                if number != self._leaves_out:
                    self.optimizer.step()
                site.step(tokens=10, loss=0.5)
                number += 1


def test_the_ranks_go_on_from_the_moments_of_the_base_and_hand_in_the_mean(node: FakeNode) -> None:
    node.script = [
        (0, published(node, 1.0, 2.0, apply(MergeMode.REPLACE, 2, run_step=9, version=BASE, fresh=True))),
        (2, SNAPSHOT),
        (2, published(node, 5.0, -1.0, apply(MergeMode.REPLACE, 6, run_step=11, version=BASE + 1))),
        (6, STOP),
    ]
    script = Script()
    script.run()
    first, m1 = moved(1.0, 2.0, 9)
    _, m2 = moved(first, m1, 9)
    assert script.weights[:3] == pytest.approx([1.0, first, 5.0], rel=1e-5)
    assert script.weights[3] == pytest.approx(moved(5.0, -1.0, 11, BASE + 1)[0], rel=1e-5)
    assert node.values(node.snapshot, "weight") == pytest.approx((m1 + m2) / 2, rel=1e-5)
    (sealed,) = node.said("sealed")
    assert sealed["rates"] == pytest.approx((0.2, 0.0))
    assert sealed["num_steps"] == 2


def test_a_window_that_is_released_begins_anew_at_the_base(node: FakeNode) -> None:
    """It held no tokens: its steps are undone, or the next one would have twice the learning rate of the other
    sites."""
    node.script = [
        (0, published(node, 1.0, 2.0, apply(MergeMode.REPLACE, 2, run_step=9, version=BASE, fresh=True))),
        (2, SNAPSHOT),
        (2, go_on(4)),
        (4, SNAPSHOT),
        (4, STOP),
    ]
    script = Script()
    script.run()
    assert script.weights[2] == 1.0
    assert script.weights[3] == script.weights[1]
    rates = [sealed["rates"] for sealed in node.said("sealed")]
    assert rates[0] == rates[1]
    _, m1 = moved(1.0, 2.0, 9)
    assert node.values(node.snapshot, "weight") == pytest.approx((m1 + 0.75 * m1 + 0.25) / 2, rel=1e-5)


@pytest.mark.parametrize("base", [BASE, BASE - 1], ids=["of two steps", "of one"])
def test_a_window_that_is_released_has_the_rates_that_the_script_has_for_its_steps(node: FakeNode, base: int) -> None:
    """Sites whose window is kept have said those of the same steps, and one with others is refused."""
    num = 2 if base == BASE else 1
    node.script = [
        (0, published(node, 1.0, 2.0, apply(MergeMode.REPLACE, num, run_step=9, version=base, fresh=True))),
        (num, SNAPSHOT),
        (num, go_on(2 * num)),
        (2 * num, SNAPSHOT),
        (2 * num, published(node, 1.0, 2.0, apply(MergeMode.REPLACE, 3 * num, run_step=9 + num, version=base + 1))),
        (3 * num, STOP),
    ]
    script = Script(slows_down=True)
    script.run()
    first, second = (sealed["rates"] for sealed in node.said("sealed"))
    assert first == second
    assert script.steps == [*range(9, 9 + num)] * 2 + [*range(9 + num, 9 + 2 * num)]


def test_a_commit_in_the_middle_of_a_window_takes_its_steps_back(node: FakeNode) -> None:
    node.script = [
        (0, published(node, 1.0, 2.0, apply(MergeMode.REPLACE, 1, run_step=9, version=BASE, fresh=True))),
        (1, published(node, 5.0, -1.0, apply(MergeMode.REPLACE, 3, run_step=11, version=BASE + 1, data_epoch=1))),
        (3, SNAPSHOT),
        (3, STOP),
    ]
    script = Script()
    script.run()
    assert script.weights[1] == 5.0
    m1 = 0.75 * -1.0 + 0.25
    assert node.values(node.snapshot, "weight") == pytest.approx((m1 + 0.75 * m1 + 0.25) / 2, rel=1e-5)
    assert node.said("sealed")[0]["rates"] == pytest.approx((0.2, 0.0))


def test_before_the_local_steps_a_gradient_is_handed_in_and_nothing_moves(node: FakeNode) -> None:
    node.script = [
        (0, published(node, 1.0, 2.0, apply(MergeMode.REPLACE, 1, run_step=3, version=BASE - 1, fresh=True))),
        (1, SNAPSHOT),
        (1, STOP),
    ]
    script = Script()
    script.run()
    assert node.values(node.snapshot, "weight") == pytest.approx(1.0)
    assert script.net.weight[0, 0].item() == 1.0


def test_a_step_that_is_left_out_in_the_middle_of_a_window_has_a_gradient_of_0_and_no_tokens(node: FakeNode) -> None:
    """Its learning rate counts, as it does at the other sites. What the script does not take away of its gradient is
    added to the next one."""
    node.script = [
        (0, published(node, 1.0, 2.0, apply(MergeMode.REPLACE, 3, run_step=9, version=BASE, fresh=True))),
        (3, SNAPSHOT),
        (3, STOP),
    ]
    script = Script(leaves_out=1)
    script.run()
    m1 = 0.75 * 2.0 + 0.25
    m2 = 0.75 * m1
    assert node.values(node.snapshot, "weight") == pytest.approx((m1 + m2 + 0.75 * m2 + 0.25 * 2) / 3, rel=1e-5)
    (sealed,) = node.said("sealed")
    assert (sealed["tokens"], sealed["skipped_steps"]) == (20, (2,))
    assert sealed["rates"] == pytest.approx((0.3, 0.0))


def test_a_step_whose_loss_is_not_finite_is_no_part_of_a_window(node: FakeNode) -> None:
    """Though its gradient is finite: the window takes a step where `site.step` has seen the loss."""
    node.script = [
        (0, published(node, 1.0, 2.0, apply(MergeMode.REPLACE, 2, run_step=9, version=BASE, fresh=True))),
        (2, SNAPSHOT),
        (2, STOP),
    ]
    net = nn.Linear(2, 1, bias=False)
    optimizer = atoll.ZeroOneAdam(net.parameters(), lr=0.1, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with atoll.join(net, optimizer, data_fingerprint=b"f" * 32) as site:
        for loss in (float("inf"), 0.5):
            net(torch.full((1, 2), 1000.0 if loss > 1 else 1.0)).sum().backward()
            optimizer.step()
            scheduler.step()  # the rate is that of the step
            site.step(tokens=10, loss=loss)
    m1 = 0.75 * 2.0
    m2 = 0.75 * m1 + 0.25
    assert node.values(node.snapshot, "weight") == pytest.approx((0.1 * m1 + 0.05 * m2) / 0.15, rel=1e-5)
    (sealed,) = node.said("sealed")
    assert (sealed["tokens"], sealed["skipped_steps"]) == (10, (1,))
    assert sealed["rates"] == pytest.approx((0.15, 0.0))


def test_the_memory_of_a_window_is_free_before_that_of_the_next_one_is_taken(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[weakref.ref[LocalWindow]] = []
    alive: list[bool] = []
    real = LocalWindow.__init__

    def begin(self: LocalWindow, *arguments: Any) -> None:
        alive.extend(window() is not None for window in begun)
        begun.append(weakref.ref(self))
        real(self, *arguments)

    monkeypatch.setattr(LocalWindow, "__init__", begin)
    node.script = [
        (0, published(node, 1.0, 2.0, apply(MergeMode.REPLACE, 2, run_step=9, version=BASE, fresh=True))),
        (2, SNAPSHOT),
        (2, published(node, 5.0, -1.0, apply(MergeMode.REPLACE, 6, run_step=11, version=BASE + 1))),
        (6, STOP),
    ]
    Script().run()
    assert alive == [False]


def test_a_parameter_group_that_is_added_in_a_window_is_refused_by_name(node: FakeNode) -> None:
    node.script = [
        (0, published(node, 1.0, 2.0, apply(MergeMode.REPLACE, 2, run_step=9, version=BASE, fresh=True))),
        (2, SNAPSHOT),
    ]
    script = Script()
    script.optimizer.register_step_post_hook(
        lambda optimizer, *_: (
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
            if len(optimizer.param_groups) < 2
            else None
        )
    )
    with pytest.raises(ConfigError, match=r"of shape \[3\] was added or unfrozen after atoll\.join"):
        script.run()


def test_moments_are_shared_before_steps_that_ranks_do_by_themselves() -> None:
    assert replace(SETTINGS.sync, local_doubling=0).num_shared_moments == 0
    assert [SETTINGS.sync.moments_at(commit) for commit in (0, BASE - 1, BASE, BASE + 9)] == [0, 0, 2, 2]
