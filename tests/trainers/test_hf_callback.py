"""`atoll.integrations.hf` against a node in memory: what the trainer does at a late joiner, and in epochs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

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

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.net(x).squeeze(1)
        return {"loss": (found - labels).square().mean(), "logits": found}


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
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1.0, warmup_steps=0,
        lr_scheduler_type="linear", max_grad_norm=0.001, report_to="none", disable_tqdm=True, use_cpu=True,
        **{"save_strategy": "no", **changes},
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


def test_a_save_after_an_evaluation_is_announced_and_has_the_sites_own(node: FakeNode, tmp_path: Path) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 3, run_step=40, fresh=True)), (3, SNAPSHOT), (3, STOP)]
    changes = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = a_trainer(tmp_path, **changes)
    saved: list[Tensor] = []
    save = trainer.save_model

    def watched(*args: Any, **kwargs: Any) -> None:
        saved.append(trainer.model.net.weight.detach().clone())
        save(*args, **kwargs)

    trainer.save_model = watched
    trainer.add_callback(SiteCallback(trainer, ramp_steps=0))
    trainer.train()
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
