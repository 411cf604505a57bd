"""`atoll.integrations.hf` against a node in memory: what the trainer does at a late joiner, and in epochs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

pytest.importorskip("transformers", reason="transformers is not installed: make test-more")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-more")

from transformers import Trainer, TrainerCallback, TrainingArguments

from atoll.integrations import training as training_module
from atoll.integrations.hf import SiteCallback
from atoll.node.core.events import MergeMode
from atoll.node.worker import join as join_module
from atoll.node.worker import joined_site
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import RunSettings
from tests.harness.fake_node import SNAPSHOT, STOP, FakeNode, apply

pytestmark = [pytest.mark.more, pytest.mark.timeout(120), pytest.mark.filterwarnings("default")]

SETTINGS = RunSettings(run_id="r", steps=50, min_sites=2, max_sites=8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.losses: list[float] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.net(x).squeeze(1)
        loss = (found - labels).square().mean()
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss, "logits": found}


class Points(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor([index / 24, 1.0]), "labels": torch.tensor(index / 24)}


class Watch(TrainerCallback):
    """What the trainer's own events are, and what an evaluation sees."""

    def __init__(self) -> None:
        self.epochs: list[float] = []
        self.rates: list[float] = []
        self.evaluated: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epochs.append(state.epoch)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated.append(state.global_step)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    fake = FakeNode()
    for module in (join_module, training_module):
        monkeypatch.setattr(module, "connect", lambda: fake.connection(SETTINGS))
    monkeypatch.setattr(joined_site, "disconnect", fake.close)
    return fake


def a_trainer(folder: Path, held_out: Any = None, **changes: Any) -> Any:
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1.0,
        max_grad_norm=0.001, report_to="none", disable_tqdm=True, use_cpu=True,
        **{"save_strategy": "no", "lr_scheduler_type": "linear", "warmup_steps": 0, **changes},
    )  # fmt: skip
    return Trainer(model=Model(), args=args, train_dataset=Points(), eval_dataset=held_out or Points())


def test_a_late_joiner_follows_the_run(node: FakeNode, tmp_path: Path) -> None:
    """It comes at step 40 of 50: its schedule is there, its epochs are passes of two sites, and the run's end is its
    own. Three steps at its 44th are undone."""
    node.script = [
        (0, apply(MergeMode.REPLACE, 4, run_step=40, fresh=True)),
        (4, SNAPSHOT),
        (4, apply(MergeMode.REPLACE, 7, run_step=44, version=1)),
        (7, apply(MergeMode.REPLACE, 13, run_step=44, version=1, data_epoch=1)),
        (13, SNAPSHOT),
        (13, STOP),
    ]
    trainer, watch = a_trainer(tmp_path, eval_strategy="epoch"), Watch()
    trainer.add_callback(SiteCallback(trainer, ramp_steps=0))
    trainer.add_callback(watch)
    done = trainer.train()
    assert trainer.args.max_steps == 50
    assert done.global_step == 13
    steps = [*range(40, 47), *range(44, 50)]
    assert watch.rates == pytest.approx([1 - step / 50 for step in steps])
    assert watch.epochs == pytest.approx([1.0, 2.0, 3.0, 4.0, 4 + 1 / 3]), "24 samples, 4 a step, two sites"
    assert watch.evaluated == [3, 6, 9, 12, 13]
    assert [sealed["num_samples_used"] for sealed in node.said("sealed")] == [16, 24]
    assert [sealed["tokens"] for sealed in node.said("sealed")] == [16, 24]
    losses = torch.tensor(trainer.model.losses).view(13, 2).mean(1)  # two batches a step
    assert [sealed["loss_sum"] for sealed in node.said("sealed")] == pytest.approx(
        [losses[:4].sum().item(), losses[7:].sum().item()]
    )
    assert node.said("busy").count({"what": "", "limit_s": 0.0}) == 5
    assert node.said("goodbye") == [{"run_over": True}]


def test_what_the_trainer_measures_is_a_curve_of_the_outer_parameters(node: FakeNode, tmp_path: Path) -> None:
    """Of two held-out data sets, which the trainer evaluates one after the other, as of one."""
    node.script = [(0, apply(MergeMode.REPLACE, 3, run_step=40, fresh=True)), (3, SNAPSHOT), (3, STOP)]
    trainer = a_trainer(tmp_path, {"first": Points(), "second": Points()}, eval_strategy="steps", eval_steps=2)
    trainer.add_callback(SiteCallback(trainer, ramp_steps=0))
    trainer.train()
    outer = Model()
    outer.load_state_dict({name: outer_values(node, name).view_as(at) for name, at in outer.state_dict().items()})
    loss = torch.stack([outer(**point)["loss"] for point in (collated(index) for index in range(24))]).mean().item()
    logged = {value.name: value for said in node.said("logged") for value in said["values"]}
    assert set(logged) == {"eval_first_loss", "eval_second_loss"}
    for value in logged.values():
        assert (value.step, value.of_outer) == (40, True)
        assert value.value == pytest.approx(loss)
    assert [said["what"] for said in node.said("busy")] == ["the trainer's evaluation", ""]


def outer_values(node: FakeNode, name: str) -> Tensor:
    return torch.from_numpy(node.values(node.publish, name).copy())


def collated(index: int) -> dict[str, Tensor]:
    return {name: value[None] for name, value in Points()[index].items()}


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_a_save_after_an_evaluation_is_announced_and_has_the_sites_own(
    node: FakeNode, tmp_path: Path, strategy: str
) -> None:
    """Until all ranks are through with it."""
    node.script = [(0, apply(MergeMode.REPLACE, 3, run_step=40, fresh=True)), (3, SNAPSHOT), (3, STOP)]
    changes = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": strategy, "save_steps": 2}
    trainer = a_trainer(tmp_path, metric_for_best_model="loss", greater_is_better=False, **changes)
    saved: list[Tensor] = []
    save = trainer.save_model

    def watched(*args: Any, **kwargs: Any) -> None:
        saved.append(trainer.model.net.weight.detach().clone())
        save(*args, **kwargs)

    def waits() -> None:
        assert node.said("busy")[-1]["what"] == "the trainer's checkpoint"
        saved.append(torch.empty(0))

    trainer.save_model, trainer.accelerator.wait_for_everyone = watched, waits
    trainer.add_callback(SiteCallback(trainer, ramp_steps=0))
    trainer.train()
    assert len(saved) == 2
    assert not torch.equal(saved[0], outer_values(node, "net.weight").view(1, 2))
    said = [busy["what"] for busy in node.said("busy")]
    assert said[:4] == ["the trainer's evaluation", "", "the trainer's checkpoint", ""]


def test_steps_that_were_undone_do_not_end_training(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run has four, of which this site does three once more."""
    for module in (join_module, training_module):
        monkeypatch.setattr(module, "connect", lambda: node.connection(replace(SETTINGS, steps=4)))
    undone = apply(MergeMode.REPLACE, 7, data_epoch=1)
    node.script = [(0, apply(MergeMode.REPLACE, 3, fresh=True)), (3, undone), (7, SNAPSHOT), (7, STOP)]
    trainer = a_trainer(tmp_path)
    trainer.add_callback(SiteCallback(trainer))
    assert trainer.train().global_step == 7


@pytest.mark.parametrize("length", [{"steps": 4}, {"steps": 0, "tokens": 28}], ids=["undone", "in-tokens"])
def test_beyond_the_trainers_last_step_it_saves_and_evaluates_by_its_intervals(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, length: dict[str, Any]
) -> None:
    """It takes each step from its `max_steps` on for the last one; the run has seven."""
    for module in (join_module, training_module):
        monkeypatch.setattr(module, "connect", lambda: node.connection(replace(SETTINGS, **length)))
    node.script = [(0, apply(MergeMode.REPLACE, 7, fresh=True)), (7, SNAPSHOT), (7, STOP)]
    trainer, watch = a_trainer(
        tmp_path, max_steps=4, save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=5
    ), Watch()  # fmt: skip
    trainer.add_callback(SiteCallback(trainer))
    trainer.add_callback(watch)
    assert trainer.train().global_step == 7
    saved = sorted(int(path.name.removeprefix("checkpoint-")) for path in tmp_path.iterdir())
    assert (saved, watch.evaluated) == ([3, 6, 7], [5, 7])


class Asking(TrainerCallback):
    """A script's own callback, which has the site of the trainer's."""

    def __init__(self, site: SiteCallback) -> None:
        self.of_trainer = site
        self.steps: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(self.of_trainer.site.inner_step)
        self.of_trainer.site.log({"mine": float(state.global_step)})


def test_a_script_logs_by_the_site_of_its_trainer(node: FakeNode, tmp_path: Path) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 2, run_step=40, fresh=True)), (2, SNAPSHOT), (2, STOP)]
    trainer = a_trainer(tmp_path)
    site = SiteCallback(trainer)
    asking = Asking(site)
    with pytest.raises(ConfigError, match="asked for outside of training"):
        _ = site.site
    trainer.add_callback(site)
    trainer.add_callback(asking)
    trainer.train()
    assert asking.steps == [41, 42]
    values = [value for said in node.said("logged") for value in said["values"]]
    assert [(value.name, value.step, value.value) for value in values] == [("mine", 41, 1.0), ("mine", 42, 2.0)]


def rates_of(node: FakeNode, folder: Path, kind: str) -> list[float]:
    trainer, watch = a_trainer(folder, lr_scheduler_type=kind, **OF_KIND.get(kind, {})), Watch()
    trainer.add_callback(SiteCallback(trainer, ramp_steps=0))
    trainer.add_callback(watch)
    trainer.train()
    assert trainer.state.max_steps == 100
    return watch.rates


OF_KIND: dict[str, dict[str, Any]] = {
    "linear": {"warmup_steps": 0.1},
    "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 0.25}},
    "polynomial": {"lr_scheduler_kwargs": {"lr_end": 0.125}},
    "warmup_stable_decay": {"warmup_steps": 10, "lr_scheduler_kwargs": {"num_decay_steps": 30}},
}


@pytest.mark.parametrize("run_step", [0, 60], ids=["from-the-beginning", "late"])
@pytest.mark.parametrize("kind", ["cosine", *OF_KIND])
def test_a_schedule_follows_a_new_length_of_the_run(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, run_step: int
) -> None:
    """An operator sets 100 steps in the place of 50: the rates are from then on those of a run that began with 100."""
    in_between = replace(apply(MergeMode.REPLACE, 4, run_step=run_step + 2, version=1), run_length=100)

    def script(first_length: int) -> list[Any]:
        first = apply(MergeMode.REPLACE, 2, run_step=run_step, fresh=True, run_length=first_length)
        return [(0, first), (2, SNAPSHOT), (2, in_between), (4, SNAPSHOT), (4, STOP)]

    node.script = script(100 if run_step else 0)  # a late joiner hears of it as it joins
    rates = rates_of(node, tmp_path, kind)
    for module in (join_module, training_module):
        monkeypatch.setattr(module, "connect", lambda: node.connection(replace(SETTINGS, steps=100)))
    node.script = script(0)
    expected = rates_of(node, tmp_path, kind)
    assert len(rates) == 4
    assert expected[-1] > 0
    assert rates[0 if run_step else 2 :] == pytest.approx(expected[0 if run_step else 2 :])


class Quiet(Trainer):
    """The trainer reads no result of it."""

    def create_scheduler(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override, unused-ignore]
        super().create_scheduler(*args, **kwargs)


def test_a_schedule_of_a_subclass_that_gives_back_nothing_follows_a_new_length(node: FakeNode, tmp_path: Path) -> None:
    in_between = apply(MergeMode.REPLACE, 4, run_step=2, version=1, run_length=100)
    node.script = [(0, apply(MergeMode.REPLACE, 2, fresh=True)), (2, SNAPSHOT), (2, in_between)]
    node.script += [(4, SNAPSHOT), (4, STOP)]
    trainer: Any = Quiet(model=Model(), args=a_trainer(tmp_path).args, train_dataset=Points())
    watch = Watch()
    trainer.add_callback(SiteCallback(trainer, ramp_steps=0))
    trainer.add_callback(watch)
    trainer.train()
    assert watch.rates == pytest.approx([1, 1 - 1 / 50, 1 - 2 / 100, 1 - 3 / 100])


def test_a_schedule_that_the_script_made_is_said_to_have_the_old_length(
    node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 2, fresh=True))]
    for step, length in ((2, 100), (3, 200), (4, 200)):
        applied = apply(MergeMode.REPLACE, step + 1, run_step=step, version=step, run_length=length)
        node.script += [(step, SNAPSHOT), (step, applied)]
    node.script += [(5, SNAPSHOT), (5, STOP)]
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 50)
    args = a_trainer(tmp_path).args
    trainer: Any = Trainer(model=model, args=args, train_dataset=Points(), optimizers=(optimizer, schedule))
    watch = Watch()
    trainer.add_callback(SiteCallback(trainer, ramp_steps=0))
    trainer.add_callback(watch)
    trainer.train()
    assert watch.rates == pytest.approx([1 - step / 50 for step in range(5)])
    lines = [line for line in capsys.readouterr().err.splitlines() if "schedule" in line]
    assert len(lines) == 2, "each length once"
    assert "the run has 100 steps now, and had 50" in lines[0]
    assert "the run has 200 steps now, and had 100" in lines[1]


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        return (Points()[index] for index in range(24))


@pytest.mark.parametrize("data", ["global", "local"])
def test_of_a_stream_each_site_takes_its_batches(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Any
) -> None:
    """One batch in as many as there are sites, over passes; all of them where the data is each site's own."""
    for module in (join_module, training_module):
        monkeypatch.setattr(module, "connect", lambda: node.connection(replace(SETTINGS, data=data)))
    first = apply(MergeMode.REPLACE, 3, fresh=True, site_index=1, num_sites=3)
    node.script = [(0, first), (3, SNAPSHOT), (3, STOP)]
    model = Model()
    seen: list[list[int]] = []
    model.register_forward_pre_hook(lambda _module, _args, given: seen.append(places(given)), with_kwargs=True)
    args = a_trainer(tmp_path, max_steps=1).args  # the trainer wants some
    trainer: Any = Trainer(model=model, args=args, train_dataset=Stream())
    trainer.add_callback(SiteCallback(trainer))
    assert trainer.train().global_step == 3
    batches = [1, 4, 7, 10, 1, 4] if data == "global" else range(6)
    assert seen == [[2 * batch, 2 * batch + 1] for batch in batches]
    assert "draws its samples itself" not in capsys.readouterr().err


def places(given: dict[str, Tensor]) -> list[int]:
    return [round(24 * label) for label in given["labels"].tolist()]


def test_a_checkpoint_of_the_trainer_is_refused(node: FakeNode, tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    callback = SiteCallback(trainer)
    trainer.state.global_step = 7
    with pytest.raises(ConfigError, match="resume_from_checkpoint"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)


def test_without_a_node_nothing_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(training_module, "connect", lambda: None)
    trainer, twin = (a_trainer(tmp_path, max_steps=5, seed=3) for _ in range(2))
    twin.model.load_state_dict(trainer.model.state_dict())
    trainer.add_callback(SiteCallback(trainer))
    trainer.train(), twin.train()
    assert torch.equal(trainer.model.net.weight, twin.model.net.weight)
