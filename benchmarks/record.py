"""What `atoll demo` is compared with, trained here and kept in recorded.json: one site alone, and data parallel."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
from pathlib import Path

import torch

from atoll.cli.demo_evaluate import evaluate
from atoll.cli.demo_report import Baselines
from atoll.cli.demo_setup import DemoOptions, demo_settings
from atoll.cli.recorded import FILE_NAME, add_entry


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks record", description=__doc__)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name(FILE_NAME))
    args = parser.parse_args(argv)
    options = DemoOptions(num_sites=args.sites, steps=args.steps, model=args.model, seed=args.seed)
    settings = demo_settings(options)
    torch.set_num_threads(1)
    figures = evaluate(settings, (), None, compared_sites=args.sites)
    recorded = Baselines(
        alone=round(figures["alone"], 4),
        data_parallel=round(figures["data_parallel"], 4),
        source=f"recorded: Python {platform.python_version()}, torch {torch.__version__}, {machine()}",
    )
    add_entry(args.out, settings, args.sites, recorded)
    for name, value in (figures | dataclasses.asdict(recorded)).items():
        print(f"{name:<14} {value}")
    return 0


def machine() -> str:
    """The processor's name and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass  # not Linux: the short name does
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"
