"""What a run is compared with, each in one process and from the same first values, schedule and samples.

- `train_alone`: one site, the same number of steps.
- `train_data_parallel`: gradients averaged over the sites at every step.
- `simulate_diloco`: DiLoCo (2311.08105) without a network or a codec, to choose an outer optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    name: str
    bits_per_byte_before: float
    bits_per_byte_after: float
    num_steps: int


class _Samples:
    """The run's samples in its order, shared out to sites batch by batch."""

    def __init__(self, settings: RunSettings, corpus: Corpus, num_sites: int) -> None:
        self._windows = TextWindows(corpus.training, settings.trainer.sequence)
        self._order = SampleOrder(settings.seed, GLOBAL_LINE, len(self._windows))
        self._batch_size, self._num_sites = settings.trainer.batch_size, num_sites

    def batch(self, site: int, index: int) -> Tensor:
        """(batch, sequence + 1) uint8; `site` counts from 0."""
        first = (index * self._num_sites + site) * self._batch_size
        return torch.stack([self._windows[self._order.sample(first + i)] for i in range(self._batch_size)])


class _Trainee:
    """A model with its optimizer and the built-in trainer's schedule."""

    def __init__(self, settings: RunSettings, num_steps: int) -> None:
        self.settings, self.num_steps, self.step_index = settings, num_steps, 0
        self.model = Transformer(settings.model, settings.seed)
        self.optimizer = make_optimizer(self.model, settings.trainer)

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


def _ignore(name: str, steps: int) -> None:
    del name, steps


def _data_parallel(name: str, settings: RunSettings, corpus: Corpus, num_sites: int, progress: Progress) -> Comparison:
    trainee = _Trainee(settings, settings.steps)
    before = held_out_bits_per_byte(trainee.model, corpus, settings.trainer.sequence)
    samples = _Samples(settings, corpus, num_sites)
    for index in range(settings.steps):
        trainee.step([samples.batch(site, index) for site in range(num_sites)])
        progress(name, index + 1)
    after = held_out_bits_per_byte(trainee.model, corpus, settings.trainer.sequence)
    return Comparison(name, before, after, settings.steps)


def train_alone(settings: RunSettings, corpus: Corpus, progress: Progress = _ignore) -> Comparison:
    """One site: the same steps on its own samples."""
    return _data_parallel("one site alone", settings, corpus, 1, progress)


def train_data_parallel(
    settings: RunSettings, corpus: Corpus, num_sites: int, progress: Progress = _ignore
) -> Comparison:
    """All sites' samples, gradients averaged at every step."""
    return _data_parallel("data parallel", settings, corpus, num_sites, progress)


@torch.no_grad()
def _outer_step(outer: list[Tensor], momentum: list[Tensor], gradients: list[Tensor], settings: RunSettings) -> None:
    rate, decay = settings.outer.learning_rate, settings.outer.momentum
    for value, m, g in zip(outer, momentum, gradients, strict=True):
        m.mul_(decay).add_(g)
        value.sub_(rate * (g + decay * m if settings.outer.optimizer == "nesterov" else m))


def simulate_diloco(settings: RunSettings, corpus: Corpus, num_sites: int, progress: Progress = _ignore) -> Comparison:
    """`num_sites` sites that sync every `settings.sync.every` steps; evaluates the outer parameters."""
    name = f"diloco {settings.outer.optimizer} {settings.outer.learning_rate:g}/{settings.outer.momentum:g}"
    trainees = [_Trainee(settings, settings.steps) for _ in range(num_sites)]
    samples = _Samples(settings, corpus, num_sites)
    reference = Transformer(settings.model, settings.seed)
    outer = [p.detach() for p in reference.parameters()]
    momentum = [torch.zeros_like(p) for p in outer]
    before = held_out_bits_per_byte(reference, corpus, settings.trainer.sequence)
    for first in range(0, settings.steps, settings.sync.every):
        last = min(first + settings.sync.every, settings.steps)
        for site, trainee in enumerate(trainees):
            for index in range(first, last):
                trainee.step([samples.batch(site, index)])
        with torch.no_grad():
            columns = zip(*(t.model.parameters() for t in trainees), strict=True)
            gradients = [value - torch.stack(list(local)).mean(0) for value, local in zip(outer, columns, strict=True)]
            _outer_step(outer, momentum, gradients, settings)
            for trainee in trainees:
                for local, value in zip(trainee.model.parameters(), outer, strict=True):
                    local.copy_(value)
        progress(name, last)
    after = held_out_bits_per_byte(reference, corpus, settings.trainer.sequence)
    return Comparison(name, before, after, settings.steps)
