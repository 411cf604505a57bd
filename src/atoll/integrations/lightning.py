"""Lightning's Trainer as a site of a run. Needs lightning: `pip install "atoll[lightning]"`.

site = SiteCallback()
trainer = Trainer(callbacks=[site], use_distributed_sampler=False)
trainer.fit(model, site.loader(dataset, batch_size=32))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from atoll.integrations.training import LeasedLoader, SharedStream, Tokens, Training, tokens_of
from atoll.node.worker.site import Site

NO_LIMIT = -1


class SizedLoader(LeasedLoader):
    def __len__(self) -> int:
        return self.steps_per_pass


class SiteCallback(Callback):
    """Joins as fitting begins, counts each optimizer step, ends fitting with the run and not before, and leaves.

    `tokens`: what a batch holds (by default its `input_ids`, or its samples). `options`: of `atoll.join`, as
    `data_fingerprint`. Schedules that Lightning steps with each optimizer step follow the steps of the run, if they can
    be set (`LambdaLR`). Without a node nothing changes.
    """

    def __init__(self, tokens: Tokens = tokens_of, **options: Any) -> None:
        self._training = Training(tokens, **options)
        self._save: Callable[..., None]
        self._num_steps = 0  # of optimizers
        self._measured: dict[str, Tensor] = {}  # before a validation

    @property
    def site(self) -> Site:
        """What `atoll.join` gives, while the trainer trains: `log`, `evaluates`, `shard` and the rest. Raises
        ConfigError before and after."""
        return self._training.joined

    def loader(
        self, dataset: Dataset[Any], batch_size: int, **options: Any
    ) -> SizedLoader | SharedStream | DataLoader[Any]:
        """Samples that are leased, as `site.loader` does it, with options of a torch DataLoader. Its length, which is
        Lightning's epoch, is about a pass's share of this rank. Without a node it is the DataLoader, shuffled.

        Of an IterableDataset, which all ranks of all sites read alike, it is this rank's batches, without an account.
        """
        is_stream = isinstance(dataset, IterableDataset)
        if self._training.settings is None:
            return DataLoader(dataset, batch_size, shuffle=not is_stream, **options)
        if is_stream:
            return SharedStream(self._training, DataLoader(dataset, batch_size, **options), by_site=False)
        return SizedLoader(self._training, dataset, batch_size, options)

    @property
    def run_length(self) -> int | None:
        """As `site.run_length`, for schedules that ask at each step: `atoll set` changes it. Before the site has joined
        it is that of the run's settings; None without a node."""
        settings, site = self._training.settings, self._training.site
        return site.run_length if site is not None else (settings.steps or settings.tokens) if settings else None

    # --- events

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before optimizers and schedules are made: `trainer.estimated_stepping_batches` is the run's, if in steps."""
        settings = self._training.settings
        if settings is None or stage != "fit":
            return
        if trainer.save_checkpoint != self._announced_save:  # as where a script fits again after an error
            self._save = trainer.save_checkpoint
            trainer.save_checkpoint = self._announced_save  # type: ignore[method-assign, unused-ignore]
        if settings.steps:
            trainer.fit_loop.epoch_loop.max_steps = settings.steps
            trainer.fit_loop.max_epochs = NO_LIMIT

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._training.settings is None:
            return
        # The run alone knows its end: of steps that were undone Lightning knows nothing.
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = NO_LIMIT
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
        self._num_steps = trainer.global_step
        self._training.begin(pl_module, trainer.optimizers)
        self._follow(trainer)
        self._stop_unless(trainer, self._training.site is not None and self._training.site.running)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._training.go_on()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        found = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # Lightning has divided it by the batches of a step.
        self._training.add(batch, found if isinstance(found, Tensor) else None)
        if trainer.global_step == self._num_steps:
            return  # gradients are accumulated
        self._num_steps = trainer.global_step
        self._stop_unless(trainer, self._training.step())
        self._follow(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._training.is_joined:
            self._training.evaluate("the trainer's validation")
            self._measured = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = trainer.callback_metrics  # those of training too, which a validation leaves as they are
        self._training.measured({name: found[name] for name in found if found[name] is not self._measured.get(name)})
        self._training.go_on()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._training.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._training.end(exception)

    def _stop_unless(self, trainer: Trainer, goes_on: bool) -> None:
        if not goes_on:
            trainer.should_stop = True

    def _announced_save(self, *args: Any, **kwargs: Any) -> None:
        with self._training.busy("the trainer's checkpoint"):
            self._save(*args, **kwargs)

    def _follow(self, trainer: Trainer) -> None:
        configs = trainer.lr_scheduler_configs
        self._training.follow(c.scheduler for c in configs if c.interval == "step" and c.frequency == 1)
