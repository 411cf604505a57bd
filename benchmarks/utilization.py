"""What syncs cost three sites on links so thin that one takes 30 % of a window: utilization, steps/s, bytes/s at peak.

Steps of fixed length, a timer, so that the ratios are of the links alone; real training is shown beside them. The same
run without syncs, with syncs that the ranks wait for, with syncs while they train on, paced and as fast as the links
take them, and with syncs of a quarter of the model, one in flight at a time and several: that is for links whose
latency (`--rtt-s`), not rate, is longer than a quarter of a window. Each site is in a network namespace whose link is
limited, which needs root.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from atoll.node.worker.model import Transformer
from atoll.protocol.model_settings import ModelSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from benchmarks import netns
from benchmarks.utilization_figures import Figures, computed, link_bits_per_s
from benchmarks.utilization_run import Trained, Windows, measure
from tests.harness.chaos import PLAIN_WORKER

TRAINER = Path(__file__).parent / "utilization_trainer.py"
WITHOUT = "without syncs"
OVERLAP = 0.75
"""Of a window: tau, as long as which the sites may train on while they exchange."""
FRAGMENTS = 4
NAME = 20
"""Characters of the longest."""
TRAINING_EVERY = 20
STEP_GUESS_S = 0.2
FAST_BITS_PER_S = 1_000_000_000
"""So that the first parameters come at once where nothing but the length of a step is asked."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks utilization", description=__doc__)
    parser.add_argument("--parameters", type=int, default=3 << 20)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--chunk-elements", type=int, default=1 << 16)
    parser.add_argument("--every", type=int, default=40, help="H, inner steps of a window")
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--share", type=float, default=0.3, help="of a window: the sync's bytes at the link's rate")
    parser.add_argument("--rtt-s", type=float, default=0.0, help="round trip time between two sites")
    parser.add_argument("--windows", type=int, default=2, help="counted in each run")
    parser.add_argument("--rounds", type=int, default=7, help="with all runs in each")
    parser.add_argument("--training-rounds", type=int, default=1, help="the same with real training; 0: none")
    args = parser.parse_args(argv)
    if reason := netns.available():
        print(f"not measured: {reason}", file=sys.stderr)
        return 1
    run = RunSettings(
        run_id="bench",
        steps=1 << 30,
        min_sites=3,
        data="local",
        time_limits="lan",
        sync=SyncSettings(every=args.every, codec=args.codec, chunk_elements=args.chunk_elements),
    )
    _timed(args, run)
    if args.training_rounds:
        _training(args, run)
    return 0


def _timed(args: argparse.Namespace, run: RunSettings) -> None:
    tensors = ",".join(f"layers.{i}.w={args.parameters // FRAGMENTS}" for i in range(FRAGMENTS))
    worker = [sys.executable, str(PLAIN_WORKER), "--tensors", tensors, "--step-s", str(args.step_s)]
    print(f"{args.parameters} parameters, {args.codec}, a sync every {args.every} steps of {args.step_s:g} s (a timer)")
    sizes = (args.parameters // FRAGMENTS,) * FRAGMENTS
    _compare(run, Trained(worker, "exec", sizes), args.step_s, args, args.rounds)


def _training(args: argparse.Namespace, run: RunSettings) -> None:
    trained = Trained([str(TRAINER)], "python", tuple(p.numel() for p in Transformer(ModelSettings(), 1).parameters()))
    run = replace(run, sync=replace(run.sync, every=TRAINING_EVERY))
    windows = Windows(every=TRAINING_EVERY, length_s=TRAINING_EVERY * STEP_GUESS_S, num_counted=1)
    step_s = 1 / measure(modes(run)[WITHOUT], trained, FAST_BITS_PER_S, windows).steps_per_s
    print(f"\nreal training, the default model ({sum(trained.sizes)} parameters), {args.codec}, a sync every "
          f"{TRAINING_EVERY} steps of {step_s * 1e3:.0f} ms, all on this machine")  # fmt: skip
    _compare(run, trained, step_s, args, args.training_rounds)


def _compare(run: RunSettings, trained: Trained, step_s: float, args: argparse.Namespace, num_rounds: int) -> None:
    window_s = run.sync.every * step_s
    bits_per_s = link_bits_per_s(run.sync, trained.sizes, args.share * window_s)
    windows = Windows(every=run.sync.every, length_s=window_s, num_counted=args.windows)
    print(f"3 sites, links of {bits_per_s / 1e6:.2f} Mbit/s and a round trip time of {args.rtt_s * 1e3:g} ms; "
          f"{num_rounds} rounds of {args.windows} windows each:")  # fmt: skip
    print(f"{'':>{NAME}} {'utilization':>24} {'steps/s':>24} {'over without syncs':>24} {'kB/s at peak':>24}")
    _print_row("computed", [computed(run.sync, trained.sizes, bits_per_s, window_s)], None)
    found: dict[str, list[Figures]] = {name: [] for name in modes(run)}
    for _ in range(num_rounds):
        for name, settings in modes(run).items():
            found[name].append(measure(settings, trained, bits_per_s, windows, args.rtt_s))
    for name, figures in found.items():
        _print_row(name, figures, found[WITHOUT])


def modes(run: RunSettings) -> dict[str, RunSettings]:
    """By name: what is compared. The first is what the others are compared with."""
    without, overlap = (
        replace(run.sync, every=1 << 30),
        replace(run.sync, overlap_steps=round(OVERLAP * run.sync.every)),
    )
    found = {WITHOUT: without, "blocking": run.sync, "overlap": overlap, "not paced": replace(overlap, pace=False)}
    one = replace(run.sync, fragments=FRAGMENTS, overlap_steps=run.sync.every // FRAGMENTS)
    found[f"{FRAGMENTS} fragments"] = one
    found[f"{FRAGMENTS} fragments, several"] = replace(one, overlap_steps=run.sync.every)
    return {name: replace(run, sync=sync) for name, sync in found.items()}


def _print_row(name: str, figures: Sequence[Figures], without: Sequence[Figures] | None) -> None:
    ratios = [f.steps_per_s / w.steps_per_s for f, w in zip(figures, without, strict=True)] if without else []
    columns = [
        _spread([f.utilization for f in figures], 3),
        _spread([f.steps_per_s for f in figures], 2),
        _spread(ratios, 3),
        _spread([f.peak_bytes_per_s / 1e3 for f in figures], 0),
    ]
    print(f"{name:>{NAME}} {' '.join(f'{column:>24}' for column in columns)}", flush=True)


def _spread(values: Sequence[float], digits: int) -> str:
    """The median, and the range."""
    if not values:
        return ""
    middle, low, high = statistics.median(values), min(values), max(values)
    text = f"{middle:.{digits}f}"
    return text if len(values) == 1 else f"{text} ({low:.{digits}f} to {high:.{digits}f})"
