"""What an exchange at every step costs in held-out loss: the presets with gradients beside torch's data parallel.

The built-in model over several sites in one process, equal tokens and steps. Codecs, errors, averages and the
optimizer's step are the product's; nothing is sent. Prints a Markdown table: held-out bits per byte,
and bytes that a site sends up and gets back, beside data parallel in fp32. One thread a process; nothing here is timed.
With the presets each site clips its own gradient, as in a run; data parallel clips the average.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from atoll.node.dataplane import kernels as outer_kernels
from atoll.node.dataplane.optim import OuterOptimizer
from atoll.node.worker import data
from atoll.node.worker.evaluate import held_out_bits_per_byte
from atoll.node.worker.local_steps import LocalWindow, WindowStart
from atoll.node.worker.model import Transformer
from atoll.node.worker.recipe import learning_rate, next_byte_loss
from atoll.protocol.codecs import bundles, kernels
from atoll.protocol.codecs.arithmetic import Floats
from atoll.protocol.codecs.table import BUNDLE
from atoll.protocol.messages import Commit, Member
from atoll.protocol.outer import resolved
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.presets import PRESETS
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import Contribution, Way, spec_of
from atoll.protocol.sync_settings import SyncSettings
from benchmarks import baselines
from benchmarks.coded import REDUCER, Coder, Key

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {}),
    "onebit-adam": ("onebit-adam", {}),
    "onebit-adam, int4 down": ("onebit-adam", {"down": "int4", "error_feedback_down": 0.0}),
    "onebit-adam, one-sided": ("onebit-adam", {"error_feedback_down": 0.0}),
    "zeroone-adam": ("zeroone-adam", {}),
    "zeroone-adam, local_doubling 25": ("zeroone-adam", {"local_doubling": 25}),
    "demo": ("demo", {}),
    "demo, dct1k4": ("demo", {"codec": "dct1k4"}),
}
"""Preset, and what is changed in `sync`."""


def settings_of(variant: str, seed: int, arguments: argparse.Namespace) -> RunSettings:
    preset, changed = VARIANTS[variant]
    tables = PRESETS[preset]
    sync = SyncSettings(**{**tables.sync, **changed})
    settings = RunSettings(
        run_id="quality", seed=seed, steps=arguments.steps, min_sites=arguments.sites, sync=sync,
        outer=OuterSettings(**{"optimizer": "auto", **tables.outer}),
    )  # fmt: skip
    return resolved(settings)


class Sites:
    """Gradients of all sites to the average that all of them apply."""

    def __init__(self, settings: RunSettings, widths: list[int]) -> None:
        """`widths`: of the rows of each tensor."""
        self.settings, self.widths = settings, widths
        self.moved_bytes = 0
        """By all sites, up and down."""
        self._coder = Coder()

    def average(self, base: int, way: Way, place: int, gradients: list[Floats], momentum: Floats) -> Floats:
        """Of the exchange with that base."""
        sync, beta1, width = self.settings.sync, self.settings.outer.momentum, self.widths[place]
        sent = []
        for site, gradient in enumerate(gradients):
            value = gradient
            if way.contribution is Contribution.MOMENTUM:
                value = np.float32(beta1) * momentum + np.float32(1 - beta1) * gradient
            beta = 0.0 if sync.moves_variance(base) else sync.error_feedback
            sent.append(self._coder.encode(way.up, Key(site, place), value, beta, width))
        average = np.zeros_like(momentum)
        if way.down == BUNDLE:
            payload = bundles.join(average.size, sent, over_all=sync.mean_over == "all", clip=0.0)
        else:
            for part in sent:
                kernels.accumulate(part, way.up, np.float32(1 / len(sent)), average)
            payload = self._coder.encode(way.down, Key(REDUCER, place), average, way.error_beta_down, width)
        self.moved_bytes += sum(map(len, sent)) + len(payload) * len(sent)
        kernels.decode(payload, way.down, average.size, average, tokens=(1,) * len(sent))
        return average


def window(  # noqa: PLR0917
    model: Transformer,
    settings: RunSettings,
    slots: list[list[Floats]],
    base: int,
    steps: range,
    batch: Callable[[int], torch.Tensor],
) -> tuple[list[Floats], tuple[float, ...]]:
    """What a site hands in after these steps on that base, and its rates: the gradient of one step, or the mean of the
    momenta of several. The parameters stay those of the base."""
    trainer, parameters = settings.trainer, list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": trainer.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    own: LocalWindow | None = None
    if settings.sync.phases.is_local(base + 1):
        moments: dict[torch.nn.Parameter, tuple[torch.Tensor, torch.Tensor]] = {}
        for parameter, (momentum, variance) in zip(parameters, slots, strict=True):
            shape = parameter.shape
            moments[parameter] = torch.from_numpy(momentum).view(shape), torch.from_numpy(variance).view(shape)
        own = LocalWindow(groups, WindowStart.on(settings, base, steps.start, moments))
    before = [p.detach().clone() for p in parameters]
    for step in steps:
        model.zero_grad(set_to_none=True)
        next_byte_loss(model, batch(step)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, trainer.grad_clip)
        rate = learning_rate(trainer, step, settings.steps)
        for group in groups:
            group["lr"] = rate
        if own is not None:
            own.step(groups, {p: p.grad for p in parameters if p.grad is not None})
    if own is None:
        sent = [p.grad.numpy().reshape(-1).copy() for p in parameters if p.grad is not None]
        return sent, tuple(group[key] for group in groups for key in ("lr", "weight_decay"))
    means = [mean.numpy().reshape(-1) for p in parameters if (mean := own.contribution(p)) is not None]
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
    return means, own.rates


def run(variant: str, seed: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Held-out bits per byte, and the bytes that a site moves a step and parameter."""
    torch.set_num_threads(1)
    corpus = data.load(data.list_files(arguments.data))
    if variant == "data parallel":
        settings = replace(settings_of("adamw", seed, arguments), sync=SyncSettings())
        return baselines.train_data_parallel(settings, corpus, arguments.sites).bits_per_byte_after, 8.0
    settings = settings_of(variant, seed, arguments)
    optimizer = OuterOptimizer(settings)
    model, samples = Transformer(settings.model, seed), baselines.Samples(settings, corpus, arguments.sites)
    values = [p.detach().numpy().reshape(-1) for p in model.parameters()]
    slots = [[np.zeros_like(v) for _ in optimizer.slots] for v in values]
    sites = Sites(settings, [p.shape[-1] if p.dim() else 1 for p in model.parameters()])
    groups = [int(p.dim() < 2) for p in model.parameters()]
    base = step = 0
    while step < settings.steps:
        steps = range(step, min(settings.steps, step + settings.sync.window_steps(0, base)))
        found = [window(model, settings, slots, base, steps, partial(samples.batch, i)) for i in range(arguments.sites)]
        rates = found[0][1]
        record = Commit(
            commit=base + 1, sync=base + 1, attempt=1, term=1, payload_digest=bytes(32), run_step=steps.stop,
            run_tokens=0, rates=rates,
            contributors=tuple(Member(site_id=i, incarnation=1, address="", tokens=1) for i in range(arguments.sites)),
        )  # fmt: skip
        update, way = optimizer.at(record), spec_of(settings.sync, base, 0).trainable
        for place, (value, own) in enumerate(zip(values, slots, strict=True)):
            momentum = own[0] if own else np.zeros_like(value)
            average = sites.average(base, way, place, [sent[place] for sent, _ in found], momentum)
            update.apply(value, own, average, value, own, groups[place])
        base, step = base + 1, steps.stop
    num = sum(v.size for v in values) * arguments.sites * settings.steps
    return held_out_bits_per_byte(model, corpus, settings.trainer.sequence), sites.moved_bytes / num


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gradient_quality", description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="variants with these names")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--data", nargs="*", default=[], metavar="PATH")
    arguments = parser.parse_args(argv)
    kernels.warm_up()
    outer_kernels.warm_up()
    names = [n for n in ("data parallel", *VARIANTS) if not arguments.only or n in arguments.only]
    with ProcessPoolExecutor(arguments.processes) as pool:
        jobs = {(n, seed): pool.submit(run, n, seed, arguments) for n in names for seed in arguments.seeds}
        print(f"| preset | {' | '.join(f'seed {seed}' for seed in arguments.seeds)} | mean | bytes |")
        print("| --- |" + " --- |" * (len(arguments.seeds) + 2))
        for name in names:
            found = [jobs[name, seed].result() for seed in arguments.seeds]
            print(f"{name} is done", file=sys.stderr)
            bits = [b for b, _ in found]
            row = " | ".join(f"{b:.3f}" for b in bits)
            print(f"| {name} | {row} | {statistics.fmean(bits):.3f} | 1/{8 / found[0][1]:.0f} |", flush=True)
    return 0
