"""What `atoll demo` is compared with, trained here and kept in recorded.json: one site alone, and data parallel."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from pathlib import Path

import torch

from atoll.cli.demo import DemoOptions
from atoll.cli.demo_report import Baselines
from atoll.cli.demo_setup import demo_settings
from atoll.cli.recorded import comparison_key, default_file, read_entries
from atoll.node.worker import data
from atoll.protocol.settings import RunSettings
from benchmarks import baselines

PROGRESS_EVERY = 50


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks record", description=__doc__)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=default_file())
    args = parser.parse_args(argv)
    options = DemoOptions(num_sites=args.sites, steps=args.steps, model=args.model, seed=args.seed)
    settings = demo_settings(options)
    torch.set_num_threads(1)
    corpus = data.load(data.source_for_run(settings.data, ()))
    alone, together = (
        baselines.train_data_parallel(settings, corpus, num_sites, progress) for num_sites in (1, args.sites)
    )
    recorded = Baselines(
        alone=round(alone.bits_per_byte_after, 4),
        data_parallel=round(together.bits_per_byte_after, 4),
        source=f"recorded: Python {platform.python_version()}, torch {torch.__version__}, {machine()}",
    )
    add_entry(args.out, settings, args.sites, recorded)
    for name, value in {"before": alone.bits_per_byte_before, **dataclasses.asdict(recorded)}.items():
        print(f"{name:<14} {value}")
    return 0


def progress(name: str, steps: int) -> None:
    if steps % PROGRESS_EVERY == 0:
        print(f"{name}: step {steps}", flush=True)


def add_entry(path: Path, settings: RunSettings, num_sites: int, figures: Baselines) -> None:
    """Replaces what was recorded for equal settings."""
    key = comparison_key(settings, num_sites)
    kept = [entry for entry in (read_entries(path) if path.exists() else []) if entry.get("key") != key]
    document = {"baselines": [*kept, {"key": key, "figures": dataclasses.asdict(figures)}]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


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
