"""DiLoCo (2311.08105), with overlap and in fragments (2501.18512), in one process, without a network or a codec: to
choose settings, and what the vectors of docs/protocol.md are computed with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.node.worker import data
from atoll.node.worker.evaluate import held_out_bits_per_byte
from atoll.node.worker.model import Transformer
from atoll.protocol.layout import Manifest, Role, TensorSpec, fragments_of
from atoll.protocol.settings import RunSettings
from benchmarks import baselines


class Outer:
    """Values and momentum of each parameter, and the fragment that it is in."""

    def __init__(self, settings: RunSettings, named: Mapping[str, Tensor]) -> None:
        """`named`: changed in place."""
        self.settings = settings
        specs = [TensorSpec(name=n, shape=tuple(p.shape), dtype="F32", role=Role.TRAINABLE) for n, p in named.items()]
        fragments = fragments_of(Manifest.canonical(specs), settings.sync.fragments)
        self.values = list(named.values())
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


@dataclass(frozen=True, slots=True)
class Flight:
    """A sync that is sealed and not taken."""

    fragment: int
    boundary: int
    taken_at: int
    """The step at which its update is taken, as late as may be."""
    snapshots: Sequence[Sequence[Tensor]]
    """Of each site, its parameters of the fragment."""


def windows(settings: RunSettings) -> list[tuple[int, int]]:
    """Of each sync its fragment, and the step of its boundary; the last one is of all."""
    sync, found, step, fragment = settings.sync, list[tuple[int, int]](), 0, 0
    while step + sync.window_steps(fragment, 0) < settings.steps:
        step += sync.window_steps(fragment, 0)
        found.append((fragment, step))
        fragment = (fragment + 1) % sync.fragments
    return [*found, (sync.all_fragments, settings.steps)]


@torch.no_grad()
def follow(
    outer: Outer,
    locals_: Sequence[Sequence[Tensor]],
    train: Callable[[int], None],
    taken: Callable[[Flight], None] = lambda flight: None,
) -> None:
    """A whole run. `locals_`: of each site, its parameters, which `train` moves to a step, all sites alike, and which
    take each update as late as `overlap_steps` lets them. With more of these than a window has, several syncs are in
    flight."""
    settings, sync = outer.settings, outer.settings.sync
    in_flight: deque[Flight] = deque()

    def take() -> None:
        flight = in_flight.popleft()
        train(flight.taken_at)
        mixes = sync.merge == "mix" and flight.boundary < settings.steps
        for local, snapshot in zip(locals_, flight.snapshots, strict=True):
            for place, then in zip(outer.places(flight.fragment), snapshot, strict=True):
                value, mine = outer.values[place], local[place]
                mine.copy_(sync.alpha * mine + (1 - sync.alpha) * value if mixes else value + (mine - then))
        taken(flight)

    for fragment, boundary in windows(settings):
        while in_flight and in_flight[0].taken_at <= boundary:
            take()
        train(boundary)
        places = outer.places(fragment)
        snapshots = [[local[place].clone() for place in places] for local in locals_]
        outer.step(places, snapshots)
        taken_at = min(boundary + sync.overlap_steps, settings.steps)
        in_flight.append(Flight(fragment, boundary, taken_at, snapshots))
    while in_flight:
        take()


def simulate_diloco(
    settings: RunSettings,
    corpus: data.Corpus,
    num_sites: int,
    progress: baselines.Progress = baselines.ignore,
    outer_of: Callable[[RunSettings, Mapping[str, Tensor]], Outer] = Outer,
    *,
    curve_every: int = 0,
) -> baselines.Comparison:
    """`num_sites` sites, each update taken as late as `settings.sync.overlap_steps` lets it; evaluates the outer
    parameters."""
    name = f"diloco {settings.outer.optimizer} {settings.outer.learning_rate:g}/{settings.outer.momentum:g}"
    trainees = [baselines.Trainee(settings, settings.steps) for _ in range(num_sites)]
    samples, model = baselines.Samples(settings, corpus, num_sites), Transformer(settings.model, settings.seed)
    before = held_out_bits_per_byte(model, corpus, settings.trainer.sequence)

    @torch.enable_grad()
    def train(until: int) -> None:
        for site, trainee in enumerate(trainees):
            for index in range(trainee.step_index, until):
                trainee.step([samples.batch(site, index)])

    curve = baselines.Curve(model, corpus, settings.trainer.sequence, curve_every)

    def taken(flight: Flight) -> None:
        progress(name, flight.boundary)
        curve.at(flight.boundary)

    outer = outer_of(settings, {name: p.detach() for name, p in model.named_parameters()})
    locals_ = [[p.detach() for p in trainee.model.parameters()] for trainee in trainees]
    follow(outer, locals_, train, taken)
    after = held_out_bits_per_byte(model, corpus, settings.trainer.sequence)
    return baselines.Comparison(before, after, tuple(curve.points))
