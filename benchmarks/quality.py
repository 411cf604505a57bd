"""What each codec costs in held-out loss: the built-in model over several sites in one process, equal tokens.

Codecs, errors, averages and outer update are the product's kernels; nothing is sent.
Beside them data parallel and one site alone. Prints a Markdown table: held-out bits per byte, and bytes that a site
sends up and gets back a step, beside data parallel in fp32. One thread a process; nothing here is timed. With --out
also each run's curve, and a plot of them (this needs the extra `plots`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from atoll.node.dataplane import kernels as outer_kernels
from atoll.node.dataplane.trimming import trimmed_mean
from atoll.node.worker import data
from atoll.protocol import clipping
from atoll.protocol.codecs import arithmetic, bundles, kernels
from atoll.protocol.codecs.arithmetic import Floats
from atoll.protocol.codecs.table import BUNDLE
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import ROBUST, SyncSettings
from benchmarks import baselines
from benchmarks.coded import REDUCER, Coder, Key
from benchmarks.diloco import Outer, simulate_diloco

BOTH_WAYS = "sign1 both ways, error feedback"
VARIANTS: dict[str, tuple[str, float]] = {
    "fp32": ("fp32", 0), "bf16": ("bf16", 0), "int8": ("int8", 0), "int4": ("int4", 0), "e3m0": ("e3m0", 0),
    "int2": ("int2", 0), "int2, error feedback": ("int2", 1), "sign1": ("sign1", 0),
    "sign1, error feedback": ("sign1", 1), BOTH_WAYS: ("sign1", 1), "int4, error feedback": ("int4", 1),
    "topk2": ("topk2", 0.95), "topk2 over all": ("topk2", 0.95), "dct1": ("dct1", 0.95),
}  # fmt: skip
"""Codec up and beta. What comes down is in the same codec, but for those of 1 and 2 bits: int4, unless they go both
ways."""


class CodedOuter(Outer):
    """Whose contributions and averages travel."""

    def __init__(self, settings: RunSettings, named: Mapping[str, Tensor], num_hostile: int = 0) -> None:
        """The last `num_hostile` sites send their pseudo-gradient times -10."""
        super().__init__(settings, named)
        self.num_hostile = num_hostile
        self.sent_bytes = self.received_bytes = 0
        self._coder = Coder()
        self._slots = [np.zeros(p.numel(), np.float32) for p in self.values]

    def step(self, places: Sequence[int], snapshots: Sequence[Sequence[Tensor]]) -> None:
        sync, outer = self.settings.sync, self.settings.outer
        for place, locals_ in zip(places, zip(*snapshots, strict=True), strict=True):
            values = self.values[place].numpy().reshape(-1)
            sent = [self._contribution(i, place, values, x.numpy().reshape(-1)) for i, x in enumerate(locals_)]
            average, tokens = np.zeros_like(values), (1,) * len(sent)
            clip = sync.clip if sync.robust == "clip" else 0.0
            if sync.codec_down == BUNDLE:
                payload = bundles.join(values.size, sent, over_all=sync.mean_over == "all", clip=clip)
            else:
                self._average(sent, clip, average)
                key = Key(REDUCER, place)
                payload = self._coder.encode(sync.codec_down, key, average, sync.error_feedback_down)
            kernels.decode(payload, sync.codec_down, values.size, average, tokens=tokens)
            self.sent_bytes += sum(map(len, sent))
            self.received_bytes += len(payload) * len(sent)
            rate, slot = np.float32(outer.learning_rate), self._slots[place]
            outer_kernels.nesterov(values, slot, average, rate, np.float32(outer.momentum), values, slot)

    def _average(self, sent: Sequence[bytes], clip: float, out: Floats) -> None:
        sync, share = self.settings.sync, 1 / len(sent)
        arrived = np.empty((len(sent), out.size), np.float32)
        for row, part in zip(arrived, sent, strict=True):
            kernels.decode(part, sync.codec_up, out.size, row)
        norms = [arithmetic.norm(row) for row in arrived]
        if sync.robust == "trim":
            places = clipping.counted(clipping.factors(norms, sync.clip), sync.trim)
            trimmed_mean(arrived[places], [share] * len(places), sync.trim, out)
            return
        factors = clipping.factors(norms, clip) if clip else [1.0] * len(sent)
        for part, factor in zip(sent, factors, strict=True):
            kernels.accumulate(part, sync.codec_up, np.float32(share * factor), out)

    def _contribution(self, site: int, place: int, base: Floats, local: Floats) -> bytes:
        sync, num_honest = self.settings.sync, self.settings.min_sites - self.num_hostile
        if site >= num_honest:
            local = base + 10 * (base - local)
        width = self.values[place].shape[-1] if self.values[place].ndim else 1
        return self._coder.encode(sync.codec_up, Key(site, place), base - local, sync.error_feedback, width)


def settings_of(variant: str, seed: int, arguments: argparse.Namespace) -> RunSettings:
    codec, beta = VARIANTS[variant]
    down = "int4" if codec in ("int2", "sign1") and variant != BOTH_WAYS else ""
    rate, momentum = (float(part) for part in arguments.outer.split("/"))
    return RunSettings(
        run_id="quality",
        seed=seed,
        steps=arguments.steps,
        min_sites=arguments.sites,
        sync=SyncSettings(
            every=arguments.sync_every,
            codec=codec,
            down=down,
            error_feedback=beta,
            error_feedback_down=beta if variant == BOTH_WAYS else 0.0,
            robust=arguments.robust,
            clip=1.5,
            trim=2 if arguments.robust == "trim" else 1,
            mean_over="all" if variant.endswith("over all") else "senders",
        ),
        outer=OuterSettings(learning_rate=rate, momentum=momentum),
    )


@dataclass(frozen=True, slots=True)
class Found:
    variant: str
    seed: int
    bits_per_byte: float
    """Held out, after the run."""
    bytes_moved: float
    """By a site, a step and parameter, up and down."""
    curve: tuple[tuple[int, float], ...]
    """Steps, and held-out bits per byte after them."""


def run(variant: str, seed: int, arguments: argparse.Namespace) -> Found:
    torch.set_num_threads(1)
    every = arguments.sync_every * 2 if arguments.out else 0
    corpus = data.load(data.list_files(arguments.data))
    if variant in VARIANTS:
        made: list[CodedOuter] = []

        def outer_of(settings: RunSettings, named: Mapping[str, Tensor]) -> Outer:
            made.append(CodedOuter(settings, named, arguments.hostile))
            return made[0]

        settings = settings_of(variant, seed, arguments)
        found = simulate_diloco(settings, corpus, arguments.sites, outer_of=outer_of, curve_every=every)
        num = sum(p.numel() for p in made[0].values) * arguments.sites * arguments.steps
        moved = (made[0].sent_bytes + made[0].received_bytes) / num
        return Found(variant, seed, found.bits_per_byte_after, moved, found.curve)
    settings = settings_of("fp32", seed, arguments)
    num_sites = arguments.sites if variant == "data parallel" else 1
    found = baselines.train_data_parallel(settings, corpus, num_sites, curve_every=every)
    return Found(variant, seed, found.bits_per_byte_after, 8.0 if num_sites > 1 else 0.0, found.curve)


def plot(found: Sequence[Found], to: Path) -> None:
    """Mean of the seeds, by steps; beside it the result by bytes."""
    import matplotlib.pyplot as plt

    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for index, name in enumerate(dict.fromkeys(f.variant for f in found)):
        of_it = [f for f in found if f.variant == name]
        steps = [step for step, _ in of_it[0].curve]
        means = [statistics.fmean(f.curve[i][1] for f in of_it) for i in range(len(steps))]
        style = {"color": plt.get_cmap("tab20")(index % 20), "linestyle": "--" if name not in VARIANTS else "-"}
        by_step.plot(steps, means, label=name, **style)
        if of_it[0].bytes_moved:
            bits, color = statistics.fmean(f.bits_per_byte for f in of_it), style["color"]
            by_bytes.scatter([of_it[0].bytes_moved], [bits], color=color)
            by_bytes.annotate(name, (of_it[0].bytes_moved, bits), fontsize=7, xytext=(4, 3), textcoords="offset points")
    by_step.set(xlabel="steps", ylabel="held-out bits per byte", ylim=(None, 4.0))
    by_bytes.set(xlabel="bytes that a site moves, a step and parameter", ylabel="after the run", xscale="log")
    by_step.legend(fontsize=7)
    figure.savefig(to, dpi=110)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks quality", description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sync-every", type=int, default=15)
    parser.add_argument("--robust", choices=ROBUST, default="off", help="clip at 1.5 times the median, or trim two")
    parser.add_argument("--hostile", type=int, default=0, help="sites that send their pseudo-gradient times -10")
    parser.add_argument("--outer", default="1.0/0", metavar="RATE/MOMENTUM")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="variants with these names")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--data", nargs="*", default=[], metavar="PATH")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for quality.json and quality.png")
    arguments = parser.parse_args(argv)
    if arguments.out and not importlib.util.find_spec("matplotlib"):
        parser.error("--out draws curves with matplotlib: pip install -c constraints.txt -e '.[node,dev,plots]'")
    kernels.warm_up()
    outer_kernels.warm_up()
    names = [n for n in ("data parallel", "one site alone", *VARIANTS) if not arguments.only or n in arguments.only]
    with ProcessPoolExecutor(arguments.processes) as pool:
        jobs = {(n, seed): pool.submit(run, n, seed, arguments) for n in names for seed in arguments.seeds}
        print(f"| codec | {' | '.join(f'seed {seed}' for seed in arguments.seeds)} | mean | bytes |")
        print("| --- |" + " --- |" * (len(arguments.seeds) + 2))
        every_run = list[Found]()
        for name in names:
            found = [jobs[name, seed].result() for seed in arguments.seeds]
            print(f"{name} is done", file=sys.stderr)
            every_run += found
            bits = [f.bits_per_byte for f in found]
            times = f"1/{8 / found[0].bytes_moved:.0f}" if found[0].bytes_moved else ""
            print(
                f"| {name} | {' | '.join(f'{b:.3f}' for b in bits)} | {statistics.fmean(bits):.3f} | {times} |",
                flush=True,
            )
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "quality.json").write_text(json.dumps([asdict(f) for f in every_run], indent=1))
        plot(every_run, arguments.out / "quality.png")
    return 0
