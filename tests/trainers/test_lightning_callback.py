"""`atoll.integrations.lightning` against a node in memory: limits, accumulated gradients, schedules, validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

pytest.importorskip("lightning", reason="lightning is not installed: make test-more")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from atoll.integrations import training as training_module
from atoll.integrations.lightning import SiteCallback
from atoll.node.core.events import MergeMode
from atoll.node.worker import join as join_module
from atoll.node.worker import joined_site
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import RunSettings
from tests.harness.fake_node import SNAPSHOT, STOP, FakeNode, apply

pytestmark = [pytest.mark.more, pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

SETTINGS = RunSettings(run_id="r", steps=10, min_sites=2, max_sites=8)
POINTS = TensorDataset(torch.linspace(0, 1, 24).reshape(24, 1), torch.linspace(0, 2, 24).reshape(24, 1))


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.rates: list[float] = []
        self.seen: list[float] = []
        self.losses: list[float] = []
        self.num_epochs = 0
        self.length = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2 == 0:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        loss: Tensor = (self.net(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.net.weight.item())
        self.log("val_weight", self.seen[-1])

    def on_train_epoch_end(self) -> None:
        self.num_epochs += 1

    def configure_optimizers(self) -> Any:
        self.length = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    fake = FakeNode()
    for module in (join_module, training_module):
        monkeypatch.setattr(module, "connect", lambda: fake.connection(SETTINGS))
    monkeypatch.setattr(joined_site, "disconnect", fake.close)
    return fake


def test_a_late_joiner_trains_to_the_end_of_the_run(node: FakeNode) -> None:
    """Two batches of 2 a step, three steps an epoch, of which the trainer was to do one."""
    node.script = [(0, apply(MergeMode.REPLACE, 7, run_step=3, fresh=True)), (7, SNAPSHOT), (7, STOP)]
    model, site = Line(), SiteCallback(ramp_steps=0)
    trainer = Trainer(
        max_epochs=1, min_epochs=50, accumulate_grad_batches=2, accelerator="cpu", logger=False, callbacks=[site],
        enable_checkpointing=False, enable_progress_bar=False, use_distributed_sampler=False, num_sanity_val_steps=0,
        enable_model_summary=False,
    )  # fmt: skip
    loader = site.loader(POINTS, 2)
    assert len(loader) == 6
    trainer.fit(model, loader, DataLoader(POINTS, 24))
    assert trainer.global_step == 7
    assert model.length == 10
    assert model.rates == pytest.approx([0.1 / (1 + step) for step in range(3, 10)])
    (sealed,) = node.said("sealed")
    assert (sealed["tokens"], sealed["num_samples_used"], sealed["num_steps"]) == (28, 28, 7)
    assert sealed["loss_sum"] == pytest.approx(sum(model.losses) / 2), "two batches a step"
    assert model.num_epochs >= 2
    assert set(model.seen[:2]) == {node.values(node.publish, "net.weight").item()}, "validation of outer parameters"
    logged = [value for said in node.said("logged") for value in said["values"]]
    assert {(value.name, value.step, value.of_outer) for value in logged if value.of_outer} == {("val_weight", 3, True)}
    assert {value.name for value in logged} == {"val_weight"}, "and not what training logs"
    assert logged[0].value == pytest.approx(model.seen[0])
    assert [said["what"] for said in node.said("busy")][:2] == ["the trainer's validation", ""]
    assert node.said("goodbye") == [{"run_over": True}]


def fitted(model: LightningModule, site: SiteCallback, *callbacks: Any, **options: Any) -> Trainer:
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[*callbacks, site], enable_progress_bar=False,
        use_distributed_sampler=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, site.loader(POINTS, 2))
    return trainer


@pytest.mark.parametrize("run_length", [0, 20], ids=["as-it-began", "changed-before"])
def test_a_schedule_that_asks_for_the_length_follows_a_new_one(
    node: FakeNode, capsys: pytest.CaptureFixture[str], run_length: int
) -> None:
    """An operator sets 20 steps in the place of 10. Schedules are the script's: whichever does not ask is said."""
    node.script = [
        (0, apply(MergeMode.REPLACE, 2, run_step=4, fresh=True, run_length=run_length)), (2, SNAPSHOT),
        (2, apply(MergeMode.REPLACE, 4, run_step=6, version=1, run_length=20)), (4, SNAPSHOT), (4, STOP),
    ]  # fmt: skip
    site = SiteCallback(ramp_steps=0)

    class Decaying(Line):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (site.run_length or 5))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    assert site.run_length == 10
    model = Decaying()
    fitted(model, site, accumulate_grad_batches=2, enable_checkpointing=False)
    before = run_length or 10
    assert model.rates == pytest.approx([1 - 4 / before, 1 - 5 / before, 1 - 6 / 20, 1 - 7 / 20])
    assert capsys.readouterr().err.count("the run has 20 steps now, and had 10") == 1


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Any:
        return (POINTS[index] for index in range(24))


class Seeing(Line):
    """Keeps which points it trains on, and logs by its callback's site."""

    def __init__(self, site: SiteCallback) -> None:
        super().__init__()
        self.of_trainer = site
        self.trained: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trained.append([round(23 * value) for value in batch[0].flatten().tolist()])
        self.of_trainer.site.log({"mine": float(len(self.trained))})
        return super().training_step(batch, batch_idx)


def test_of_a_stream_each_site_takes_its_batches(node: FakeNode) -> None:
    """Lightning reads the first one before the site has joined; of the others it is one in three, until they end."""
    node.script = [(0, apply(MergeMode.REPLACE, 6, fresh=True, site_index=1, num_sites=3)), (6, SNAPSHOT), (6, STOP)]
    site = SiteCallback(ramp_steps=0)
    with pytest.raises(ConfigError, match="asked for outside of training"):
        _ = site.site
    model = Seeing(site)
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[site], enable_checkpointing=False, enable_progress_bar=False,
        use_distributed_sampler=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, site.loader(Stream(), 2))
    batches = [0, 2, 5, 8, 11, 1]  # of a second pass, in which the site has joined, those of place 1, 4, ...
    assert model.trained == [[2 * batch, 2 * batch + 1] for batch in batches]
    values = [value for said in node.said("logged") for value in said["values"]]
    assert [value.value for value in values if value.name == "mine"] == [1, 2, 3, 4, 5, 6]


def test_saving_is_announced(node: FakeNode, tmp_path: Path) -> None:
    """As long as it takes, and no longer; a trainer that saves after the run has nobody to tell."""
    node.script = [(0, apply(MergeMode.REPLACE, 4, fresh=True)), (4, SNAPSHOT), (4, STOP)]
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trainer = fitted(Line(), SiteCallback(ramp_steps=0, busy_limit_s=7.0), saves)
    trainer.save_checkpoint(tmp_path / "last")
    assert len(list(tmp_path.iterdir())) == 3
    busy, over = {"what": "the trainer's checkpoint", "limit_s": 7.0}, {"what": "", "limit_s": 0.0}
    assert node.said("busy") == [busy, over] * 2


def test_a_script_that_fits_again_after_an_error_saves(node: FakeNode, tmp_path: Path) -> None:
    """As one that looks for the largest model that fits."""
    node.script = [(0, apply(MergeMode.REPLACE, 2, fresh=True)), (2, SNAPSHOT), (2, STOP)]

    class TooLarge(Line):
        def configure_optimizers(self) -> Any:
            raise MemoryError

    site = SiteCallback(ramp_steps=0)
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=1), site],
        enable_progress_bar=False, use_distributed_sampler=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(MemoryError):
        trainer.fit(TooLarge(), site.loader(POINTS, 2))
    trainer.fit(Line(), site.loader(POINTS, 2))
    assert [busy["what"] for busy in node.said("busy")] == ["the trainer's checkpoint", ""] * 2


def test_without_a_node_it_is_an_ordinary_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_module, "connect", lambda: None)
    model, site = Line(), SiteCallback()
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", logger=False, callbacks=[site], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, site.loader(POINTS, 2))
    assert (trainer.global_step, model.num_epochs) == (24, 2)
