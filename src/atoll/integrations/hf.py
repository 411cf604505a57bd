"""Hugging Face's Trainer as a site of a run. Needs transformers and accelerate: `pip install "atoll[hf]"`.

trainer = Trainer(model=model, args=args, train_dataset=dataset)
trainer.add_callback(SiteCallback(trainer))
trainer.train()
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from atoll.integrations.training import LeasedLoader, Tokens, Training, follow, tokens_of
from atoll.protocol.errors import ConfigError

OF_THE_TRAINERS_LOADER = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")


class SiteCallback(TrainerCallback):
    """Joins as training begins, counts each optimizer step, ends training with the run, and leaves.

    `tokens`: what a batch holds (by default its `input_ids`). `options`: of `atoll.join`, as `data_fingerprint`. Under
    a node the samples of `train_dataset` are leased, `max_steps` is the run's length, and a schedule follows the steps
    of the run. Without a node nothing changes.
    """

    def __init__(self, trainer: Trainer, tokens: Tokens = tokens_of, **options: Any) -> None:
        self._training = Training(tokens, **options)
        self._trainer = trainer
        self._make_loader, self._train = trainer.get_train_dataloader, trainer.training_step
        if (settings := self._training.settings) is None:
            return
        if settings.steps:
            trainer.args.max_steps = settings.steps
        trainer.get_train_dataloader, trainer.training_step = self._leased_loader, self._counted_step

    # --- in the place of methods of the trainer

    def _leased_loader(self) -> LeasedLoader | DataLoader[Any]:
        """With the data set, the collator and the worker processes that the trainer would have. A data set without a
        length stays as it is: `site.shard` divides one, in the script."""
        made = self._make_loader()
        if isinstance(made.dataset, IterableDataset):
            return made  # type: ignore[no-any-return, unused-ignore]
        options = {name: getattr(made, name) for name in OF_THE_TRAINERS_LOADER}
        return LeasedLoader(self._training, made.dataset, self._trainer.args.train_batch_size, options)

    def _counted_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = self._train(model, inputs, num_items_in_batch)
        self._training.add(inputs, loss)
        return loss

    # --- events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._training.settings is None:
            return
        if state.global_step:
            raise ConfigError(
                "trainer.train(resume_from_checkpoint=...) under a node: leave it out; the parameters come from the "
                "run, and the state of the optimizer from the node's own checkpoint"
            )
        self._training.begin(kwargs["model"], kwargs["optimizer"])
        self._follow(kwargs["lr_scheduler"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._training.go_on()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if not self._training.step():
            control.should_training_stop = True
        self._follow(kwargs["lr_scheduler"])
        return self._pause(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        self._training.go_on()
        return self._pause(control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._training.go_on()
        if control.should_save:
            self._training.pause("the trainer's checkpoint")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._training.end()

    def _pause(self, control: TrainerControl) -> TrainerControl:
        """What the trainer does after this event takes long."""
        if control.should_evaluate:
            self._training.pause("the trainer's evaluation", evaluates=True)
        elif control.should_save:
            self._training.pause("the trainer's checkpoint")
        return control

    def _follow(self, scheduler: Any) -> None:
        if self._training.site is not None:
            follow(scheduler, self._training.site.inner_step)
