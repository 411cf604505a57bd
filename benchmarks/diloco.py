"""DiLoCo (2311.08105), with overlap and in fragments (2501.18512), in one process, without a network or a codec: to
choose settings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.node.worker import data
from atoll.node.worker.evaluate import held_out_bits_per_byte
from atoll.node.worker.model import Transformer
from atoll.protocol.layout import Manifest, Role, TensorSpec, fragments_of
from atoll.protocol.settings import RunSettings
from benchmarks import baselines


class _Outer:
    """Values and momentum of each parameter, and the fragment that it is in."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.model = Transformer(settings.model, settings.seed)
        named = dict(self.model.named_parameters())
        specs = [TensorSpec(name=n, shape=tuple(p.shape), dtype="F32", role=Role.TRAINABLE) for n, p in named.items()]
        fragments = fragments_of(Manifest.canonical(specs), settings.sync.fragments)
        self.values = [p.detach() for p in named.values()]
        self._fragments = [fragments[name] for name in named]
        self._momentum = [torch.zeros_like(p) for p in self.values]

    def places(self, fragment: int) -> list[int]:
        """Of its parameters, or of all."""
        num = self.settings.sync.fragments
        return [i for i, own in enumerate(self._fragments) if fragment in (own, num) or num == 1]

    def step(self, places: Sequence[int], snapshots: Sequence[Sequence[Tensor]]) -> None:
        """`snapshots`: of each site, its parameters at these places."""
        rate, decay = self.settings.outer.learning_rate, self.settings.outer.momentum
        for place, local in zip(places, zip(*snapshots, strict=True), strict=True):
            value, m = self.values[place], self._momentum[place]
            gradient = value - torch.stack(list(local)).mean(0)
            m.mul_(decay).add_(gradient)
            value.sub_(rate * (gradient + decay * m if self.settings.outer.optimizer == "nesterov" else m))


def windows(settings: RunSettings) -> list[tuple[int, int]]:
    """Of each sync its fragment, and the step of its boundary; the last one is of all."""
    sync, found, step, fragment = settings.sync, list[tuple[int, int]](), 0, 0
    while step + sync.window_steps(fragment) < settings.steps:
        step += sync.window_steps(fragment)
        found.append((fragment, step))
        fragment = (fragment + 1) % sync.fragments
    return [*found, (sync.all_fragments, settings.steps)]


def simulate_diloco(
    settings: RunSettings, corpus: data.Corpus, num_sites: int, progress: baselines.Progress = baselines.ignore
) -> baselines.Comparison:
    """`num_sites` sites, each update taken as late as `settings.sync.overlap_steps` lets it; evaluates the outer
    parameters."""
    sync = settings.sync
    name = f"diloco {settings.outer.optimizer} {settings.outer.learning_rate:g}/{settings.outer.momentum:g}"
    trainees = [baselines.Trainee(settings, settings.steps) for _ in range(num_sites)]
    locals_ = [list(trainee.model.parameters()) for trainee in trainees]
    samples, outer = baselines.Samples(settings, corpus, num_sites), _Outer(settings)
    before = held_out_bits_per_byte(outer.model, corpus, settings.trainer.sequence)

    def train(until: int) -> None:
        for site, trainee in enumerate(trainees):
            for index in range(trainee.step_index, until):
                trainee.step([samples.batch(site, index)])

    for fragment, boundary in windows(settings):
        train(boundary)
        places = outer.places(fragment)
        with torch.no_grad():
            snapshots = [[local[place].clone() for place in places] for local in locals_]
            outer.step(places, snapshots)
        is_last = boundary == settings.steps
        train(boundary if is_last else min(boundary + sync.overlap_steps, settings.steps))
        with torch.no_grad():
            for local, snapshot in zip(locals_, snapshots, strict=True):
                for place, then in zip(places, snapshot, strict=True):
                    value, mine = outer.values[place], local[place]
                    mixed = sync.alpha * mine + (1 - sync.alpha) * value
                    mine.copy_(mixed if sync.merge == "mix" and not is_last else value + (mine - then))
        progress(name, boundary)
    after = held_out_bits_per_byte(outer.model, corpus, settings.trainer.sequence)
    return baselines.Comparison(before, after)
