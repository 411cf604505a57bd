"""What callbacks of trainers share: a site that is joined, counted and left by events, and data that is leased once it
is joined."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import islice
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from atoll.node.worker.connection import connect, rank_and_world
from atoll.node.worker.join import join
from atoll.node.worker.loader import Loader, check_options
from atoll.node.worker.script_state import follows_the_run
from atoll.node.worker.site import DEFAULT_BUSY_LIMIT_S, Site
from atoll.node.worker.wrapped import unwrapped
from atoll.protocol.errors import ConfigError
from atoll.protocol.logged import MAX_NAME_CHARACTERS, NAME
from atoll.protocol.settings import RunSettings

Batch = TypeVar("Batch")
Tokens = Callable[[Any], int]
"""A batch -> how many tokens (or samples) it holds: the weight of a site in the averages."""
MakeSchedule = Callable[[torch.optim.Optimizer, int], Any]
"""An optimizer and the steps of the run -> the schedule that the trainer makes for them."""


def tokens_of(batch: Any) -> int:
    """Of `input_ids` all of them, padding too; else the size of the first dimension of the first tensor."""
    if isinstance(batch, Mapping) and isinstance(ids := batch.get("input_ids"), Tensor):
        return ids.numel()
    for part in batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]:
        if isinstance(part, Tensor) and part.dim():
            return len(part)
    raise ConfigError(f"a batch of {type(batch).__name__} has no tensor to count; say tokens=, which counts one")


class Training:
    """One site, from the first event of a trainer to the last. `options`: of `atoll.join`. `busy_limit_s`: an
    evaluation or a checkpoint of the trainer that takes longer is a hang.

    Without a node nothing is joined, and the trainer trains as it always does.
    """

    def __init__(
        self, tokens: Tokens = tokens_of, *, busy_limit_s: float = DEFAULT_BUSY_LIMIT_S, **options: Any
    ) -> None:
        connection = connect()
        self.settings: RunSettings | None = None if connection is None else connection.settings
        """Of the run, from before the model is there; None without a node."""
        self.site: Site | None = None
        """Between the first event and the last."""
        self._alone = Site() if self.settings is None else None
        self._options, self._busy_limit_s = options, busy_limit_s
        self._num_steps = 0 if self.settings is None else self.settings.steps  # of the run, as schedules have it
        self._count = tokens
        self._tokens = 0  # since the last step
        self._loss: Tensor | None = None
        self._pause = ExitStack()
        self._said: set[str] = set()  # names of values that are left out

    @property
    def is_joined(self) -> bool:
        return self.site is not None

    @property
    def joined(self) -> Site:
        """For scripts. Without a node it is a site alone, whose steps nobody counts. Raises ConfigError."""
        if (site := self.site or self._alone) is None:
            raise ConfigError(
                "the trainer's site was asked for outside of training: it is joined as training begins, and is there "
                "until training ends; ask in a step, an evaluation or a callback"
            )
        return site

    def begin(self, model: nn.Module | Sequence[nn.Module], optimizers: Any, **options: Any) -> None:
        """`options`: what the trainer knows, where the script says nothing else."""
        if self.settings is not None:
            self.site = join(model, optimizers, **{**options, **self._options})

    def add(self, batch: Any, loss: Tensor | None) -> None:
        """A batch was trained on. Several losses of one step are summed up."""
        if self.settings is None:
            return
        self._tokens += self._count(batch)
        if loss is not None:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def step(self) -> bool:
        """The optimizer did one. Returns whether training goes on."""
        if self.site is None:
            return True
        tokens, loss = self._tokens, self._loss
        self._tokens, self._loss = 0, None
        try:
            return self.site.step(tokens=tokens, loss=loss).running
        except BaseException as error:
            self.end(error)
            raise

    def follow(self, schedules: Iterable[Any], make: MakeSchedule | None = None) -> int:
        """Set the schedules to the step of the run. Returns how many steps it has, where an operator has changed them
        (`atoll set`) since schedules were made, and else 0, as of a run in tokens.

        `make`: has schedules of that length from then on. Without it, it is said that they may have the old one.
        """
        if (site := self.site) is None:
            return 0
        before, now = self._num_steps, (site.run_length or 0) if self._num_steps else 0
        self._num_steps = now
        stays = make is None
        for schedule in schedules:
            if now != before and make is not None:
                stays |= not _remake(schedule, make, now)
            follow(schedule, site.inner_step, again=now != before)
        if now == before:
            return 0
        if stays and site.rank == 0:
            sys.stderr.write(
                f"atoll: the run has {now} steps now, and had {before}: a learning-rate schedule that the script made "
                "for those stays as it is, unless it asks for the length at each step (docs/trainers.md)\n"
            )
        return now

    def busy(self, what: str) -> AbstractContextManager[None]:
        """The trainer does something else than training."""
        return nullcontext() if self.site is None else self.site.busy(what, self._busy_limit_s)

    def pause(self, what: str) -> None:
        """The same, until `go_on`."""
        self._pause.enter_context(self.busy(what))

    def evaluate(self, what: str) -> None:
        """The same as `pause`, with the outer parameters in place where the site has them."""
        self.pause(what)
        if self.site is not None and self.site.has_outer_parameters:
            self._pause.enter_context(self.site.outer_parameters())

    def measured(self, values: Mapping[str, Any]) -> None:
        """By the trainer, between `evaluate` and `go_on`. A trainer's name or value that no curve can have is left out,
        and said once: it is no reason to end a training."""
        if self.site is None:
            return
        problems = {name: _problem_of_a_curve(name, value) for name, value in values.items()}
        for name, problem in problems.items():
            if problem and name not in self._said and self.site.rank == 0:
                sys.stderr.write(f"atoll: {name!r} of the trainer is left out of the run's curves: {problem}\n")
                self._said.add(name)
        self.site.log({name: value for name, value in values.items() if not problems[name]})

    def share(self, batches: Iterable[Batch], *, by_site: bool = True) -> Iterable[Batch]:
        """Of a stream without a length, which all sites read alike: one in so many batches as there are sites, once it
        is iterated. All of them in a run whose sites have data of their own. `by_site`: as in `site.shard`."""
        if self.site is None or self.settings is None or self.settings.data == "local":
            return batches
        return self.site.shard(batches, by_site=by_site)

    def go_on(self) -> None:
        self._pause.close()

    def end(self, error: BaseException | None = None) -> None:
        self.go_on()
        site, self.site = self.site, None
        if site is not None:
            site.close(error)


def _problem_of_a_curve(name: Any, value: Any) -> str:
    """Why no curve has it; empty if one may. `site.log` says itself where a number is not finite."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        return f"a name is 1 to {MAX_NAME_CHARACTERS} letters, digits and _ - . /"
    is_number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())
    return "" if is_number else f"{value!r:.100} is no number"


def stays_due(is_due: bool, strategy: str, every: float, step: int) -> bool:
    """Of what a trainer does now and then (`strategy`), at a step that it takes for the last one, where it does it once
    more. The run goes on: what is due by the steps in between stays."""
    return is_due and (strategy != "steps" or (every > 0 and step % every == 0))


def follow(scheduler: Any, step: int, *, again: bool = False) -> bool:
    """Set a schedule to a step of the run, which is not that of this process where a site joined late. Returns whether
    it can be set: torch's LambdaLR can, which is what transformers' schedules are. `again`: its rates have changed."""
    scheduler = getattr(scheduler, "scheduler", scheduler)  # of accelerate's
    if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        return False
    follows_the_run(scheduler.optimizer)
    if again or scheduler.last_epoch != step:
        scheduler.last_epoch = step
        rates = [base * at(step) for base, at in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        for group, rate in zip(unwrapped(scheduler.optimizer).param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates
    return True


def _remake(scheduler: Any, make: MakeSchedule, num_steps: int) -> bool:
    """Its rates are those of one that is made now. What that does to an optimizer is done to one in its place. False
    if it stays as it is, with rates of the old length."""
    scheduler = getattr(scheduler, "scheduler", scheduler)
    if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        return True  # it is not of the run's steps, see `follow`
    groups = [{"params": [torch.zeros(1)], "lr": float(rate)} for rate in scheduler.base_lrs]
    default = unwrapped(scheduler.optimizer).defaults["lr"]
    made = make(torch.optim.SGD(groups, float(default)), num_steps)
    made = getattr(made, "scheduler", made)
    if not isinstance(made, torch.optim.lr_scheduler.LambdaLR) or len(made.lr_lambdas) != len(groups):
        return False
    scheduler.lr_lambdas = made.lr_lambdas
    return True


class SharedStream:
    """A trainer's loader of a stream, of which this site takes its batches. What a trainer reads of it before it has
    joined every site has: of Lightning, which reads one batch ahead, the first one."""

    def __init__(self, training: Training, loader: DataLoader[Any], *, by_site: bool = True) -> None:
        """`by_site`: the ranks of a site have divided the stream among themselves."""
        self._training, self._loader, self._by_site = training, loader, by_site

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # of what a trainer does with its loader, but for the length

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while not self._training.is_joined and (read := list(islice(batches, 1))):
            yield from read
        yield from self._training.share(batches, by_site=self._by_site)


class LeasedLoader:
    """A loader that a trainer may have before its site is joined; its samples are leased from then on. A loop over it
    goes on until the run is over."""

    def __init__(self, training: Training, dataset: Dataset[Any], batch_size: int, options: dict[str, Any]) -> None:
        check_options(dataset, batch_size, options)
        if not isinstance(dataset, Sized):
            raise ConfigError(f"{type(dataset).__name__} has no length: its samples cannot be leased")
        self.dataset, self.batch_size = dataset, batch_size
        self._training, self._options = training, options
        self._num_samples = len(dataset)
        self._loader: Loader | None = None

    @classmethod
    def of(cls, training: Training, made: Any, batch_size: int) -> LeasedLoader:
        """With data set, collator and worker processes of a loader that the trainer has made."""
        names = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
        return cls(training, made.dataset, batch_size, {name: getattr(made, name) for name in names})

    @property
    def steps_per_pass(self) -> int:
        """About how many batches this rank is given in a pass over the data. Before there is a site, by
        `run.min_sites`."""
        if self._loader is not None:
            return self._loader.steps_per_pass
        settings = self._training.settings
        num_sites = settings.min_sites if settings is not None and settings.data != "local" else 1
        return math.ceil(self._num_samples / (self.batch_size * rank_and_world()[1] * num_sites))

    def __iter__(self) -> Iterator[Any]:
        if self._loader is None:
            if self._training.site is None:
                raise ConfigError("the trainer asks for samples before its callback has joined: add the callback to it")
            loader = self._training.site.loader(self.dataset, self.batch_size, **self._options)
            assert isinstance(loader, Loader)
            self._loader = loader
        yield from self._loader
