"""torchtitan's Trainer as a site of a run. Needs torchtitan: `pip install "atoll[torchtitan]"`.

trainer = build(ConfigManager().parse_args())  # in the place of config.build()
trainer.train()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.trainer import Trainer

from atoll.integrations.training import LeasedLoader, Training
from atoll.node.worker.site import Site
from atoll.protocol.errors import ConfigError


def build(config: Trainer.Config, **options: Any) -> Trainer:
    """What `config.build()` gives, as a site: it joins as `train` begins, counts each step, trains to the end of the
    run and not before, and leaves.

    `options`: of `atoll.join`, as `data_fingerprint`; and `busy_limit_s`. Under a node `training.steps` is the run's
    length, and samples are leased, where the trainer's loader has a data set with a length. Without a node nothing
    changes. A site's weight is the number of labels that count.
    """
    training = Training(int, **options)
    if training.settings is not None and training.settings.steps:
        config.training.steps = training.settings.steps
    trainer: Trainer = config.build()
    trainer.atoll_training = training  # type: ignore[attr-defined, unused-ignore]
    if training.settings is not None:
        _Attached(trainer, training)
    return trainer


def site_of(trainer: Trainer) -> Site:
    """Of a trainer that `build` made, while it trains: what `atoll.join` gives. Raises ConfigError before and after."""
    return trainer.atoll_training.joined  # type: ignore[attr-defined, no-any-return, unused-ignore]


class _Attached:
    """What takes the place of methods of this trainer alone."""

    def __init__(self, trainer: Any, training: Training) -> None:
        self._trainer, self._training = trainer, training
        self._whole, self._batches, self._step = trainer.train, trainer.batch_generator, trainer.train_step
        self._forward, checkpointer = trainer.forward_backward_step, trainer.checkpointer
        self._load, self._save = checkpointer.load, checkpointer.save
        self._waiting: deque[int] = deque()  # labels that count of each batch that is fetched and not trained on
        self._labels_of_step = 0
        trainer.train, trainer.batch_generator, trainer.train_step = self.train, self.batches, self.step
        trainer.forward_backward_step, trainer.should_continue_training = self.forward, self.goes_on
        checkpointer.load, checkpointer.save = self.load, self.save
        if trainer.config.validator.enable:
            self._validate, trainer.validator.validate = trainer.validator.validate, self.validate
            self._say = trainer.metrics_processor.log_validation
            trainer.metrics_processor.log_validation = self.measured
        dataset = getattr(loader := trainer.dataloader, "dataset", None)
        if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"):
            trainer.dataloader = LeasedLoader.of(training, loader, loader.batch_size)

    def train(self) -> None:
        try:
            self._whole()
        except BaseException as error:
            self._training.end(error)
            raise
        self._training.end()

    def load(self, *args: Any, **kwargs: Any) -> Any:
        """The first thing that training does: the weights that a model begins with are there when the site joins."""
        found = self._load(*args, **kwargs)
        trainer, dims = self._trainer, self._trainer.parallel_dims
        if trainer.step:
            raise ConfigError(
                f"torchtitan has loaded its checkpoint of step {trainer.step} under a node: set checkpoint.folder to a "
                "new one; the parameters come from the run, and the optimizer's state from the node's own checkpoint"
            )
        self._training.begin(
            trainer.model_parts,
            list(trainer.optimizers.optimizers),
            data_rank=dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0,
            names={} if dims.pp_enabled or dims.ep_enabled else None,  # torchtitan's names are the whole model's
        )
        self._follow()
        return found

    def goes_on(self) -> bool:
        self._training.go_on()
        return self._training.site is not None and self._training.site.running

    def batches(self, of_loader: Iterable[Any]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """While they are on the host, the labels are counted."""
        batches = self._batches(of_loader)
        for inputs, labels in batches if isinstance(of_loader, LeasedLoader) else self._training.share(batches):
            self._waiting.append(int((labels != IGNORE_INDEX).sum()))
            yield inputs, labels

    def forward(self, *, input_dict: Any, labels: Any, global_valid_tokens: Tensor) -> Tensor:
        self._labels_of_step = self._labels_of_step or sum(self._waiting)
        loss: Tensor = self._forward(input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens)
        num_labels = sum(self._waiting.popleft() for _ in (labels if isinstance(labels, list) else [labels]))
        dims = self._trainer.parallel_dims
        if dims.pp_enabled and not self._trainer.pp_has_last_stage:
            self._training.add(num_labels, None)
        else:  # the trainer's is the sum of this rank's labels by the number of all ranks'; new memory, for CUDA graphs
            scale = global_valid_tokens * (dims.cp / max(1, self._labels_of_step))
            self._training.add(num_labels, loss.detach().sum() * scale)
        return loss

    def step(self, data_iterator: Iterator[Any]) -> None:
        self._labels_of_step = 0
        self._step(data_iterator)
        self._training.step()
        self._follow()

    def save(self, curr_step: int, last_step: bool = False) -> Any:
        checkpoint = self._trainer.config.checkpoint
        if checkpoint.enable and (last_step or curr_step == 1 or curr_step % checkpoint.interval == 0):
            self._training.pause("the trainer's checkpoint")
        found = self._save(curr_step, last_step=last_step)
        self._training.go_on()
        return found

    def validate(self, model_parts: list[torch.nn.Module], step: int) -> None:
        self._training.evaluate("the trainer's validation")
        self._validate(model_parts, step)
        self._training.go_on()

    def measured(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        self._training.measured({"validation_loss": loss, **(extra_metrics or {})})
        self._say(loss=loss, step=step, extra_metrics=extra_metrics)

    def _follow(self) -> None:
        """Schedules, checkpoints and logs have the steps of the run, which are not this process's where it is late."""
        if (site := self._training.site) is not None:
            self._trainer.step = site.inner_step
            if num_steps := self._training.follow(self._trainer.lr_schedulers.schedulers, self._made):
                self._trainer.config.training.steps = num_steps

    def _made(self, optimizer: Optimizer, num_steps: int) -> Any:
        made = self._trainer.config.lr_scheduler.build(optimizers=[optimizer], training_steps=num_steps)
        return made.schedulers[0]
