"""What a run is compared with, in one process and from the same first values, schedule and samples: gradients averaged
over the sites at every step, or one site alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.node.worker.data import Corpus
from atoll.node.worker.evaluate import held_out_bits_per_byte
from atoll.node.worker.model import Transformer
from atoll.node.worker.recipe import TextWindows, learning_rate, make_optimizer, next_byte_loss
from atoll.protocol.sample_order import GLOBAL_LINE, SampleOrder
from atoll.protocol.settings import RunSettings

Progress = Callable[[str, int], None]  # what is running, steps done


@dataclass(frozen=True, slots=True)
class Comparison:
    bits_per_byte_before: float
    bits_per_byte_after: float
    curve: tuple[tuple[int, float], ...] = ()
    """Steps done, and the held-out bits per byte at them: as often as was asked for."""


@dataclass(slots=True)
class Curve:
    """Evaluates a model at the first step after every so many; never, with 0."""

    model: Transformer
    corpus: Corpus
    sequence: int
    every: int
    points: list[tuple[int, float]] = field(default_factory=list)

    def at(self, step: int) -> None:
        last = self.points[-1][0] if self.points else 0
        if self.every and step // self.every > last // self.every:
            self.points.append((step, held_out_bits_per_byte(self.model, self.corpus, self.sequence)))


class Samples:
    """The run's samples in its order, shared out to sites batch by batch."""

    def __init__(self, settings: RunSettings, corpus: Corpus, num_sites: int) -> None:
        self._windows = TextWindows(corpus.training, settings.trainer.sequence)
        self._order = SampleOrder(settings.seed, GLOBAL_LINE, len(self._windows))
        self._batch_size, self._num_sites = settings.trainer.batch_size, num_sites

    def batch(self, site: int, index: int) -> Tensor:
        """(batch, sequence + 1) uint8; `site` counts from 0."""
        first = (index * self._num_sites + site) * self._batch_size
        return torch.stack([self._windows[self._order.sample(first + i)] for i in range(self._batch_size)])


class Trainee:
    """A model with its optimizer and the built-in trainer's schedule."""

    def __init__(self, settings: RunSettings, num_steps: int) -> None:
        self.settings, self.num_steps, self.step_index = settings, num_steps, 0
        self.model = Transformer(settings.model, settings.seed)
        self.optimizer = make_optimizer(self.model.parameters(), settings.trainer)

    def step(self, batches: list[Tensor]) -> None:
        trainer = self.settings.trainer
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(trainer, self.step_index, self.num_steps)
        self.optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            (next_byte_loss(self.model, batch) / len(batches)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), trainer.grad_clip)
        self.optimizer.step()
        self.step_index += 1


def ignore(name: str, steps: int) -> None:
    del name, steps


def train_data_parallel(
    settings: RunSettings, corpus: Corpus, num_sites: int, progress: Progress = ignore, curve_every: int = 0
) -> Comparison:
    """All sites' samples, gradients averaged at every step; of one site, as many steps on its own samples."""
    name = "data parallel" if num_sites > 1 else "one site alone"
    trainee = Trainee(settings, settings.steps)
    before = held_out_bits_per_byte(trainee.model, corpus, settings.trainer.sequence)
    samples = Samples(settings, corpus, num_sites)
    curve = Curve(trainee.model, corpus, settings.trainer.sequence, curve_every)
    for index in range(settings.steps):
        trainee.step([samples.batch(site, index) for site in range(num_sites)])
        progress(name, index + 1)
        curve.at(index + 1)
    after = held_out_bits_per_byte(trainee.model, corpus, settings.trainer.sequence)
    return Comparison(before, after, tuple(curve.points))
