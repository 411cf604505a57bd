"""What an exchange at every step costs in held-out loss: the presets with gradients beside torch's data parallel.

The built-in model over several sites in one process, equal tokens and steps. Codecs, averages and the optimizer's step
are the product's; error feedback is written out here; nothing is sent. Prints a Markdown table: held-out bits per byte,
and bytes that a site sends up and gets back, beside data parallel in fp32. One thread a process; nothing here is timed.
With the presets each site clips its own gradient, as in a run; data parallel clips the average.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from atoll.node.dataplane import kernels as outer_kernels
from atoll.node.dataplane.optim import OuterOptimizer
from atoll.node.worker import data
from atoll.node.worker.evaluate import held_out_bits_per_byte
from atoll.node.worker.model import Transformer
from atoll.node.worker.recipe import learning_rate, next_byte_loss
from atoll.protocol.codecs import bundles, kernels
from atoll.protocol.codecs.arithmetic import NOTHING, Floats
from atoll.protocol.codecs.table import BUNDLE
from atoll.protocol.messages import Commit, Member
from atoll.protocol.outer import resolved
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.presets import PRESETS
from atoll.protocol.settings import RunSettings, SyncSettings
from atoll.protocol.spec import Contribution, Way, spec_of
from benchmarks import baselines

ONE_BIT, INT4_DOWN = "onebit-adam", "onebit-adam, int4 down"
VARIANTS = {
    "adamw": ("adamw", {}),
    ONE_BIT: ("onebit-adam", {}),
    INT4_DOWN: ("onebit-adam", {"down": "int4", "error_feedback_down": 0.0}),
    "onebit-adam, one-sided": ("onebit-adam", {"error_feedback_down": 0.0}),
    "demo": ("demo", {}),
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

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.moved_bytes = 0
        """By all sites, up and down."""
        self._errors: dict[tuple[int, int], Floats] = {}  # by site, or -1 for the reducer, and tensor

    def average(self, way: Way, place: int, gradients: list[Floats], momentum: Floats, width: int) -> Floats:
        sync, beta1 = self.settings.sync, self.settings.outer.momentum
        sent = []
        for site, gradient in enumerate(gradients):
            value = gradient
            if way.contribution is Contribution.MOMENTUM:
                value = np.float32(beta1) * momentum + np.float32(1 - beta1) * gradient
            beta = 0.0 if sync.warms_up(self.step) else sync.error_feedback
            sent.append(self._coded(way.up, (site, place), value, beta, width))
        average = np.zeros_like(momentum)
        if way.down == BUNDLE:
            payload = bundles.join(average.size, sent, over_all=sync.mean_over == "all", clip=0.0)
        else:
            for part in sent:
                kernels.accumulate(part, way.up, np.float32(1 / len(sent)), average)
            payload = self._coded(way.down, (-1, place), average, way.error_beta_down, width)
        self.moved_bytes += sum(map(len, sent)) + len(payload) * len(sent)
        kernels.decode(payload, way.down, average.size, average, tokens=(1,) * len(sent))
        return average

    step = 0
    """The base of this exchange."""

    def _coded(self, codec: str, key: tuple[int, int], value: Floats, beta: float, width: int) -> bytes:
        error = self._errors.get(key, NOTHING) if beta else NOTHING
        sent = kernels.encode(codec, value, error=error, beta=np.float32(beta), width=width)
        if beta:
            whole, decoded = value + np.float32(beta) * error if error.size else value, np.empty_like(value)
            kernels.decode(sent, codec, value.size, decoded)
            self._errors[key] = whole - decoded
        return sent


def run(variant: str, seed: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Held-out bits per byte, and the bytes that a site moves a step and parameter."""
    torch.set_num_threads(1)
    corpus = data.load(data.list_files(arguments.data))
    if variant == "data parallel":
        settings = replace(settings_of("adamw", seed, arguments), sync=SyncSettings())
        return baselines.train_data_parallel(settings, corpus, arguments.sites).bits_per_byte_after, 8.0
    settings = settings_of(variant, seed, arguments)
    trainer, optimizer, sites = settings.trainer, OuterOptimizer(settings), Sites(settings)
    model, samples = Transformer(settings.model, seed), baselines.Samples(settings, corpus, arguments.sites)
    values = [p.detach().numpy().reshape(-1) for p in model.parameters()]
    slots = [[np.zeros_like(v) for _ in optimizer.slots] for v in values]
    groups = [int(p.dim() < 2) for p in model.parameters()]
    for step in range(settings.steps):
        gradients: list[list[Floats]] = []
        for site in range(arguments.sites):
            model.zero_grad(set_to_none=True)
            next_byte_loss(model, samples.batch(site, step)).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.grad_clip)
            gradients.append([p.grad.numpy().reshape(-1).copy() for p in model.parameters() if p.grad is not None])
        rate = learning_rate(trainer, step, settings.steps)
        record = Commit(
            commit=step + 1, sync=step + 1, attempt=1, term=1, payload_digest=bytes(32), run_step=step + 1,
            run_tokens=0, rates=(rate, trainer.weight_decay, rate, 0.0),
            contributors=tuple(Member(site_id=i, incarnation=1, address="", tokens=1) for i in range(arguments.sites)),
        )  # fmt: skip
        update, way, sites.step = optimizer.at(record), spec_of(settings.sync, step, 0).trainable, step
        for place, (value, own, parameter) in enumerate(zip(values, slots, model.parameters(), strict=True)):
            width = parameter.shape[-1] if parameter.dim() else 1
            momentum = own[0] if own else np.zeros_like(value)
            average = sites.average(way, place, [g[place] for g in gradients], momentum, width)
            update.apply(value, own, average, value, own, groups[place])
    num = sum(v.size for v in values) * arguments.sites * settings.steps
    return held_out_bits_per_byte(model, corpus, trainer.sequence), sites.moved_bytes / num


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
