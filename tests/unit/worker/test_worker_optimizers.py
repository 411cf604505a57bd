"""Optimizers whose steps the nodes do: what they hand in, and the same step alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.node.worker.optimizers import NodeOptimizer, check, rated_groups
from atoll.node.worker.tensors import find_tensors
from atoll.protocol.errors import ConfigError
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.sync_settings import SyncSettings

ADAMW = OuterSettings(optimizer="adamw", momentum=0.9)
NESTEROV = OuterSettings(momentum=0.5)
SIGN = OuterSettings(optimizer="signsgd")
LOCAL = SyncSettings(strategy="momentum", warmup_commits=2, local_doubling=5)


def a_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def lose(model: nn.Module, step: int) -> torch.Tensor:
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = (model(batch) - batch[:, :2].sin()).square().mean()
    return loss


def backward(model: nn.Module, step: int = 0) -> None:
    lose(model, step).backward()  # type: ignore[no-untyped-call]


def under_a_node(optimizer: NodeOptimizer) -> NodeOptimizer:
    optimizer.at_commit(7)
    return optimizer


Make = Callable[[Any], torch.optim.Optimizer]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda p: atoll.AdamW(p, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
        ),
        (lambda p: atoll.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (
            lambda p: atoll.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        ),
    ],
    ids=["adamw", "sgd", "nesterov"],
)
def test_alone_they_do_the_steps_of_torch(ours: Make, theirs: Make) -> None:
    one, other = a_model(), a_model()
    pairs = [(one, ours(one.parameters())), (other, theirs(other.parameters()))]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for _, optimizer in pairs]
    for step in range(20):
        for (model, optimizer), scheduler in zip(pairs, schedulers, strict=True):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            scheduler.step()
    for a, b, first in zip(one.parameters(), other.parameters(), a_model().parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
        assert not torch.allclose(a, first, atol=1e-2)


def test_alone_signsgd_moves_each_element_by_the_learning_rate() -> None:
    model = a_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = atoll.SignSGD(model.parameters(), lr=0.25, weight_decay=0.5)
    backward(model)
    signs = [p.grad.sign() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    for p, value, sign in zip(model.parameters(), before, signs, strict=True):
        assert torch.equal(p, value - 0.25 * (sign + 0.5 * value))


def test_under_a_node_a_step_takes_the_gradients_and_leaves_the_parameters() -> None:
    model = a_model()
    optimizer = under_a_node(atoll.AdamW(model.parameters(), lr=0.01))
    before = [p.detach().clone() for p in model.parameters()]
    assert optimizer.left_out
    backward(model)
    gradients = [p.grad for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is None for p in model.parameters())
    for p, value, gradient in zip(model.parameters(), before, gradients, strict=True):
        assert torch.equal(p, value)
        found = optimizer.contribution(p)
        assert found is gradient
        assert found is not None
        assert found.abs().sum() > 0
    assert not optimizer.left_out
    optimizer.handed_in()
    assert optimizer.left_out


def test_a_parameter_without_a_gradient_has_none() -> None:
    model = a_model()
    optimizer = under_a_node(atoll.SGD(model.parameters(), lr=0.1))
    backward(model)
    first, *_ = model.parameters()
    first.grad = None
    optimizer.step()
    assert not optimizer.left_out
    assert optimizer.contribution(first) is None


def test_the_rates_are_those_of_the_step_and_not_of_a_scheduler_that_goes_on_after_it() -> None:
    model = a_model()
    groups = [{"params": [p], "weight_decay": 0.1 * i} for i, p in enumerate(model.parameters())]
    optimizer = under_a_node(atoll.AdamW(groups, lr=torch.tensor(0.5)))  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    backward(model)
    optimizer.step()
    scheduler.step()
    assert optimizer.rates == pytest.approx((0.5, 0, 0.5, 0.1, 0.5, 0.2, 0.5, 0.3))


def test_a_second_step_before_the_first_is_handed_in_is_refused_and_a_late_gradient_is_gone() -> None:
    model = a_model()
    optimizer = under_a_node(atoll.AdamW(model.parameters()))
    backward(model)
    optimizer.step()
    backward(model)
    with pytest.raises(ConfigError, match=r"two steps before one site\.step"):
        optimizer.step()
    optimizer.at_commit(8)
    assert optimizer.left_out
    optimizer.step()
    assert not optimizer.left_out


def test_after_the_run_steps_are_the_scripts_own() -> None:
    model = a_model()
    optimizer = under_a_node(atoll.SGD(model.parameters(), lr=0.1))
    backward(model)
    optimizer.step()
    optimizer.leave()
    for _ in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        backward(model)
        optimizer.step()
        assert not any(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    optimizer.at_commit(1)  # of another run
    backward(model)
    optimizer.step()
    assert not optimizer.left_out


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: atoll.AdamW([{"params": p, "betas": (0.8, 0.9)}]), "betas = .* in parameter group 0"),
        (
            lambda p: atoll.AdamW([{"params": p, "maximize": True}]),
            "maximize = True in parameter group 0, and its steps",
        ),
        (lambda p: atoll.AdamW([{"params": p, "lr": -0.1}]), "lr = -0.1 in parameter group 0; choose 0 or more"),
        (lambda p: atoll.SGD([{"params": p, "momentum": 0.9}], lr=0.1), "momentum = 0.9 in parameter group 0"),
        (lambda p: atoll.SGD([{"params": p, "weight_decay": 0.1}], lr=0.1), "weight_decay = 0.1 in parameter group 0"),
    ],
)
def test_what_the_nodes_do_not_know_of_a_group_is_refused(make: Make, words: str) -> None:
    model = a_model()
    optimizer = make(list(model.parameters()))
    assert isinstance(optimizer, NodeOptimizer)
    outer = ADAMW if isinstance(optimizer, atoll.AdamW) else OuterSettings(optimizer="sgd")
    with pytest.raises(ConfigError, match=words):
        check([optimizer], SyncSettings(strategy="gradient"), outer)
    backward(model)
    with pytest.raises(ConfigError, match=words):
        optimizer.step()


def test_a_scheduler_that_moves_betas_says_that_there_are_none() -> None:
    """OneCycleLR moves beta1 unless it is told not to, and the run's is the same at all sites."""
    optimizer = atoll.AdamW(a_model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="must support momentum or beta1"):
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] > 0


def test_moments_that_were_loaded_are_said_not_to_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    model = a_model()
    optimizer = atoll.AdamW(model.parameters(), lr=0.01)
    backward(model)
    optimizer.step()
    other = atoll.AdamW(a_model().parameters(), lr=0.01)
    other.load_state_dict(optimizer.state_dict())
    under_a_node(other)
    assert "atoll: the moments that atoll.AdamW has are not used" in capsys.readouterr().err
    assert not other.state


def test_a_copy_of_an_optimizer_steps_too() -> None:
    model, optimizer = copy.deepcopy((model := a_model(), atoll.AdamW(model.parameters())))
    backward(model)
    optimizer.step()


def test_only_groups_with_trained_parameters_have_rates() -> None:
    model = a_model()
    dict(model.named_parameters())["0.bias"].requires_grad = False
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": []}, {"params": [vectors[0]]}, {"params": matrices}, {"params": vectors[1:]}, {"params": []}]
    optimizer = atoll.AdamW(groups)
    tensors = find_tensors([model], [optimizer]).manifest
    assert {spec.name: spec.group for spec in tensors.tensors} == {
        "0.weight": 0, "2.weight": 0, "2.bias": 1, "0.bias": 0
    }  # fmt: skip
    assert [number for _, number in rated_groups([optimizer])] == [2, 3]
    assert tensors.num_groups == 2


def test_two_parameters_on_one_memory_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    one, other = model["a"], model["b"]
    assert isinstance(one, nn.Linear)
    assert isinstance(other, nn.Linear)
    other.weight = nn.Parameter(one.weight.data)
    with pytest.raises(ConfigError, match=r"'a\.weight' has the memory of another parameter"):
        find_tensors([model], [atoll.AdamW([other.weight])])
    other.weight = one.weight
    assert len(find_tensors([model], [atoll.AdamW([other.weight])]).manifest.tensors) == 1


def test_a_sparse_gradient_is_refused() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = atoll.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse"):
        optimizer.step()


def test_the_state_names_the_commit_and_nothing_else() -> None:
    model = a_model()
    optimizer = under_a_node(atoll.AdamW(model.parameters(), lr=0.01))
    backward(model)
    optimizer.step()
    state = optimizer.state_dict()
    assert (state["state"], state["commit"]) == ({}, 7)
    assert state["param_groups"][0]["lr"] == 0.01


def test_each_parameter_is_listed_with_its_group() -> None:
    model = a_model()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    one, other = atoll.AdamW([{"params": matrices}]), atoll.AdamW([{"params": vectors[:1]}, {"params": vectors[1:]}])
    groups = {spec.name: spec.group for spec in find_tensors([model], [one, other]).manifest.tensors}
    assert groups == {"0.weight": 0, "2.weight": 0, "0.bias": 1, "2.bias": 2}
    alone = torch.optim.AdamW([{"params": matrices}, {"params": vectors}])
    assert {spec.group for spec in find_tensors([model], [alone]).manifest.tensors} == {0}


def test_more_groups_than_rates_can_be_said_of_are_refused() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(65)])
    with pytest.raises(ConfigError, match="65 parameter groups"):
        find_tensors([model], [atoll.SGD([{"params": [p]} for p in model], lr=0.1)])


@pytest.mark.parametrize(
    ("make", "strategy", "outer", "words"),
    [
        (torch.optim.AdamW, "gradient", ADAMW, r"use atoll.AdamW\(params"),
        (torch.optim.AdamW, "gradient", NESTEROV, r"use atoll.SGD\(params"),
        (atoll.AdamW, "diloco", NESTEROV, "use one of torch.optim"),
        (atoll.AdamW, "momentum", ADAMW, r'for sync.strategy = "gradient", .* use atoll.OneBitAdam'),
        (atoll.OneBitAdam, "gradient", ADAMW, "use atoll.AdamW"),
        (atoll.OneBitAdam, "local", ADAMW, r"sync.local_doubling = 5: use atoll.ZeroOneAdam\(params"),
        (torch.optim.AdamW, "local", ADAMW, r"use atoll.ZeroOneAdam\(params"),
        (torch.optim.AdamW, "momentum", ADAMW, r"use atoll.OneBitAdam\(params"),
        (atoll.AdamW, "gradient", SIGN, "'signsgd'"),
        (torch.optim.AdamW, "gradient", SIGN, r"use atoll.SignSGD\(params"),
        (atoll.AdamW, "gradient", NESTEROV, r"the script has atoll.AdamW\(\)"),
        (lambda p: atoll.AdamW(p, betas=(0.9, 0.99)), "gradient", ADAMW, "beta2 0.95"),
        (lambda p: atoll.AdamW(p, eps=1e-6), "gradient", ADAMW, "epsilon 1e-08"),
        (lambda p: atoll.SGD(p, lr=0.1), "gradient", NESTEROV, r"SGD\(momentum=0\)"),
        (lambda p: atoll.SGD(p, lr=0.1, momentum=0.9), "gradient", ADAMW, "'adamw'"),
    ],
)
def test_another_optimizer_than_the_runs_is_refused(
    make: Make, strategy: str, outer: OuterSettings, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check([make(a_model().parameters())], LOCAL if strategy == "local" else SyncSettings(strategy=strategy), outer)


def test_the_runs_optimizer_is_taken() -> None:
    parameters = list(a_model().parameters())
    gradient, momentum, diloco = (SyncSettings(strategy=name) for name in ("gradient", "momentum", "diloco"))
    check([atoll.AdamW(parameters), atoll.AdamW(parameters, betas=(0.9, 0.95), eps=1e-8)], gradient, ADAMW)
    check([atoll.SGD(parameters, lr=0.1, momentum=0.5)], gradient, NESTEROV)
    check([atoll.SGD(parameters, lr=0.1)], gradient, OuterSettings(optimizer="sgd"))
    check([torch.optim.AdamW(parameters)], diloco, NESTEROV)
    check([atoll.SignSGD(parameters, lr=0.1)], gradient, SIGN)
    check([atoll.OneBitAdam(parameters)], momentum, ADAMW)
    check([atoll.ZeroOneAdam(parameters)], momentum, ADAMW)
    check([atoll.ZeroOneAdam(parameters)], LOCAL, ADAMW)
