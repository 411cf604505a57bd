"""DiLoCo (2311.08105) in one process, without a network or a codec: to choose an outer optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.node.worker import data
from atoll.node.worker.evaluate import held_out_bits_per_byte
from atoll.node.worker.model import Transformer
from atoll.protocol.settings import RunSettings
from benchmarks import baselines


@torch.no_grad()
def _outer_step(outer: list[Tensor], momentum: list[Tensor], gradients: list[Tensor], settings: RunSettings) -> None:
    rate, decay = settings.outer.learning_rate, settings.outer.momentum
    for value, m, g in zip(outer, momentum, gradients, strict=True):
        m.mul_(decay).add_(g)
        value.sub_(rate * (g + decay * m if settings.outer.optimizer == "nesterov" else m))


def simulate_diloco(
    settings: RunSettings, corpus: data.Corpus, num_sites: int, progress: baselines.Progress = baselines.ignore
) -> baselines.Comparison:
    """`num_sites` sites that sync every `settings.sync.every` steps; evaluates the outer parameters."""
    name = f"diloco {settings.outer.optimizer} {settings.outer.learning_rate:g}/{settings.outer.momentum:g}"
    trainees = [baselines.Trainee(settings, settings.steps) for _ in range(num_sites)]
    samples = baselines.Samples(settings, corpus, num_sites)
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
    return baselines.Comparison(before, after)
