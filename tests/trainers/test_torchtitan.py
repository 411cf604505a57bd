"""`examples/torchtitan_trainer.py`, torchtitan's Trainer and its Llama on the CPU, as two sites: real processes, and
the real library."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-more")
pytest.importorskip("triton", reason="triton, which torchtitan imports, is not installed: make test-more")

from atoll.integrations import training as training_module
from atoll.integrations.training import Training
from atoll.node.core.events import MergeMode
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import RunSettings
from tests.harness.fake_node import SNAPSHOT, apply, in_memory
from tests.trainers.sites import EXAMPLES, late_joiner_ends_equal

pytestmark = [pytest.mark.more, pytest.mark.timeout(900)]

ON_CPU = Path(__file__).with_name("torchtitan_on_cpu.py")
SEQUENCE = 32


def test_two_sites_one_of_them_late_end_equal(tmp_path: Path) -> None:
    """Schedules and the trainer's counts follow the run; the samples are leased from the trainer's own data set."""
    words = [
        str(EXAMPLES / "torchtitan_trainer.py"), "--module", "torchtitan_trainer", "--config", "bytes_debugmodel",
        "--training.local_batch_size", "2", "--training.seq_len", str(SEQUENCE), "--dump_folder", str(tmp_path / "out"),
        "--parallelism.spmd_backend", "partial_dtensor",  # the other ways want a newer torch, where ranks are several
    ]  # fmt: skip
    status = late_joiner_ends_equal(tmp_path, str(ON_CPU), words, tokens_a_sample=SEQUENCE, chunk_elements=1 << 18)
    assert status["num_parameters"] > 1_000_000


@pytest.mark.filterwarnings("ignore")  # of what torchtitan imports
def test_a_validation_is_a_curve_of_the_outer_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stand-in that has what the site takes the place of, and says its loss as torchtitan's does."""
    from atoll.integrations import torchtitan as integration

    settings = RunSettings(run_id="r", steps=100, min_sites=2, max_sites=8)
    node = in_memory(monkeypatch, settings)
    monkeypatch.setattr(training_module, "connect", lambda: node.connection(settings))
    node.script = [(0, apply(MergeMode.REPLACE, 9, run_step=40, fresh=True))]
    net, said = nn.Linear(2, 1), []
    processor = SimpleNamespace(log_validation=lambda **given: said.append(given))
    validator = SimpleNamespace(validate=lambda parts, step: processor.log_validation(loss=0.5, step=step))
    checkpointer = SimpleNamespace(load=None, save=None)
    trainer: Any = SimpleNamespace(
        train=None, batch_generator=None, train_step=None, forward_backward_step=None, checkpointer=checkpointer,
        validator=validator, metrics_processor=processor, dataloader=None,
        config=SimpleNamespace(validator=SimpleNamespace(enable=True)), lr_schedulers=SimpleNamespace(schedulers=[]),
    )  # fmt: skip
    training = Training(int)
    integration._Attached(trainer, training)
    training.begin(net, torch.optim.SGD(net.parameters(), lr=0.1))
    trainer.validator.validate([net], 40)
    training.end()
    ((value,),) = [said["values"] for said in node.said("logged")]
    assert (value.name, value.step, value.value, value.of_outer) == ("validation_loss", 40, 0.5, True)
    assert said == [{"loss": 0.5, "step": 40, "extra_metrics": None}]


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_torchtitan_is_refused_and_a_script_has_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.integrations import torchtitan as integration

    settings = RunSettings(run_id="r", steps=50, min_sites=2, max_sites=8)
    node = in_memory(monkeypatch, settings)
    monkeypatch.setattr(training_module, "connect", lambda: node.connection(settings))
    node.script = [(0, apply(MergeMode.REPLACE, 9, run_step=40, fresh=True))]
    net = nn.Linear(2, 1)
    made: Any = SimpleNamespace(
        train=None, batch_generator=None, train_step=None, forward_backward_step=None, dataloader=None, step=7,
        checkpointer=SimpleNamespace(load=lambda: True, save=None), model_parts=[net],
        optimizers=SimpleNamespace(optimizers=[torch.optim.SGD(net.parameters(), lr=1.0)]),
        config=SimpleNamespace(validator=SimpleNamespace(enable=False)), lr_schedulers=SimpleNamespace(schedulers=[]),
        parallel_dims=SimpleNamespace(dp_enabled=False, pp_enabled=False, ep_enabled=False),
    )  # fmt: skip
    config: Any = SimpleNamespace(training=SimpleNamespace(steps=1), build=lambda: made)
    trainer = integration.build(config)
    assert config.training.steps == 50
    with pytest.raises(ConfigError, match=r"its checkpoint of step 7 under a node: set checkpoint\.folder to a new"):
        trainer.checkpointer.load()
    assert node.said("join") == []
    with pytest.raises(ConfigError, match="asked for outside of training"):
        integration.site_of(trainer)
    trainer.step = 0
    assert trainer.checkpointer.load()
    assert (integration.site_of(trainer).inner_step, trainer.step) == (40, 40)
    made.atoll_training.end()


@pytest.mark.filterwarnings("ignore")
def test_a_schedule_follows_a_new_length_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the length that it was made for torchtitan's linear one has rates below zero."""
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

    from atoll.integrations import torchtitan as integration

    settings = RunSettings(run_id="r", steps=50, min_sites=2, max_sites=8)
    node = in_memory(monkeypatch, settings)
    monkeypatch.setattr(training_module, "connect", lambda: node.connection(settings))
    node.script = [
        (0, apply(MergeMode.REPLACE, 1, run_step=50, fresh=True, run_length=100)), (1, SNAPSHOT),
        (1, apply(MergeMode.REPLACE, 9, run_step=51, version=1, run_length=200)),
    ]  # fmt: skip
    net = nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1.0)
    schedule = LRSchedulersContainer.Config(warmup_steps=10)
    config = SimpleNamespace(
        validator=SimpleNamespace(enable=False), lr_scheduler=schedule, training=SimpleNamespace(steps=50)
    )
    schedules = schedule.build(optimizers=[optimizer], training_steps=50)

    def train_step(_: Any) -> None:
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        schedules.step()

    trainer: Any = SimpleNamespace(
        train=None, batch_generator=None, train_step=train_step, forward_backward_step=None, dataloader=None,
        checkpointer=SimpleNamespace(load=lambda: True, save=None), config=config, lr_schedulers=schedules, step=0,
        model_parts=[net], optimizers=SimpleNamespace(optimizers=[optimizer]),
        parallel_dims=SimpleNamespace(dp_enabled=False, pp_enabled=False, ep_enabled=False),
    )  # fmt: skip
    training = Training(int, ramp_steps=0)
    integration._Attached(trainer, training)
    expected = [LRSchedulersContainer.Config(warmup_steps=10).build(
        optimizers=[torch.optim.SGD(net.parameters(), lr=1.0)], training_steps=steps
    ).schedulers[0].lr_lambdas[0](step) for step, steps in ((50, 100), (51, 200))]  # fmt: skip
    trainer.checkpointer.load()
    rates = [optimizer.param_groups[0]["lr"]]
    training.add(3, None)
    trainer.train_step(None)
    rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(expected)
    assert config.training.steps == 200
    training.end()
