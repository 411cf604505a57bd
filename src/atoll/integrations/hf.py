"""Hugging Face's Trainer as a site of a run. Needs transformers and accelerate: `pip install "atoll[hf]"`.

trainer = Trainer(model=model, args=args, train_dataset=dataset)
trainer.add_callback(SiteCallback(trainer))
trainer.train()
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from atoll.integrations.training import LeasedLoader, SharedStream, Tokens, Training, stays_due, tokens_of
from atoll.node.worker.site import Site
from atoll.protocol.errors import ConfigError

NO_MEASURES = ("epoch", "_runtime", "_per_second", "_preparation_time")
"""What names of the trainer's figures end with that say nothing of the model."""


class SiteCallback(TrainerCallback):
    """Joins as training begins, counts each optimizer step, ends training with the run and not before, and leaves.
    An epoch is a pass over the data by all sites together.

    `tokens`: what a batch holds (by default its `input_ids`). `options`: of `atoll.join`, as `data_fingerprint`. Under
    a node the samples of `train_dataset` are leased, `max_steps` is the run's length, and a schedule follows the steps
    of the run. Without a node nothing changes.
    """

    def __init__(self, trainer: Trainer, tokens: Tokens = tokens_of, **options: Any) -> None:
        self._training = Training(tokens, **options)
        self._trainer = trainer
        self._make_loader, self._train = trainer.get_train_dataloader, trainer.training_step
        self._evaluate, self._save = trainer.evaluate, trainer._save_checkpoint
        self._loader: LeasedLoader | None = None
        self._num_passes = self._steps_of_pass = 0
        self._is_evaluating = False
        if (settings := self._training.settings) is None:
            return
        if settings.steps:
            trainer.args.max_steps = settings.steps
        trainer.get_train_dataloader = self._leased_loader  # type: ignore[method-assign, assignment, unused-ignore]
        trainer.training_step = self._counted_step  # type: ignore[method-assign, unused-ignore]
        trainer.evaluate = self._outer_evaluated  # type: ignore[method-assign, unused-ignore]
        trainer._save_checkpoint = self._announced_save  # type: ignore[method-assign, unused-ignore]

    @property
    def site(self) -> Site:
        """What `atoll.join` gives, while the trainer trains: `log`, `evaluates`, `shard` and the rest. Raises
        ConfigError before and after."""
        return self._training.joined

    # --- in the place of methods of the trainer

    def _leased_loader(self) -> LeasedLoader | SharedStream:
        """With the data set, the collator and the worker processes that the trainer would have."""
        if isinstance((made := self._make_loader()).dataset, IterableDataset):
            return SharedStream(self._training, made)
        self._loader = LeasedLoader.of(self._training, made, self._trainer.args.train_batch_size)
        return self._loader

    def _counted_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = self._train(model, inputs, num_items_in_batch)
        self._training.add(inputs, loss)
        return loss

    def _outer_evaluated(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Of several data sets the trainer calls this for each, within the call for all: what begins with the first
        call ends with it."""
        if self._is_evaluating:
            return self._evaluate(*args, **kwargs)  # type: ignore[no-any-return, unused-ignore]
        self._training.evaluate("the trainer's evaluation")
        self._is_evaluating = True
        try:
            found: dict[str, float] = self._evaluate(*args, **kwargs)
            self._training.measured({name: found[name] for name in found if not name.endswith(NO_MEASURES)})
        finally:
            self._is_evaluating = False
            self._training.go_on()
        return found

    def _announced_save(self, *args: Any, **kwargs: Any) -> None:
        """Ranks that write less than rank 0 does would wait for it in their next step, where nothing is announced."""
        with self._training.busy("the trainer's checkpoint"):
            self._save(*args, **kwargs)
            self._trainer.accelerator.wait_for_everyone()

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
        self._follow(state, kwargs["lr_scheduler"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if not self._training.step():
            control.should_training_stop = True
        elif self._training.site is not None and state.global_step >= state.max_steps:
            # Steps that were undone do not count in the run, and one in tokens may have more than were estimated.
            control.should_training_stop = False
            step, save, evaluate = state.global_step, control.should_save, control.should_evaluate
            control.should_save = stays_due(save, args.save_strategy, state.save_steps, step)
            control.should_evaluate = stays_due(evaluate, args.eval_strategy, state.eval_steps, step)
        self._follow(state, kwargs["lr_scheduler"])
        if self._loader is not None:
            self._count_passes(state, control, self._loader.steps_per_pass / args.gradient_accumulation_steps)
        return control

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._training.end()

    def _count_passes(self, state: TrainerState, control: TrainerControl, steps_per_pass: float) -> None:
        """The trainer takes the whole run for one epoch, as it is told of no length."""
        self._steps_of_pass += 1
        if self._steps_of_pass >= steps_per_pass:
            self._num_passes, self._steps_of_pass = self._num_passes + 1, 0
            control.should_epoch_stop = True
        state.epoch = self._num_passes + self._steps_of_pass / steps_per_pass

    def _follow(self, state: TrainerState, scheduler: Any) -> None:
        """Also to a new length, which scripts see in `max_steps`, where the trainer made the schedule."""
        make = self._made if self._trainer._created_lr_scheduler else None
        if num_steps := self._training.follow([scheduler], make):
            self._trainer.args.max_steps = state.max_steps = num_steps

    def _made(self, optimizer: Optimizer, num_steps: int) -> Any:
        kept, self._trainer.lr_scheduler = self._trainer.lr_scheduler, None  # or it makes none
        try:
            self._trainer.create_scheduler(num_steps, optimizer)
            return self._trainer.lr_scheduler  # as the trainer takes it: one of a subclass may return nothing
        finally:
            self._trainer.lr_scheduler = kept
