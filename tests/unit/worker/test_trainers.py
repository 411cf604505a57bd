"""What callbacks of trainers share, and optimizers that trainers wrap. Their libraries are not needed here:
`tests/trainers` has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import atoll
from atoll.integrations import training as training_module
from atoll.integrations.training import LeasedLoader, SharedStream, Training, follow, stays_due, tokens_of
from atoll.node.core.events import MergeMode
from atoll.node.worker import join as join_module
from atoll.node.worker import joined_site
from atoll.protocol.errors import ConfigError, NonFiniteError
from atoll.protocol.model_settings import TrainerSettings
from atoll.protocol.settings import RunSettings
from tests.harness.fake_node import SNAPSHOT, STOP, FakeNode, apply

SETTINGS = RunSettings(run_id="r", steps=100, min_sites=2, max_sites=8, trainer=TrainerSettings(ramp_steps=3))


class AcceleratedOptimizer(torch.optim.Optimizer):
    """As accelerate's: it has no hooks of its own, because it never calls the constructor of torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), 1.0])


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    fake = FakeNode()
    for module in (join_module, training_module):
        monkeypatch.setattr(module, "connect", lambda: fake.connection(SETTINGS))
    monkeypatch.setattr(joined_site, "disconnect", fake.close)
    return fake


def test_a_wrapped_optimizer_joins_a_run_that_is_under_way(node: FakeNode) -> None:
    """Its learning rate rises, which needs the hooks of the optimizer inside."""
    node.script = [(0, apply(MergeMode.REPLACE, 9, run_step=40, fresh=True))]
    net = nn.Linear(2, 1)
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer = AcceleratedOptimizer(inner)
    site = atoll.join(net, optimizer)
    rates: list[float] = []
    inner.register_step_pre_hook(lambda *_: rates.append(inner.param_groups[0]["lr"]))
    for _ in range(4):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        site.step(tokens=1)
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("said", [{}, {"data_rank": 3}])
def test_what_a_script_says_goes_before_what_the_trainer_knows(node: FakeNode, said: dict[str, Any]) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 2, fresh=True))]
    net = nn.Linear(2, 1)
    training = Training(data_fingerprint=b"f" * 32, **said)
    training.begin([net], torch.optim.SGD(net.parameters(), lr=0.1), data_rank=1, names={})
    (joined,) = node.said("join")
    assert joined == {"fingerprint": b"f" * 32, "data_rank": said.get("data_rank", 1)}


def test_a_trainer_counts_what_it_trained_on_and_ends_with_the_run(node: FakeNode) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 2, fresh=True)), (2, SNAPSHOT), (2, STOP)]
    training = Training(data_fingerprint=b"f" * 32)
    loader = LeasedLoader.of(training, DataLoader(Numbers(), 3), 5)
    assert (loader.steps_per_pass, loader.batch_size) == (5, 5), "of 50 samples, at two sites"
    with pytest.raises(ConfigError, match="before its callback has joined"):
        next(iter(loader))
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    training.begin(net, optimizer)
    goes_on, losses = [], []
    for number, batch in enumerate(loader):
        loss = net(batch).mean()
        training.add(batch, loss / 2)
        losses.append(float(loss.detach()) / 2)
        if number % 2:
            optimizer.step()
            goes_on.append(training.step())
    training.end()
    assert goes_on == [True, False]
    (sealed,) = node.said("sealed")
    assert (sealed["tokens"], sealed["num_samples_used"]) == (20, 20)
    assert sealed["loss_sum"] == pytest.approx(sum(losses))
    assert node.said("join")[0]["fingerprint"] == b"f" * 32
    assert node.said("goodbye") == [{"run_over": True}]
    assert not training.is_joined


def test_a_script_has_the_site_of_its_trainer_while_it_trains(node: FakeNode) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True, site_index=1, num_sites=3))]
    training = Training()
    with pytest.raises(ConfigError, match="asked for outside of training: it is joined as training begins"):
        _ = training.joined
    net = nn.Linear(2, 1)
    training.begin(net, torch.optim.SGD(net.parameters(), lr=0.1))
    site = training.joined
    site.log({"mine": 3.0})
    assert (site.index, site.num_sites, site.evaluates) == (1, 3, False)
    training.end()
    assert [value.name for said in node.said("logged") for value in said["values"]] == ["mine"]
    with pytest.raises(ConfigError, match="until training ends"):
        _ = training.joined


@pytest.mark.parametrize(
    ("strategy", "every", "step", "stays"),
    [("steps", 3, 6, True), ("steps", 3, 7, False), ("steps", 0, 7, False), ("epoch", 3, 7, True)],
)
def test_what_is_due_at_a_step_that_a_trainer_takes_for_its_last(
    strategy: str, every: float, step: int, stays: bool
) -> None:
    assert stays_due(True, strategy, every, step) is stays
    assert not stays_due(False, strategy, every, step)


def test_an_error_at_a_step_is_told_to_the_node(node: FakeNode) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 1, fresh=True)), (1, SNAPSHOT)]
    training = Training()
    net = nn.Linear(2, 1)
    training.begin(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with torch.no_grad():
        net.weight.fill_(float("inf"))
    training.add(torch.ones(3, 2), torch.tensor(float("nan")))
    with pytest.raises(NonFiniteError):
        training.step()
    assert node.said("fatal")[0]["kind"] == "non_finite"
    assert node.said("close")


def test_an_evaluation_is_announced_and_sees_the_outer_parameters(node: FakeNode) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True))]
    training = Training(busy_limit_s=7.0)
    net = nn.Linear(2, 1)
    training.begin(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with torch.no_grad():
        net.weight.add_(1.0)
    mine = net.weight.detach().clone()
    training.evaluate("evaluation")
    assert not torch.equal(net.weight, mine)
    training.measured({"loss": torch.tensor(0.5), "accuracy (%)": 3.0, "by class": [0.25], "steps": 7})
    training.go_on()
    assert torch.equal(net.weight, mine)
    assert node.said("busy") == [{"what": "evaluation", "limit_s": 7.0}, {"what": "", "limit_s": 0.0}]
    training.end()
    values = [value for said in node.said("logged") for value in said["values"]]
    assert [(value.name, value.value, value.of_outer) for value in values] == [("loss", 0.5, True), ("steps", 7, True)]


def test_what_no_curve_can_have_is_said_once_by_name(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a trainer measures: none of it ends a training, and each name has a line, however often it comes."""
    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True))]
    training = Training()
    net = nn.Linear(2, 1)
    training.begin(net, torch.optim.SGD(net.parameters(), lr=0.1))
    odd: dict[Any, Any] = {
        7: "seventh",
        "best": "first", "by_class": [0.25], "nested": {"loss": 1.0}, "nothing": None, "a (%)": 3.0,
        "of_batch": torch.ones(2), "complex": torch.ones(1) * 1j, "worse": float("nan"),
    }  # fmt: skip
    for _ in range(2):
        training.measured({"loss": 0.5, "half": np.float32(0.25), **odd})
    training.end()
    values = [value for said in node.said("logged") for value in said["values"]]
    assert [(value.name, value.value) for value in values] == [("loss", 0.5), ("half", 0.25)] * 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(odd)
    assert {name: sum(repr(name) in line or f"out {name} " in line for line in lines) for name in odd} == dict.fromkeys(
        odd, 1
    )
    assert "atoll: 'by_class' of the trainer is left out of the run's curves: [0.25] is no number" in lines
    assert any("'a (%)' of the trainer is left out of the run's curves: a name is 1 to 64" in line for line in lines)


def test_without_a_node_nothing_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_module, "connect", lambda: None)
    training = Training()
    training.begin(nn.Linear(2, 1), None)
    training.add(object(), None)  # which nobody could count
    assert training.step()
    training.evaluate("evaluation")
    training.measured({"loss": 1.0})
    assert training.follow([None]) == 0
    with training.busy("checkpoint"):
        assert list(training.share(iter([1, 2, 3]))) == [1, 2, 3]
    assert (training.joined.evaluates, training.joined.num_sites) == (True, 1)
    training.end()
    assert not training.is_joined


def test_a_schedule_follows_the_steps_of_the_run() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    assert follow(schedule, 9)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([2 / 11])
    assert follow(schedule, 3), "the run went back"
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5)
    assert not follow(torch.optim.lr_scheduler.StepLR(optimizer, 5), 3)


def falling(optimizer: torch.optim.Optimizer, num_steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)


@pytest.mark.parametrize("is_trainers", [True, False], ids=["of-the-trainer", "of-the-script"])
def test_a_schedule_of_a_trainer_follows_a_new_length_and_one_of_a_script_is_said_to_stay(
    node: FakeNode, capsys: pytest.CaptureFixture[str], is_trainers: bool
) -> None:
    """200 steps in the place of 100 at step 41; of the two groups each keeps its own rate, and the optimizer its
    state."""
    node.script = [(0, apply(MergeMode.REPLACE, 1, run_step=40, fresh=True)), (1, SNAPSHOT)]
    node.script += [(1, apply(MergeMode.REPLACE, 9, run_step=41, version=1, run_length=200))]
    net = nn.Linear(2, 1)
    groups = [{"params": [net.weight], "lr": 1.0}, {"params": [net.bias], "lr": 2.0}]
    optimizer = torch.optim.SGD(groups, lr=4.0)
    schedule = falling(optimizer, 100)
    optimizer.param_groups[0]["of the script"] = 7
    training = Training(ramp_steps=0)
    training.begin(net, optimizer)
    made: list[Any] = []

    def make(stand_in: torch.optim.Optimizer, num_steps: int) -> Any:
        assert [group["lr"] for group in stand_in.param_groups] == [1.0, 2.0]
        made.append((stand_in.defaults["lr"], num_steps))
        return falling(stand_in, num_steps)

    lengths, rates = [], []
    for _ in range(3):
        lengths.append(training.follow([schedule], make if is_trainers else None))
        rates.append([group["lr"] for group in optimizer.param_groups])
        training.add(torch.ones(3, 2), None)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        schedule.step()
        training.step()
    training.end()
    length = 200 if is_trainers else 100
    shares = [1 - 40 / 100, 1 - 41 / length, 1 - 42 / length]
    assert rates == [pytest.approx([share, 2 * share]) for share in shares]
    assert lengths == [0, 200, 0]
    assert made == ([(4.0, 200)] if is_trainers else [])
    assert optimizer.param_groups[0]["of the script"] == 7
    said = capsys.readouterr().err.count("the run has 200 steps now, and had 100: a learning-rate schedule")
    assert said == (0 if is_trainers else 1)
    assert training.follow([schedule]) == 0, "the site has left"


@pytest.mark.parametrize("made", [None, torch.optim.lr_scheduler.StepLR], ids=["nothing", "another-kind"])
def test_a_schedule_that_cannot_be_made_anew_stays_which_is_said(
    node: FakeNode, capsys: pytest.CaptureFixture[str], made: Any
) -> None:
    """As where a trainer's subclass makes it, and gives back nothing: an operator's word ends no training."""
    node.script = [(0, apply(MergeMode.REPLACE, 9, run_step=40, fresh=True, run_length=200))]
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    training = Training(ramp_steps=0)
    training.begin(net, optimizer)
    schedule = falling(optimizer, 100)
    assert training.follow([schedule], lambda stand_in, _: made and made(stand_in, 5)) == 200
    training.end()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 - 40 / 100)
    assert "the run has 200 steps now, and had 100: a learning-rate schedule" in capsys.readouterr().err


def test_in_a_run_of_tokens_a_trainers_estimate_stays(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many steps the run has is an estimate of the site's, which moves."""
    settings = RunSettings(run_id="r", steps=0, tokens=1000, min_sites=2, max_sites=8)
    for module in (join_module, training_module):
        monkeypatch.setattr(module, "connect", lambda: node.connection(settings))
    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True, run_length=3000))]
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    schedule = falling(optimizer, 100)
    training = Training(ramp_steps=0)
    training.begin(net, optimizer)
    assert training.follow([schedule]) == 0
    assert "steps now" not in capsys.readouterr().err
    training.end()


@pytest.mark.parametrize(("data", "taken"), [("stdlib", [1, 4, 7]), ("local", list(range(9)))])
def test_of_a_stream_a_site_takes_its_batches(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, data: str, taken: list[int]
) -> None:
    """The ranks of a site have each a part of a batch, or one of their own, at the same place."""
    for module in (join_module, training_module):
        monkeypatch.setattr(module, "connect", lambda: node.connection(replace(SETTINGS, data=data)))
    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True, site_index=1, num_sites=3))]
    node.num_readers, node.reader = 2, 1
    net = nn.Linear(2, 1)
    training = Training()
    loader: Any = DataLoader(range(9), batch_size=None)  # type: ignore[arg-type]
    shared = SharedStream(training, loader)
    assert shared.dataset == range(9)
    training.begin(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert [list(shared), list(shared)] == [taken, taken]
    training.end()


def test_what_a_trainer_reads_of_a_stream_before_it_joins_every_site_has(node: FakeNode) -> None:
    """And nothing more: Lightning reads one batch ahead. Here no trainer has divided the stream among the ranks."""
    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True, site_index=1, num_sites=3))]
    node.num_readers, node.reader = 2, 1
    net = nn.Linear(2, 1)
    training = Training()
    loader: Any = DataLoader(range(12), batch_size=None)  # type: ignore[arg-type]
    shared = iter(SharedStream(training, loader, by_site=False))
    before = [next(shared)]
    training.begin(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert (before, list(shared)) == ([0], [1 + 3, 1 + 9]), "of the rest one batch in six"
    training.end()


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": torch.ones(3, 7), "labels": torch.ones(3)}, 21),
        ({"pixel_values": torch.ones(4, 3, 8, 8)}, 4),
        ((torch.ones(5, 2), torch.ones(5)), 5),
        (torch.ones(6, 2), 6),
    ],
)
def test_what_a_batch_counts(batch: Any, tokens: int) -> None:
    assert tokens_of(batch) == tokens


def test_a_batch_that_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ConfigError, match="say tokens="):
        tokens_of({"text": ["a", "b"]})
